"""The page and its plots: what it shows, hostile names, and how it looks in a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradilocks.view import figures, report, runfile
from gradilocks.view.findings import find
from view import made_runs as made

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e{{7*7}}"


def scaled_and_clipped(step: int) -> dict[str, Any]:
    detail = {"norms": [0.5, 0.1], "zeros": [0.0, step / 300], "updates": [1e-3, 2e-3]} if step % 10 == 1 else {}
    return {
        "scale": 2.0 ** (16 + step // 100),
        "limit": 0.6,
        "clipped": step % 4 == 3,
        "lr": 1e-3 * (1 + step),
        **detail,
    }


def write_run(path: Path, *, label: str = "train.py --lr 3e-4", **options: Any) -> Path:
    log = [{"kind": "log", "step": step, "values": {"accuracy": step / 400}} for step in range(0, 300, 50)]
    steps = made.steps(**{"always": scaled_and_clipped, **options})
    lines = [made.header(label=label, config={"data": {"batch": 32}}), made.optimizer(), *steps, *log, made.end()]
    return made.write(path, lines)


def captions(figure: Any) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations]


# --- content ----------------------------------------------------------------------------------------------------------


def test_the_page_begins_with_the_verdict(tmp_path: Path) -> None:
    page = report.write_page([write_run(tmp_path / "run.jsonl")], tmp_path / "page.html").read_text()
    assert page.index('<p class="verdict ok">Healthy: 300 steps') < page.index("<dl")
    assert "train.py --lr 3e-4" in page
    assert "median of the finite gradient norms, before clipping" in page
    assert "data.batch" in page


def test_pages_of_one_folder_share_plotly(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.jsonl")
    pages = [report.write_page([run], tmp_path / name) for name in ("a.html", "b.html")]
    (script,) = tmp_path.glob("*.js")
    assert all(f'src="{script.name}"' in page.read_text() for page in pages)
    assert all(page.stat().st_size < 100_000 for page in pages)
    assert "http://" not in pages[0].read_text().replace("http://www.w3.org", "")
    size = script.stat().st_size
    script.write_text("cut off by a full disk")
    report.write_page([run], tmp_path / "c.html")
    assert script.stat().st_size == size


def test_constant_curves_have_no_panel() -> None:
    run = made.made_run(50, always=lambda step: {"norm": 1.0, "scale": 65536.0, "lr": 0.1})
    assert captions(figures.figure([run], ["run"])) == ["Loss"]
    changing = figures.figure([made.made_run(300, always=scaled_and_clipped)], ["run"])
    assert captions(changing) == [
        "Loss",
        "Gradient norm (dotted: limit)",
        "Marked steps",
        "Loss scale",
        "Learning rate",
        "Zero gradient elements (mean)",
        "Gradient norm per tensor, log10",
        "Update / weight per tensor, log10",
        "Share of zeros per tensor",
    ]


def test_a_run_of_one_step_has_a_page_without_plots(tmp_path: Path) -> None:
    page = report.write_page([write_run(tmp_path / "run.jsonl", count=1)], tmp_path / "page.html").read_text()
    assert "No problem found: 1 step" in page


def test_all_plots_share_one_axis_and_have_no_tool_bar(tmp_path: Path) -> None:
    figure = figures.figure([made.made_run(300, always=scaled_and_clipped)], ["run"])
    names = [name for name in figure.layout if name.startswith("xaxis")]
    assert sum(figure.layout[name].matches is None for name in names) == 1
    page = report.write_page([write_run(tmp_path / "run.jsonl")], tmp_path / "page.html").read_text()
    assert '"displayModeBar": false' in page


def test_full_names_are_in_the_hover_text() -> None:
    names = ["transformer.h.11.attention.query.weight", "transformer.h.11.attention.key.weight"]
    run = made.run_of(made.optimizer(names=names), *made.steps(always=scaled_and_clipped))
    heat = next(trace for trace in figures.figure([run], ["run"]).data if trace.type == "heatmap")
    assert list(heat.y) == names
    assert "%{y}" in heat.hovertemplate


def test_long_curves_are_thinned() -> None:
    run = made.made_run(30_000, plant={12_345: {"loss": 1e4}})
    loss = figures.figure([run], ["run"]).data[0]
    assert len(loss.x) <= 2002
    assert max(loss.y) == 1e4


def test_many_tensors_and_many_optimizers_are_limited() -> None:
    names = [f"layer.{i}.weight" for i in range(500)]
    detail = {"norms": [float(i) for i in range(500)]}
    run = made.run_of(made.optimizer(names=names), *made.steps(20, always=lambda step: detail if step % 2 else {}))
    heat = next(trace for trace in figures.figure([run], ["run"]).data if trace.type == "heatmap")
    assert len(heat.y) == figures.MAX_ROWS
    many = made.run_of(*(step for number in range(100) for step in made.steps(5, number=number)))
    assert len({trace.name for trace in figures.figure([many], ["run"]).data if trace.name}) <= figures.MAX_CURVES
    assert len(report.Report(many, "run").optimizers) == report.MAX_OPTIMIZERS


def test_a_metric_has_the_color_of_its_run() -> None:
    """The metric of the second run had the color of the second optimizer of the first."""
    logs = [{"kind": "log", "step": step, "values": {"accuracy": step / 20}} for step in range(1, 21)]
    one = made.run_of(*made.steps(20), *made.steps(20, number=1), *logs)
    drawn = figures.figure([one, made.run_of(*made.steps(20), *logs)], ["one", "two"]).data
    colors = {(line.name[:3], line.line.color) for line in drawn if line.name}
    assert len(colors) == len(dict(map(reversed, colors))) == 3, "two optimizers of one, and two"
    assert len([line for line in drawn if line.name == "two"]) == 3, "loss, norm, accuracy"


# --- several runs -----------------------------------------------------------------------------------------------------


def test_several_runs_are_compared_in_one_page(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a.jsonl", label="train.py --lr 1e-3")
    two = write_run(tmp_path / "b.jsonl", label="train.py --lr 1e-2", plant={40: {"loss": 3.5}})
    page = report.write_page([one, two], tmp_path / "page.html").read_text()
    assert "<h2>Comparison</h2>" in page
    rows = report.comparison(report.read_reports([one, two]))
    assert rows["steps"] == ["300", "300"]
    assert rows["loss differs from the first run"] == ["–", "from step 40 on"]
    assert "config data.batch" not in rows, "the same in both"
    assert "main numbers of" not in rows
    made.write(two, [made.header(), *made.steps(30), *made.steps(40, number=1)])
    rows = report.comparison(report.read_reports([one, two]))
    assert rows["main numbers of"] == ["AdamW", "optimizer 1 (optimizer)"]


def test_the_settings_of_runs_do_not_hide_their_numbers(tmp_path: Path) -> None:
    """The row "scale" had the policy of the control instead of the scale."""
    one, two = write_run(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    settings = {"momentum": 0.9, "nesterov": False}
    line = made.optimizer(kind="SGD", scale="DynamicScale()", settings=settings)
    made.write(two, [made.header(), line, *made.steps(always=lambda step: {"scale": 65536.0})])
    rows = report.comparison(report.read_reports([one, two]))
    assert rows["scale"] == ["2^16 → 2^19", "2^16"]
    assert rows["scale policy"] == ["–", "DynamicScale()"]
    assert rows["momentum"] == ["–", "0.9"]
    assert "nesterov" not in rows, "False, which is the same as none"


def test_identical_trainings_are_called_identical(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a.jsonl"), write_run(tmp_path / "b.jsonl")
    lines = two.read_text().splitlines()
    slower = [json.dumps({**json.loads(line), "time": 5.0 * i}) for i, line in enumerate(lines)]
    two.write_text("\n".join(slower) + "\n")
    reports = report.read_reports([one, two])
    assert report.comparison(reports)["loss differs from the first run"] == ["–", "identical in 300 common steps"]
    assert [entry.name for entry in reports] == [f"train.py --lr 3e-4 ({path})" for path in (one, two)]


# --- hostile files ----------------------------------------------------------------------------------------------------


def hostile_run(path: Path) -> Path:
    lines = [
        made.header(
            label=HOSTILE, command=[HOSTILE], device=HOSTILE, config={HOSTILE: HOSTILE}, versions={"x": HOSTILE}
        ),
        made.optimizer(kind=HOSTILE, names=[HOSTILE, HOSTILE + "2"], settings={HOSTILE: HOSTILE}),
        *made.steps(300, always=scaled_and_clipped, plant=dict.fromkeys(range(200, 301), made.NAN_LOSS)),
        {"kind": "log", "step": 1, "values": {HOSTILE: 1.0}},
        {"kind": "log", "step": 2, "values": {HOSTILE: 2.0}},
        made.culprit(200, HOSTILE),
        made.end(status=HOSTILE),
    ]
    return made.write(path, lines)


def test_hostile_names_are_escaped_in_the_page(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run.jsonl")
    other = made.write(tmp_path / "other.jsonl", [made.header(label=HOSTILE + "!"), *made.steps(10)])
    for paths in ([run], [run, other]):
        page = report.write_page(paths, tmp_path / "page.html").read_text()
        # plotly writes "<" and ">" of its data as \u003c and \u003e.
        assert "<script>alert" not in page
        assert "<img" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert "{{7*7}}" in page


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["nan", "inf", "x", "", HOSTILE]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "values", "names"]), inner, max_size=2)
    ),
    max_leaves=4,
)
fields = st.sampled_from(
    [
        "step", "optimizer", "time", "loss", "scale", "norm", "limit", "clipped", "skipped", "rejected", "lr", "nan",
        "inf", "norms", "zeros", "updates", "names", "class", "settings", "values", "known", "text", "rank", "status",
        "exit_code", "steps", "verdict", "severity", "label", "command", "config", "versions", "git", "device",
    ]
)  # fmt: skip
kinds = st.sampled_from(["header", "optimizer", "start", "step", "log", "culprit", "end", "other"])


@settings(max_examples=60)
@given(records=st.lists(st.tuples(kinds, st.dictionaries(fields, values, max_size=6)), max_size=12))
def test_records_with_values_of_any_type_do_not_break_a_report(records: list[Any], tmp_path_factory: Any) -> None:
    lines = [{"kind": kind, **({"step": 1} if kind == "step" else {}), **given} for kind, given in records]
    path = tmp_path_factory.mktemp("odd") / "run.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in [made.header(), *made.steps(3), *lines, made.header()])
    path.write_text(text)
    run = runfile.read(path)
    find(run)
    report.to_json([path])
    report.to_text([path])
    figures.figure([run], [run.name])


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_the_report_as_json_has_the_verdict_the_numbers_and_the_culprits(tmp_path: Path) -> None:
    plant = dict.fromkeys(range(200, 301), made.NAN_LOSS)
    lines = [made.header(), made.optimizer(), *made.steps(plant=plant), made.culprit(200, "first NaN: log"), made.end()]
    (found,) = json.loads(report.to_json([made.write(tmp_path / "run.jsonl", lines)]))
    assert found["verdict"] == "Problem: Weights contain NaN or Inf since step 200 (or earlier); first NaN: log."
    assert found["severity"] == "problem"
    assert found["findings"][0]["rule"] == "corrupt_weights"
    assert found["findings"][0]["numbers"]["step"] == 200
    assert found["optimizers"][0]["final_loss"] == pytest.approx(2.023, abs=0.01)
    assert found["optimizers"][0]["clipped_share"] == "nan"
    assert found["culprits"][0]["text"] == "first NaN: log"
    assert not any(math.isnan(value) for value in re.findall(r"NaN", json.dumps(found["optimizers"])))


# --- browser ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-dev-shm-usage "
    flags += "--disable-background-networking --disable-component-update --disable-sync"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags.split())
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_follows_the_theme(width: int, scheme: str, chromium: Any, tmp_path: Path) -> None:
    runs = [hostile_run(tmp_path / "hostile.jsonl"), write_run(tmp_path / "run.jsonl")]
    for paths in (runs[1:], runs):
        page = report.write_page(paths, tmp_path / "page.html")
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        tab = context.new_page()
        errors: list[str] = []
        tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        tab.on(
            "console", lambda message, errors=errors: errors.append(message.text) if message.type == "error" else None
        )
        tab.on("dialog", lambda dialog, errors=errors: (errors.append("dialog"), dialog.dismiss()))
        tab.goto(page.as_uri())
        tab.wait_for_function("document.querySelector('.plotly-graph-div').dataset.ready", timeout=60_000)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        ink = tab.evaluate("document.querySelector('.plotly-graph-div').layout.font.color")
        assert (background, ink) == {
            "light": ("rgb(250, 249, 246)", "#1d2127"),
            "dark": ("rgb(20, 22, 26)", "#ebe8e2"),
        }[scheme]
        assert tab.locator(".modebar-btn").count() == 0
        assert errors == []
        context.close()


def test_a_page_without_its_script_says_so(chromium: Any, tmp_path: Path) -> None:
    page = report.write_page([write_run(tmp_path / "run.jsonl")], tmp_path / "page.html")
    (script,) = tmp_path.glob("*.js")
    script.unlink()
    tab = chromium.new_page()
    tab.goto(page.as_uri())
    assert tab.locator(".missing").is_visible()
    tab.close()
