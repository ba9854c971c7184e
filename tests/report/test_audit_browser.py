"""An audit's panel in a real browser: windows drawn in place, switches, a table that sorts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradilocks.lab import AuditRecord
from gradilocks.report.audit_page import write_audit_page
from gradilocks.report.formatting import percent
from gradilocks.report.report_page import render
from gradilocks.report.run_report import report_on
from tests.report.browser import browser, visit
from tests.report.made_audits import FORMATS, gradients, made_audit
from tests.report.made_runs import made_run

EVIL = "</script><script>alert(1)</script><!--\u2028<img src=x onerror=alert(2)>"
COLUMNS = ("lost", "subnormal", "overflow")
# Where the edge of a name is on the screen, and where the same place of the axis is.
EDGES = """([id, name]) => {
    const canvas = document.getElementById(id);
    const xaxis = canvas._fullLayout.xaxis;
    const edge = canvas._fullLayout.shapes.find((shape) => shape.name === name);
    const drawn = canvas.querySelector(`[data-index="${edge._index}"]`).getBoundingClientRect();
    const area = canvas.querySelector(".nsewdrag").getBoundingClientRect();
    return [edge.x0, xaxis.p2l(drawn.x + drawn.width / 2 - area.x)];
}"""
TABLE = """() => [...document.querySelectorAll(".modules tbody tr")].map(
    (row) => [...row.cells].map((cell) => cell.textContent.trim()))"""
FAULTS = """() => {
    const faults = [];
    const held = ".audit h2, .audit h3, .tiles dd, .verdict, .switch label, figcaption, .canvas";
    for (const e of document.querySelectorAll(held))
        if (e.scrollWidth > e.clientWidth + 1) faults.push(`cut: ${e.className} ${e.textContent}`);
    for (const e of document.querySelectorAll(".canvas")) {
        const figure = e.closest("figure").getBoundingClientRect();
        const drawn = e.querySelector(".main-svg").getBoundingClientRect();
        if (drawn.bottom > figure.bottom + 1 || drawn.right > figure.right + 1)
            faults.push(`out of its frame: ${e.id}`);
    }
    if (innerWidth >= 900)
        for (const e of document.querySelectorAll(".scrolls"))
            if (e.scrollWidth > e.clientWidth + 1) faults.push("a table is cut");
    return faults;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return made_audit()


@pytest.fixture(scope="module")
def page(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "audit.html"
    write_audit_page(path, AuditRecord.from_plain(plain), title="train.py")
    return path


def choose(seen: Any, label: str) -> None:
    """Picks a radio button with the keyboard, and waits until what it changes is drawn."""
    seen.page.get_by_role("radio", name=label).focus()
    seen.page.keyboard.press("Space")
    seen.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def test_the_panel_is_drawn_without_a_complaint(chromium: Any, page: Path) -> None:
    with visit(chromium, page) as seen:
        assert seen.page.locator("h1").inner_text() == "train.py"
        for canvas in ("a0-window", "a0-modules"):
            assert seen.page.locator(f"#{canvas} .main-svg").first.is_visible()
        assert "Train in fp16" in seen.page.locator(".verdict").inner_text()
        names = seen.page.locator("#a0-window .annotation-text").all_text_contents()
        names = [name.replace("\u200b20\u200b", "^20") for name in names]  # as plotly.js raises
        assert [n for n in names if n.startswith("At scale")] == ["At scale 1", "At scale 2^20"]
        assert sum("subnormal" in name for name in names) == 2
        assert seen.complaints == []


def test_the_edges_lie_on_the_right_exponents(
    chromium: Any, page: Path, plain: dict[str, Any]
) -> None:
    scales = {each["name"]: each["scale"] for each in plain["formats"]}
    with visit(chromium, page) as seen:
        for name in ("fp8 e5m2", "fp8 e4m3", "fp16"):
            _, largest, smallest_normal, smallest_subnormal = FORMATS[name]
            shift = math.log2(scales[name])
            choose(seen, name)
            for edge, value in (
                ("edge subnormal", smallest_subnormal / 2),
                ("edge normal", smallest_normal),
                ("edge overflow", largest),
            ):
                # A pixel of these pictures is less than a tenth of an exponent.
                at = math.log2(value)
                said, drawn = seen.page.evaluate(EDGES, ["a0-window", edge])
                assert (said, drawn) == pytest.approx((at, at), abs=0.1)
                said, drawn = seen.page.evaluate(EDGES, ["a0-modules", edge])
                assert (said, drawn) == pytest.approx((at - shift, at - shift), abs=0.1)
        assert seen.complaints == []


def test_the_switch_changes_pictures_words_and_table_and_back(
    chromium: Any, page: Path, plain: dict[str, Any]
) -> None:
    rows = "document.getElementById('a0-window')._fullLayout._subplots.yaxis.length"
    with visit(chromium, page) as seen:
        first = seen.page.evaluate(TABLE)
        for form in plain["formats"][1:]:
            name = form["name"]
            choose(seen, name)
            assert seen.page.evaluate(rows) == (1 if form["scale"] == 1 else 2)
            assert seen.page.locator(".format-words").inner_text() == form["words"]
            assert seen.page.locator(".shown-format").inner_text() == name
            assert seen.page.locator(".modules .kept").count() == len(form["keep"])
            for module, row in zip(plain["modules"], seen.page.evaluate(TABLE), strict=True):
                fate = module["fates"][name]
                assert row[1:4] == [percent(fate["unscaled"][c]) for c in COLUMNS]
                assert row[5:8] == [percent(fate["scaled"][c]) for c in COLUMNS]
                assert float(row[8].replace("−", "-")) == pytest.approx(
                    fate["scaled"]["headroom"], abs=0.06
                )
        choose(seen, "fp16")
        assert seen.page.evaluate(TABLE) == first
        assert seen.complaints == []


def test_the_other_switch_shows_one_kind_of_gradients(chromium: Any, page: Path) -> None:
    count = """() => document.getElementById("a0-modules").data[0].customdata
        .map((row) => row.filter((share) => share !== null).length)"""
    with visit(chromium, page) as seen:
        everything = seen.page.evaluate(count)
        choose(seen, "parameter gradients")
        parameters = seen.page.evaluate(count)
        assert parameters[2] == 0  # The norm has no gradient of its own here.
        assert all(
            0 < some < every for some, every in zip(parameters[:2], everything, strict=False)
        )
        assert seen.page.locator(".shown-format").inner_text() == "fp16"
        assert seen.complaints == []


def test_the_table_sorts_by_keyboard_and_says_so(
    chromium: Any, page: Path, plain: dict[str, Any]
) -> None:
    lost = {m["name"]: m["fates"]["fp16"]["unscaled"]["lost"] for m in plain["modules"]}
    names = """() => [...document.querySelectorAll(".modules tbody th")].map(
        (head) => head.firstChild.textContent.trim())"""
    with visit(chromium, page) as seen:
        button = seen.page.locator(".modules .sort", has_text="lost").first
        head = seen.page.locator(".modules thead tr:last-child th").first
        button.focus()
        for direction, order in (
            ("descending", sorted(lost, key=lambda name: -lost[name])),
            ("ascending", sorted(lost, key=lambda name: lost[name])),
            (None, list(lost)),
        ):
            seen.page.keyboard.press("Enter")
            assert head.get_attribute("aria-sort") == direction
            assert seen.page.evaluate(names) == order
        assert seen.complaints == []


def test_pointing_at_a_cell_names_module_magnitude_and_share(chromium: Any, page: Path) -> None:
    with visit(chromium, page) as seen:
        box = seen.inside("a0-modules")
        x, y = box["x"] + box["width"] * 0.55, box["y"] + box["height"] / 2
        seen.page.mouse.move(x - 5, y)
        seen.page.mouse.move(x, y, steps=3)
        seen.page.locator("#a0-modules .hoverlayer text").first.wait_for(timeout=10_000)
        said = seen.page.locator("#a0-modules .hoverlayer").text_content()
        assert "blocks.0.norm" in said
        assert "% of its gradients" in said
        assert seen.complaints == []


def test_modules_called_by_numbers_are_named_beside_their_own_rows(
    chromium: Any, tmp_path: Path
) -> None:
    path = tmp_path / "audit.html"
    given = dict(zip(("0", "2", "5", "1"), gradients(4).values(), strict=True))
    write_audit_page(path, AuditRecord.from_plain(made_audit(given)), title="train.py")
    with visit(chromium, path) as seen:
        labels = seen.page.locator("#a0-modules .ytick text").all()
        heights = {label.text_content(): label.bounding_box()["y"] for label in labels}
        assert sorted(heights, key=lambda name: heights[name]) == ["0", "2", "5", "1"]
        assert len(set(heights.values())) == 4
        assert seen.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_windows_follow_the_theme(chromium: Any, page: Path, dark: bool) -> None:
    colours = """() => {
        const { layout, data } = document.getElementById("a0-window");
        return [...layout.shapes.map((s) => s.fillcolor || s.line.color), data[0].fillcolor];
    }"""
    with visit(chromium, page, dark=dark) as seen:
        choose(seen, "fp8 e5m2")
        before = seen.page.evaluate(colours)
        seen.page.locator("#theme").click()
        seen.page.wait_for_function(
            "c => document.getElementById('a0-window').data[0].fillcolor !== c", arg=before[-1]
        )
        after = seen.page.evaluate(colours)
        assert len(after) == len(before)
        assert all(one != other for one, other in zip(before, after, strict=True))
        assert seen.page.locator(".shown-format").inner_text() == "fp8 e5m2"
        assert seen.complaints == []


@pytest.mark.parametrize("modules", [1, 300])
def test_nothing_is_cut_at_any_width(chromium: Any, tmp_path: Path, modules: int) -> None:
    path = tmp_path / "audit.html"
    given = gradients(modules, 200)
    given["a" * 200] = given.pop("head")
    write_audit_page(
        path, AuditRecord.from_plain(made_audit(given)), title="a-script-with-a-long-name.py"
    )
    with visit(chromium, path, width=1280) as seen:
        for width in (900, 400):
            seen.page.set_viewport_size({"width": width, "height": 900})
            seen.page.wait_for_function(
                "width => innerWidth === width && document.documentElement.scrollWidth <= width",
                arg=width,
            )
            for name in ("bf16", "fp8 e4m3"):
                choose(seen, name)
                # The plots follow a moment later.
                with suppress(Exception):
                    seen.page.wait_for_function(f"() => !({FAULTS})().length", timeout=2_000)
                assert seen.page.evaluate(FAULTS) == [], f"{name} at {width} pixels"
        assert seen.complaints == []


def test_a_report_shows_the_panel_of_each_run_by_itself(
    chromium: Any, tmp_path: Path, plain: dict[str, Any]
) -> None:
    path = tmp_path / "page.html"
    runs = [replace(made_run(), audit=plain), replace(made_run(200), audit=plain)]
    reports = [report_on(run, f"run {at}") for at, run in enumerate(runs)]
    path.write_text(render(reports), encoding="utf-8")
    with visit(chromium, path) as seen:
        assert seen.page.locator("#s0-loss .main-svg").first.is_visible()
        seen.page.locator("input[name=a1-format][value=bf16]").focus()
        seen.page.keyboard.press("Space")
        assert seen.page.locator(".shown-format").all_inner_texts() == ["fp16", "bf16"]
        assert seen.complaints == []


def test_malicious_names_do_nothing(chromium: Any, tmp_path: Path, plain: dict[str, Any]) -> None:
    given = gradients()
    given[EVIL] = given.pop("head")
    audit = made_audit(given, precision=EVIL)
    for form in audit["formats"]:
        form |= {"words": EVIL, "keep": [EVIL]}
    audit["recommendation"] |= {"words": [EVIL], "keep": [EVIL]}
    path = tmp_path / "audit.html"
    write_audit_page(path, AuditRecord.from_plain(audit), title=EVIL)
    with visit(chromium, path) as seen:
        choose(seen, "bf16")
        assert seen.page.locator("img").count() == 0
        assert seen.page.locator(".format-words").inner_text() == EVIL.replace("\u2028", "\\u2028")
        assert seen.complaints == []


def test_without_script_words_and_tables_are_there(chromium: Any, page: Path) -> None:
    with visit(chromium, page, script=False) as seen:
        text = seen.page.locator("body").inner_text()
        assert "Train in fp16" in text
        assert "keep in higher precision" in text
        assert not seen.page.locator(".switch").first.is_visible()
