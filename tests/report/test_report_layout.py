"""The page at the widths of screens: measured in a browser, nothing is cut and nothing overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradilocks.report.report_page import render
from gradilocks.report.run_report import report_on
from gradilocks.runfile import Run
from tests.report.browser import browser, visit
from tests.report.made_audits import made_audit
from tests.report.made_runs import NAMES, SKIPPED, header, info, made_run, made_steps

WIDTHS = (1280, 900, 500, 400)
# What is wider than its box, which tiles lie over each other, and what lies on a plot's data.
FAULTS = """() => {
    const faults = [];
    const box = (e) => e.getBoundingClientRect();
    const held = ".tiles div, .tiles dd, .verdict, .findings li, h1, h2";
    for (const e of document.querySelectorAll(held))
        if (e.scrollWidth > e.clientWidth + 1) faults.push(`cut: ${e.textContent}`);
    const tiles = [...document.querySelectorAll(".tiles dd")];
    for (const a of tiles) for (const b of tiles) {
        const [one, other] = [box(a), box(b)];
        if (a !== b && one.left < other.right - 1 && other.left < one.right - 1
            && one.top < other.bottom - 1 && other.top < one.bottom - 1)
            faults.push(`over each other: ${a.textContent}, ${b.textContent}`);
    }
    const crosses = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
        && one.top < other.bottom - 1 && other.top < one.bottom - 1;
    for (const canvas of document.querySelectorAll(".canvas")) {
        const all = (selector) => [...canvas.querySelectorAll(selector)].map(box);
        const [area] = all(".nsewdrag"), [bar] = all(".modebar");
        const nan = (canvas.layout.annotations || []).some((each) => each.name === "nan");
        const told = nan ? all(".annotation") : [];
        const keys = [...all(".legend"), ...all(".colorbar .cbfill, .colorbar text")];
        if (!area || !bar) faults.push(`not drawn: ${canvas.id}`);
        for (const other of [area, ...told, ...keys])
            if (crosses(bar, other)) faults.push(`toolbar over the plot: ${canvas.id}`);
        for (const words of told)
            for (const other of [area, ...keys])
                if (crosses(words, other)) faults.push(`words on NaN over the plot: ${canvas.id}`);
        for (const label of canvas.querySelectorAll(".xtick text, .ytick text")) {
            const tall = parseFloat(getComputedStyle(label).fontSize);
            if (tall < 11) faults.push(`tiny label: ${canvas.id}`);
            if (box(label).left < box(canvas).left - 1) faults.push(`cut: ${label.textContent}`);
        }
        const rows = all(".ytick text").sort((one, other) => one.top - other.top);
        rows.slice(1).forEach((row, at) => {
            if (row.top < rows[at].bottom - 3) faults.push(`labels over each other: ${canvas.id}`);
        });
        if (canvas.querySelectorAll(".ytick").length === 0) faults.push(`no labels: ${canvas.id}`);
    }
    if (innerWidth >= 900)
        for (const e of document.querySelectorAll(".scrolls"))
            if (e.scrollWidth > e.clientWidth + 1) faults.push("the table is cut");
    return faults;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


BLOCKS = [f"transformer.h.{i}.attn.{part}" for i in range(12) for part in ("c_attn.weight", "bias")]


def tiny_losses() -> Run:
    numbers = {"loss": 0.000123456, "scale": 2.0**-24, "norm": 1.2345e-7, "clipped": True}
    return made_run(always=lambda n: numbers, plant=dict.fromkeys(range(60, 300, 7), SKIPPED))


def two_optimizers() -> Run:
    run = made_run()
    both = [*run.steps, *made_steps(optimizer=1)]
    return replace(run, optimizers=(info(), info(1, "SGD")), steps=both)


def pages() -> dict[str, list[Run]]:
    bad = {"loss": None, "norm": None, "nan": 5}
    nan = dict.fromkeys(range(100, 301), bad)
    names = (*NAMES, "a" * 300)
    return {
        "plain": [made_run()],
        "one step": [made_run(1, detail_every=1)],
        "three steps": [made_run(3, detail_every=1)],
        "long, with an audit": [replace(made_run(5000, detail_every=50), audit=made_audit())],
        "blocks": [made_run(60, names=BLOCKS, plant=dict.fromkeys(range(41, 61), bad))],
        "numbers of many digits": [tiny_losses()],
        "diverged": [made_run(plant=nan)],
        "long names": [made_run(names=names, header=header(command=("x" * 300,)))],
        "two optimizers": [two_optimizers()],
        "side by side": [tiny_losses(), two_optimizers(), made_run(plant=nan), made_run(0)],
    }


@pytest.mark.parametrize("name", pages())
def test_nothing_is_cut_or_overlaps(chromium: Any, tmp_path: Path, name: str) -> None:
    page = tmp_path / "page.html"
    reports = [
        report_on(run, f"a-run-with-a-usual-name-{number}")
        for number, run in enumerate(pages()[name], start=1)
    ]
    page.write_text(render(reports), encoding="utf-8")
    with visit(chromium, page, width=WIDTHS[0]) as seen:
        for width in WIDTHS:
            seen.page.set_viewport_size({"width": width, "height": 900})
            # The plots follow a moment later.
            seen.page.wait_for_function(
                "width => innerWidth === width && document.documentElement.scrollWidth <= width",
                arg=width,
            )
            assert seen.page.evaluate(FAULTS) == [], f"at {width} pixels"
        assert seen.complaints == []
