"""The page as text: complete, small, and harmless whatever the names in a run file are."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradilocks.report.figures import Figure, sections
from gradilocks.report.report_page import identity, render
from gradilocks.report.run_report import Reported, main_numbers, report_on, what_ran
from gradilocks.runfile import Culprit, End, Run
from tests.report.made_audits import made_audit
from tests.report.made_runs import NAMES, SKIPPED, header, info, made_run, made_steps

EVIL = "</script><script>alert(1)</script><!--\u2028<img src=x onerror=alert(2)>&amp;%{y}"


def reported(run: Run, label: str = "run") -> Reported:
    return report_on(run, label)


def embedded(page: str) -> dict[str, dict[str, object]]:
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page)
    assert found is not None
    plots = json.loads(found[1])
    assert isinstance(plots, dict)
    return plots


def test_a_page_holds_every_plot_of_the_issue() -> None:
    plots = embedded(render([reported(made_run(always=lambda n: {"lr": 1e-3 / n}))]))
    assert list(plots) == [
        "s0-loss",
        "s0-norm",
        "s0-rate",
        "s0-scale",
        "s0-clipped",
        "s0-seconds",
        "s0-norms-0",
        "s0-zeros-0",
        "s0-updates-0",
    ]


def test_every_plot_has_a_title_a_line_on_reading_it_and_a_label() -> None:
    page = render([reported(made_run())])
    (section,) = sections([reported(made_run())])
    for figure in section.figures:
        assert f"<h3>{figure.title}</h3>" in page
        assert figure.reading in page.replace("&#39;", "'")
        assert f'id="{figure.key}"' in page
    assert page.count('role="img" aria-label="Plot: ') == len(section.figures)


def test_what_a_run_does_not_have_is_not_drawn() -> None:
    bare = {"loss": None, "limit": None, "clipped": False, "lr": None, "time": 0.0}
    page = render([reported(made_run(detail_every=0, always=lambda n: bare))])
    assert list(embedded(page)) == ["s0-norm", "s0-scale"]


def test_a_run_without_steps_has_a_page_that_says_so() -> None:
    page = render([reported(made_run(0, end=None))])
    assert "The run file has a header but no steps" in page
    assert embedded(page) == {}


def test_a_finding_says_of_how_many_steps_it_is() -> None:
    lost = {"loss": None, "loss_nonfinite": True, "nan": 1, "norm": None}
    page = render([reported(made_run(100, plant=dict.fromkeys(range(65, 101), lost)))])
    assert '<p class="evidence">36 steps</p>' in page


def test_the_page_says_what_ran() -> None:
    run = made_run(header=header(ranks=4, rank=2, hardware={"gpus": ["H200"], "memory": 2**34}))
    facts = dict(what_ran(run))
    assert facts["command"] == "train.py --lr 1e-3"
    assert facts["hardware"] == "memory 16 GiB, GPU H200"
    assert facts["ended"] == "by itself"
    assert facts["lasted"] == "1 min 0 s, from the start of the recording to its end"
    assert dict(what_ran(made_run(end=None)))["lasted"].endswith("to its last step")
    assert facts["rank"] == "2 of 4; the loss is that of rank 2"
    page = render([reported(run)])
    for value in facts.values():
        assert value in page


def test_how_long_a_run_took_is_one_number_on_the_page() -> None:
    one = reported(made_run(60, end=End(75.0, "finished", 0, None)))
    assert dict(main_numbers(one, one.tracks[0]))["lasted"] == "1 min 15 s"
    assert dict(what_ran(one.run))["lasted"].startswith("1 min 15 s, ")
    assert "ran 1 min 15 s" in render([one])


@pytest.mark.parametrize(
    ("told", "whose"),
    [(0, " (rank 0)"), (100, " (at some steps rank 0's)"), (300, "")],
)
def test_a_loss_that_other_ranks_have_not_told_of_is_the_ranks_own(told: int, whose: str) -> None:
    ranked = made_run(header=header(ranks=2), always=lambda n: {"loss_ranks": n <= told or None})
    one = reported(ranked)
    loss = dict(main_numbers(one, one.tracks[0]))["loss"]
    alone = reported(made_run())
    assert loss == dict(main_numbers(alone, alone.tracks[0]))["loss"] + whose


def test_main_numbers_are_counted_not_guessed() -> None:
    one = reported(made_run(plant={7: {**SKIPPED, "clipped": True}}))
    numbers = dict(main_numbers(one, one.tracks[0]))
    assert numbers["steps"] == "300"
    assert numbers["skipped"] == "1 (0.33 %)"
    clipped = sum(step.clipped and not step.skipped for step in one.run.steps)
    assert numbers["clipped"].startswith(f"{clipped} (")
    assert numbers["last scale"] == "2^16"


def without_scripts(page: str) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def test_the_page_of_one_run_has_tiles_and_needs_no_colours() -> None:
    page = without_scripts(render([reported(made_run(), "only")]))
    assert "<h1>only</h1>" in page
    assert '<p class="kind">Gradilocks report</p>' in page
    ((tiles),) = re.findall(r'<dl class="tiles">(.*?)</dl>', page, flags=re.DOTALL)
    assert "<dt>steps</dt><dd>300</dd>" in tiles
    assert "verdict" not in tiles
    assert '<p class="ran-short"><code>train.py --lr 1e-3</code><br>' in page
    for part in ("<table", "swatch", 'class="bear', 'class="audit"', 'class="run"'):
        assert part not in page
    assert page.count('<dl class="facts">') == 1


def test_the_page_of_several_runs_has_a_row_and_a_colour_for_each() -> None:
    page = without_scripts(render([reported(made_run(20), label) for label in ("a", "b", "c")]))
    assert "<h1>a and b and 1 more</h1>" in page
    assert "<title>a and b and 1 more · Gradilocks report</title>" in page
    assert '<p class="kind">Gradilocks report, side by side</p>' in page
    assert '<thead><tr><th scope="col">run</th><th scope="col">steps</th>' in page
    for colour, label in enumerate("abc"):
        swatch = f'<span class="swatch" data-run="{colour}" aria-hidden="true"></span>{label}'
        assert f'<th scope="row">{swatch}</th><td>20</td>' in page
        assert re.search(rf'<section class="run">\s*<h2>{re.escape(swatch)}</h2>', page)
        assert f"<h3>{swatch}</h3>" in page
    assert 'class="tiles"' not in page
    assert 'class="ran-short"' not in page


def test_several_runs_share_the_plots_and_have_a_table() -> None:
    page = render([reported(made_run(), "first"), reported(made_run(200), "second")])
    plots = embedded(page)
    names = [trace["name"] for trace in plots["s0-loss"]["traces"]]  # type: ignore[attr-defined]
    assert names == ["first", "second"]
    assert {"s0-norms-0", "s0-norms-1"} <= set(plots)
    assert page.count('<th scope="row">') == 4
    assert page.index("<h2>Main numbers</h2>") < page.index("<h2>Time and memory</h2>")


def test_several_optimizers_have_a_section_each() -> None:
    run = made_run()
    both = Run(
        run.path,
        run.header,
        (info(), info(1, "SGD")),
        [*run.steps, *made_steps(optimizer=1)],
        end=run.end,
    )
    page = render([reported(both)])
    assert "<h2>Optimizer 0 (AdamW)</h2>" in page
    assert "<h2>Optimizer 1 (SGD)</h2>" in page
    assert {"s0-loss", "s1-loss"} <= set(embedded(page))


def evil_run() -> Run:
    culprits = (Culprit(EVIL, 1, 0),)
    return made_run(
        names=(EVIL, *NAMES),
        plant={
            60: {**SKIPPED, "culprits": culprits, "scale": 1.0, "nan": 1},
            61: {**SKIPPED, "culprits": culprits, "scale": 1.0, "nan": 1},
        },
        details={"zeros": {EVIL: 0.97}},
        header=header(command=("train.py", EVIL), hardware={"cpu": EVIL, "gpus": [EVIL]}),
        end=End(1.0, "error", 1, EVIL),
    )


def test_names_cannot_leave_the_place_they_are_put_in() -> None:
    page = render([reported(evil_run(), EVIL)])
    before_plotly = page.split("<script>")[0]
    assert "alert(1)" in before_plotly
    for dangerous in ("<script>alert", "<img", "<!--", "\u2028"):
        assert dangerous not in before_plotly
    assert page.count("<script") == page.count("</script>") == 3


def test_lone_surrogates_and_control_characters_can_be_written() -> None:
    run = made_run(names=("\ud800\x00\x1b", *NAMES), details={"zeros": {"\ud800\x00\x1b": 0.97}})
    page = render([reported(run, "\udcff")])
    page.encode("utf-8")
    assert "\x00" not in page


def test_the_browser_is_told_to_run_these_scripts_only_and_to_load_nothing() -> None:
    page = render([reported(made_run())])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src &#39;none&#39;")
    assert "unsafe-eval" not in policy[1]
    assert not re.search(r'<(?:link|img|iframe)\b|\bsrc="|@import|url\(', page.split("<script>")[0])


def test_the_page_knows_its_runs() -> None:
    first, longer = reported(made_run(10)), reported(made_run(20))
    other = reported(made_run(10, header=header(started=5.0)))
    assert identity([first]) == identity([longer]) != identity([other])


@pytest.mark.parametrize(("steps", "tensors"), [(20_000, 20), (600, 900)])
def test_the_page_of_a_long_or_wide_run_stays_small(steps: int, tensors: int) -> None:
    names = tuple(f"transformer.blocks.{i}.attention.weight" for i in range(tensors))
    run = made_run(steps, names=names, detail_every=steps // 300)
    page = render([reported(run)])
    assert len(page.encode()) < 10_000_000
    assert (f"Of {steps:,} values: the line is the median" in page) is (steps > 3000)
    assert "Each column shows the largest of several" in page


def test_the_assets_are_in_the_package() -> None:
    import gradilocks.report

    room = Path(gradilocks.report.__file__).parent
    assert {path.name for path in (room / "assets").iterdir()} == {
        "audit.js",
        "page.js",
        "runs.js",
    }
    templates = {
        "audit.html",
        "audit_panel.html",
        "experiment.html",
        "page.html",
        "parts.html",
        "report.html",
        "runs.html",
        "style.css",
    }
    assert {path.name for path in (room / "templates").iterdir()} == templates


# --- axes, headings, hover -----------------------------------------------------------------------


def loss_axis(**planted: object) -> dict[str, object]:
    plots = embedded(render([reported(made_run(**planted))]))
    axis = plots["s0-loss"]["y"]
    assert isinstance(axis, dict)
    return axis


def test_losses_that_lie_far_apart_are_drawn_on_a_logarithmic_axis() -> None:
    axis = loss_axis(plant={5: {"loss": 1e9}})
    assert (axis["type"], axis["title"]) == ("log", "loss, logarithmic")
    assert loss_axis() == {"title": "loss"}
    assert "type" not in loss_axis(plant={5: {"loss": 1e9}, 6: {"loss": -1.0}})


def test_a_scale_of_one_all_along_is_not_drawn() -> None:
    unscaled = made_run(always=lambda n: {"scale": 1.0})
    assert "s0-scale" not in embedded(render([reported(unscaled)]))
    skipped = made_run(always=lambda n: {"scale": 1.0}, plant={60: SKIPPED})
    (section,) = sections([reported(skipped)])
    assert "Skipped steps" in [figure.title for figure in section.figures]


def test_unlike_optimizers_side_by_side_are_all_named() -> None:
    adamw, sgd = made_run(), made_run()
    sgd = Run(sgd.path, sgd.header, (info(0, "SGD"),), sgd.steps, end=sgd.end)
    (section,) = sections([reported(adamw, "a"), reported(sgd, "b")])
    assert section.title == "Plots: AdamW in a, SGD in b"
    (alike,) = sections([reported(adamw, "a"), reported(adamw, "b")])
    assert alike.title == ""


def test_very_long_names_are_shortened_in_the_middle_and_told_apart() -> None:
    names = ("x" * 500 + "a", "x" * 500 + "a")
    plots = embedded(render([reported(made_run(names=names, plant={60: SKIPPED}))]))
    (trace,) = plots["s0-norms-0"]["traces"]  # type: ignore[misc]
    assert len(set(trace["y"])) == 2
    assert max(map(len, trace["y"])) <= 84


# --- what is drawn, and where --------------------------------------------------------------------


def figures_of(*runs: Run) -> list[Figure]:
    made = sections([reported(run, f"run {number}") for number, run in enumerate(runs)])
    return [figure for section in made for figure in section.figures]


def measured(n: int) -> dict[str, object]:
    """A step with everything that a recorder knows of time and memory."""
    memory = {"memory": 2**30 + n, "gpu_memory": 2**31} if n % 50 == 0 else {}
    return {"waited": 0.02, **memory}


@pytest.mark.parametrize("count", [1, 2, 3, 19, 20, 60])
def test_no_plot_is_empty_and_no_place_in_the_grid_is_free(count: int) -> None:
    made = figures_of(made_run(count, detail_every=1, always=measured))
    lines = [figure for figure in made if "heat" not in figure.plot]
    for figure in lines:
        points = [[y for y in trace["y"] if y is not None] for trace in figure.plot["traces"]]
        assert max(map(len, points)) > 1, figure.title
    assert sum(not figure.wide for figure in made) % 2 == 0
    assert [figure.wide for figure in lines].count(True) <= 1
    if count == 1:  # What one step has stands in the tiles; layer by layer there is something.
        assert {figure.title for figure in made} == {
            "Gradient norm, layer by layer",
            "Share of zeros in the gradients, layer by layer",
            "Update-to-weight ratio, layer by layer",
        }


def test_a_run_without_anything_to_draw_has_no_plots_and_no_controls() -> None:
    page = without_scripts(render([reported(made_run(1, detail_every=0))]))
    assert "<h2>Plots</h2>" not in page
    assert 'class="controls"' not in page
    assert "<dt>steps</dt><dd>1</dd>" in page
    assert 'class="controls"' in render([reported(made_run(3))])


@pytest.mark.parametrize(("share", "drawn"), [(0.0, False), (0.004, False), (0.02, True)])
def test_where_hardly_a_gradient_has_a_zero_there_is_no_map_of_zeros(share, drawn) -> None:
    zeros = {"zeros": dict.fromkeys(NAMES, share)}
    assert ("s0-zeros-0" in embedded(render([reported(made_run(details=zeros))]))) is drawn


def test_a_learning_rate_that_moves_is_drawn_and_one_that_does_not_is_a_number() -> None:
    for rates, words in ((lambda n: 1e-3, "0.001"), (lambda n: n / 1e3, "0.001 → 0.08")):
        one = reported(made_run(80, always=lambda n, rates=rates: {"lr": rates(n)}))
        assert ("s0-rate" in embedded(render([one]))) is ("→" in words)
        assert dict(main_numbers(one, one.tracks[0]))["learning rate"] == words
    (figure,) = [each for each in figures_of(one.run) if each.key == "s0-rate"]
    assert figure.plot["traces"][0]["y"] == [float(f"{n / 1e3:.5g}") for n in range(1, 81)]


def test_three_points_are_marked_and_three_hundred_are_not() -> None:
    for count, mode in ((3, "lines+markers"), (300, "lines")):
        loss = embedded(render([reported(made_run(count))]))["s0-loss"]
        assert loss["traces"][0]["mode"] == mode  # type: ignore[index]


def test_every_plot_marks_where_nan_begins() -> None:
    bad = {"loss": None, "loss_nonfinite": True, "norm": None, "nan": 5}
    once, lasting = {61: {**SKIPPED, **bad}}, dict.fromkeys(range(61, 81), bad)
    for plant, words in ((once, "NaN or Inf at step 61"), (lasting, "NaN or Inf from step 61")):
        made = figures_of(made_run(80, plant=plant, always=measured))
        assert len(made) > 7
        for figure in made:
            (mark,) = figure.plot["marks"]
            assert (mark["x"], mark["words"]) == (61, words), figure.title
            assert mark["t"] == pytest.approx(6.1)
    assert not any(figure.plot["marks"] for figure in figures_of(made_run(80, plant={61: SKIPPED})))
    two = figures_of(made_run(80, plant=lasting), made_run(80), made_run(70, plant=once))
    assert [mark["run"] for mark in two[0].plot["marks"]] == [0, 2]


def test_time_and_memory_are_drawn_and_said() -> None:
    run = made_run(200, always=measured, header=header(settings={"per_step": {"tokens": 512}}))
    made = {figure.title: figure.plot["traces"] for figure in figures_of(run)}
    (seconds,), (rate,) = made["Step time"], made["Tokens a second"]
    assert seconds["y"][:2] == [None, pytest.approx(0.1)]
    assert rate["y"][5] == pytest.approx(5120, rel=1e-4)
    (between,) = made["Share of time between steps"]
    assert between["y"] == pytest.approx([0.2] * len(between["y"]), rel=1e-3)
    memory, gpu = made["Peak memory"]
    assert memory["x"] == gpu["x"] == [50, 100, 150, 200]
    assert gpu["y"] == [2.0] * 4
    page = without_scripts(render([reported(run)]))
    for name, value in (
        ("step time", "100 ms"),
        ("tokens/s", "5,120"),
        ("between steps", "20 %"),
        ("peak memory", "1 GiB"),
        ("peak GPU memory", "2 GiB"),
    ):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page


def test_of_several_ranks_the_memory_is_said_to_be_that_of_one() -> None:
    one = reported(made_run(200, always=measured, header=header(rank=2, ranks=4)))
    assert one.resources is not None
    assert dict(one.resources.numbers())["peak memory"] == "1 GiB (rank 2)"
    (figure,) = [each for each in figures_of(one.run) if each.key == "s0-memory"]
    assert "the process of rank 2 has held" in figure.reading


def test_what_is_not_known_of_time_and_memory_is_not_said() -> None:
    page = without_scripts(render([reported(made_run())]))
    assert "<dt>step time</dt>" in page
    for name in ("between steps", "peak memory", "peak GPU memory"):
        assert name not in page


def test_of_several_optimizers_the_whole_run_is_drawn_once() -> None:
    run = made_run(60, always=measured)
    second = made_steps(30, optimizer=1, always=lambda n: {"waited": 0.01, "time": n * 0.2})
    steps = sorted([*run.steps, *second], key=lambda step: step.time)
    both = Run(run.path, run.header, (info(), info(1, "SGD")), steps, end=run.end)
    *_, whole = sections([reported(both)])
    assert whole.title == "The whole run"
    between = next(figure for figure in whole.figures if figure.key == "run-between")
    # What lay before the steps of either counts, along those of the one that stepped more often.
    assert between.plot["traces"][0]["y"][1] == pytest.approx(0.25, abs=0.01)
    assert "of optimizer 0 (AdamW)" in whole.figures[0].reading
    page = without_scripts(render([reported(both)]))
    assert page.count("<dt>between steps</dt>") == 1


def test_what_a_script_logs_is_a_curve_of_its_own() -> None:
    run = made_run(100)
    points = [(10, 0.5), (20, None), (30, 0.75), (90, math.inf)]
    logs = [
        SimpleNamespace(step=step, time=step / 10, values={"val/accuracy": value})
        for step, value in points
    ]
    logs.append(SimpleNamespace(step=95, time=9.5, values={"once": 1.0}))
    object.__setattr__(run, "logs", logs)
    (figure,) = [each for each in figures_of(run) if "logged" in each.key]
    (trace,) = figure.plot["traces"]
    assert figure.title == "val/accuracy"
    assert (trace["x"], trace["y"]) == ([10, 20, 30, 90], [0.5, None, 0.75, None])
    assert trace["meta"]["t"] == pytest.approx([1.0, 2.0, 3.0, 9.0])


def test_the_panel_of_an_audit_comes_before_numbers_findings_and_plots() -> None:
    run = replace(made_run(60), audit=made_audit())
    page = without_scripts(render([reported(run)]))
    parts = ('class="verdict', 'class="audit"', "<h2>The run</h2>", "<dt>steps</dt>", "<h2>Plots")
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_a_huge_number_is_shown_by_its_size() -> None:
    page = render([reported(made_run(plant={100: {"norm": 1e37}}))])
    assert "largest factor 1.7" in page
    assert "e+37" in page
    assert "0,000,000,000" not in page
