"""The page in a real browser: it draws, answers to the mouse, changes theme, fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradilocks.report.report_page import render
from gradilocks.report.run_report import report_on
from gradilocks.runfile import Culprit, End, Run, read_run
from tests.report.browser import Visit, browser, visit
from tests.report.made_runs import NAMES, SKIPPED, header, info, made_run, made_steps

EVIL = "</script><script>alert(1)</script><!--\u2028<img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def page_of(folder: Path, *runs: Run) -> Path:
    path = folder / "page.html"
    labels = [f"run {number}" for number in range(1, len(runs) + 1)]
    reports = [report_on(run, label) for run, label in zip(runs, labels, strict=True)]
    path.write_text(render(reports), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def real_page(tmp_path_factory: pytest.TempPathFactory, healthy_file: Path) -> Path:
    return page_of(tmp_path_factory.mktemp("page"), read_run(healthy_file))


def test_a_real_run_is_drawn_without_a_complaint(chromium: Any, real_page: Path) -> None:
    with visit(chromium, real_page) as seen:
        assert seen.page.locator(".canvas .main-svg").count() >= 7
        assert seen.page.locator(".verdict").inner_text().endswith("Nothing wrong in 120 steps.")
        assert seen.complaints == []


def test_pointing_at_a_line_and_a_cell_shows_their_numbers(chromium: Any, real_page: Path) -> None:
    with visit(chromium, real_page) as seen:
        for canvas, words in (("s0-loss", "step"), ("s0-norms-0", "norm")):
            box = seen.inside(canvas)
            x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            seen.page.mouse.move(x - 5, y)
            seen.page.mouse.move(x, y, steps=3)
            tip = seen.page.locator(f"#{canvas} .hoverlayer text").first
            tip.wait_for(timeout=10_000)
            assert words in seen.page.locator(f"#{canvas} .hoverlayer").text_content()
        assert seen.complaints == []


def test_dragging_zooms_every_plot_of_the_section_and_a_double_click_undoes_it(
    chromium: Any, real_page: Path
) -> None:
    with visit(chromium, real_page) as seen:
        before = {canvas: seen.range_of(canvas) for canvas in ("s0-loss", "s0-norms-0")}
        box = seen.inside("s0-loss")
        y = box["y"] + box["height"] / 2
        seen.page.mouse.move(box["x"] + box["width"] * 0.25, y)
        seen.page.mouse.down()
        seen.page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=6)
        seen.page.mouse.up()
        seen.page.wait_for_function(
            "before => document.getElementById('s0-norms-0').layout.xaxis.range[0] > before",
            arg=before["s0-norms-0"][0] + 20,
        )
        low, high = seen.range_of("s0-loss")
        assert before["s0-loss"][0] < low < high < before["s0-loss"][1]
        assert seen.range_of("s0-norms-0") == pytest.approx([low, high])
        seen.page.mouse.dblclick(box["x"] + box["width"] / 2, y)
        for canvas, whole in before.items():
            seen.page.wait_for_function(
                "([id, to]) => Math.abs(window[id].layout.xaxis.range[1] - to) < 1",
                arg=[canvas, whole[1]],
            )
        assert seen.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_follows_the_system_and_the_button_switches_page_and_plots(
    chromium: Any, real_page: Path, dark: bool
) -> None:
    colours = """() => {
        const canvas = document.getElementById("s0-norm");
        const svg = document.querySelector("#s0-norm .main-svg");
        return {
            page: getComputedStyle(document.body).backgroundColor,
            plot: getComputedStyle(svg).backgroundColor,
            line: canvas.data[0].line.color,
            text: canvas.layout.font.color,
            heat: JSON.stringify(document.getElementById("s0-updates-0").data[0].colorscale),
        };
    }"""
    with visit(chromium, real_page, dark=dark) as seen:
        first = seen.page.evaluate(colours)
        assert (first["page"] == "rgb(20, 22, 26)") is dark
        button = seen.page.get_by_role(
            "button", name=f"Switch to the {'light' if dark else 'dark'} theme"
        )
        button.focus()
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_function(
            "before => document.getElementById('s0-norm').layout.font.color !== before",
            arg=first["text"],
        )
        second = seen.page.evaluate(colours)
        assert all(first[part] != second[part] for part in first), (first, second)
        seen.page.reload()
        assert seen.page.evaluate("document.documentElement.dataset.theme") == (
            "light" if dark else "dark"
        )
        assert seen.complaints == []


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_nothing_scrolls_sideways(chromium: Any, tmp_path: Path, width: int) -> None:
    names = (*NAMES, "a" * 300)
    run = made_run(
        names=names,
        details={"zeros": {names[-1]: 0.97}},
        header=header(command=("train.py", "--long=" + "x" * 300)),
    )
    with visit(chromium, page_of(tmp_path, run), width=width) as seen:
        across = seen.page.evaluate("document.documentElement.scrollWidth")
        assert across <= width
        assert seen.complaints == []


def test_malicious_names_do_nothing(chromium: Any, tmp_path: Path) -> None:
    culprits = (Culprit(EVIL, 1, 0),)
    run = made_run(
        names=(EVIL, *NAMES),
        plant={60: {**SKIPPED, "culprits": culprits, "scale": 1.0, "nan": 1}},
        details={"zeros": {EVIL: 0.97}},
        header=header(command=("train.py", EVIL), hardware={"cpu": EVIL, "gpus": [EVIL]}),
        end=End(1.0, "error", 1, EVIL),
    )
    path = tmp_path / "page.html"
    path.write_text(render([report_on(run, EVIL), report_on(run, EVIL + "2")]), encoding="utf-8")
    with visit(chromium, path) as seen:
        assert seen.page.locator("script").count() == 3
        assert seen.page.locator("img").count() == 0
        box = seen.inside("s0-norms-0")
        seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 4)
        seen.page.mouse.move(box["x"] + box["width"] / 2 + 3, box["y"] + 4, steps=3)
        seen.page.locator("#s0-norms-0 .hoverlayer text").first.wait_for(timeout=10_000)
        tip = seen.page.locator("#s0-norms-0 .hoverlayer").text_content()
        assert "<script>alert(1)</script>" in tip  # Shown as it is, and only shown.
        assert seen.page.locator("img").count() == 0
        assert seen.complaints == []


def test_the_buttons_of_a_plot_are_these_and_none_sends_anything_anywhere(
    chromium: Any, real_page: Path
) -> None:
    allowed = ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]
    with visit(chromium, real_page) as seen:
        canvases = seen.page.locator(".canvas").count()
        titles = seen.page.eval_on_selector_all(
            ".modebar-btn", "buttons => buttons.map(b => b.dataset.title)"
        )
        assert [t.replace(" as a png", " as a PNG") for t in titles] == allowed * canvases
        seen.page.evaluate("() => { window.open = () => { throw new Error('opened'); }; }")
        for button in seen.page.locator("#s0-loss .modebar-btn").all()[1:]:
            button.click(force=True)
        links = seen.page.eval_on_selector_all("a, form", "found => found.map(f => f.outerHTML)")
        assert links == []
        addresses = seen.page.evaluate(
            "[...document.querySelectorAll('.canvas')].map(c => c._context.plotlyServerURL)"
        )
        assert set(addresses) == {""}
        assert seen.complaints == []


# What plotly.js was given of one trace of a plot.
TRACE = """([id, at]) => {
    const {x, y, fill, opacity, line} = window[id].data.at(at);
    return {x, y, fill, opacity, line};
}"""


def choose(seen: Visit, *, across: str = "steps", smoothing: float = 0.0) -> None:
    """Sets the controls above the plots, as a reader does."""
    seen.page.get_by_role("radio", name=across).check()
    seen.page.locator("#smoothing").fill(str(smoothing))


def test_the_plots_can_be_drawn_along_time(chromium: Any, tmp_path: Path) -> None:
    bad = {"loss": None, "norm": None, "nan": 5}
    run = made_run(3000, detail_every=100, plant=dict.fromkeys(range(2401, 3001), bad))
    ranges = "[...document.querySelectorAll('.canvas')].map(c => c.layout.xaxis.range.map(Number))"
    with visit(chromium, page_of(tmp_path, run)) as seen:
        by_step = seen.page.evaluate(ranges)
        assert all(each == by_step[0] for each in by_step)
        assert by_step[0][0] <= 1 < 3000 <= by_step[0][1]
        choose(seen, across="time")
        titles = "[...document.querySelectorAll('.canvas')].map(c => c.layout.xaxis.title.text)"
        assert set(seen.page.evaluate(titles)) == {"minutes of training"}
        by_time = seen.page.evaluate(ranges)
        assert all(each == by_time[0] for each in by_time)
        assert by_time[0][1] == pytest.approx(310 / 60, rel=0.03)
        heat = seen.page.evaluate("window['s0-norms-0'].data[0].x")
        assert heat[0] == pytest.approx(10 / 60)
        marks = "[...document.querySelectorAll('.canvas')].map(c => c.layout.shapes.map(s => s.x0))"
        for marked in seen.page.evaluate(marks):
            assert marked == [pytest.approx(2401 / 600)]
        choose(seen, across="steps")
        assert seen.page.evaluate(ranges) == by_step
        assert seen.complaints == []


def test_smoothing_draws_a_running_mean_over_the_values(chromium: Any, real_page: Path) -> None:
    with visit(chromium, real_page) as seen:
        own = seen.page.evaluate(TRACE, ["s0-loss", -1])
        choose(seen, smoothing=0.9)
        assert seen.page.locator(".controls output").inner_text() == "0.90"
        behind, smooth = (seen.page.evaluate(TRACE, ["s0-loss", at]) for at in (0, 1))
        assert (behind["y"], behind["opacity"]) == (own["y"], 0.3)
        mean = weight = 0.0
        for value, shown in zip(own["y"], smooth["y"], strict=True):
            mean, weight = 0.9 * mean + 0.1 * value, 0.9 * weight + 0.1
            assert shown == pytest.approx(mean / weight)
        scale = seen.page.evaluate("window['s0-scale'].data.length")
        choose(seen)
        assert seen.page.evaluate(TRACE, ["s0-loss", -1]) == own
        assert seen.page.evaluate("window['s0-scale'].data.length") == scale
        assert seen.complaints == []


def test_a_long_run_is_a_median_with_a_band_and_gaps_stay_gaps(
    chromium: Any, tmp_path: Path
) -> None:
    gap = {number: {"loss": None} for number in range(2000, 3000)}
    run = made_run(6000, detail_every=0, plant={**gap, 4000: {"loss": 30.0}})
    with visit(chromium, page_of(tmp_path, run)) as seen:
        band, line = (seen.page.evaluate(TRACE, ["s0-loss", at]) for at in (0, 1))
        assert (band["fill"], band["line"]["width"]) == ("toself", 0)
        assert max(y for y in band["y"] if y is not None) == 30.0
        assert max(y for y in line["y"] if y is not None) < 5
        # Two parts, each a closed ring; nothing is drawn across the gap.
        assert band["y"].count(None) == 2
        assert not [x for x in band["x"] if x is not None and 2050 < x < 2950]
        box = seen.inside("s0-loss")
        x, y = box["x"] + box["width"] / 5, box["y"] + box["height"] / 2
        seen.page.mouse.move(x - 5, y)
        seen.page.mouse.move(x, y, steps=3)
        seen.page.locator("#s0-loss .hoverlayer text").first.wait_for(timeout=10_000)
        told = seen.page.locator("#s0-loss .hoverlayer").text_content()
        assert " to " in told
        assert seen.complaints == []


def test_a_name_with_dollar_signs_is_no_mathematics(chromium: Any, tmp_path: Path) -> None:
    names = ("$x^2$", *NAMES)
    with visit(chromium, page_of(tmp_path, made_run(names=names))) as seen:
        assert "$x^2$" in seen.page.locator("#s0-norms-0").text_content()
        maths = "[...document.querySelectorAll('.canvas')].map(c => c._context.typesetMath)"
        assert not any(seen.page.evaluate(maths))
        assert seen.complaints == []


def test_several_runs_and_optimizers_are_drawn(chromium: Any, tmp_path: Path) -> None:
    run = made_run(plant=dict.fromkeys(range(60, 200, 20), SKIPPED))
    two = Run(
        run.path,
        run.header,
        (info(), info(1, "SGD")),
        [*run.steps, *made_steps(optimizer=1)],
        end=run.end,
    )
    with visit(chromium, page_of(tmp_path, two, made_run(200), made_run(0))) as seen:
        assert seen.page.locator("#s0-loss .legend .traces").count() == 2
        swatches = seen.page.evaluate(
            "[...new Set([...document.querySelectorAll('.swatch')].map(s => s.style.background))]"
        )
        assert len(swatches) == 3
        assert seen.complaints == []


def test_without_script_the_findings_are_there_and_the_plots_are_explained(
    chromium: Any, tmp_path: Path
) -> None:
    with visit(chromium, page_of(tmp_path, made_run()), script=False) as seen:
        text = seen.page.locator("body").inner_text()
        assert "Healthy" in text
        assert "The plots need JavaScript" in text


def test_paper_is_light(chromium: Any, real_page: Path) -> None:
    with visit(chromium, real_page, dark=True) as seen:
        seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert seen.style("body", "background-color") == "rgb(250, 249, 246)"
        seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert seen.style("body", "background-color") == "rgb(20, 22, 26)"
        assert len(seen.page.pdf()) > 10_000
        assert seen.complaints == []
