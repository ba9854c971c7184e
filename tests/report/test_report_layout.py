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
from tests.report.made_runs import NAMES, SKIPPED, header, info, made_run, made_steps

WIDTHS = (1280, 900, 400)
# What is wider than its box, and which tiles lie over each other.
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
    if (innerWidth >= 900)
        for (const e of document.querySelectorAll(".scrolls"))
            if (e.scrollWidth > e.clientWidth + 1) faults.push("the table is cut");
    return faults;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


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
