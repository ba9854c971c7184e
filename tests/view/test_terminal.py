"""Text for terminals: report, watch and ls."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gradilocks.view import ls, report, runfile, watch
from view import made_runs as made
from view.test_page import HOSTILE, hostile_run, write_run


def printed(renderable: Any, width: int = 100, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


# --- report -----------------------------------------------------------------------------------------------------------


def test_the_report_begins_with_name_and_verdict(tmp_path: Path) -> None:
    text = printed(report.to_text([write_run(tmp_path / "run.jsonl")]))
    lines = text.splitlines()
    assert lines[0] == "train.py --lr 3e-4"
    assert lines[1].startswith("Healthy: 300 steps, loss ")
    assert "typical norm" in text
    assert "accuracy 0.625" in text


def test_a_problem_is_explained_with_its_culprit(tmp_path: Path) -> None:
    plant = dict.fromkeys(range(200, 301), made.NAN_LOSS)
    lines = [made.header(), made.optimizer(), *made.steps(plant=plant), made.culprit(200, "first NaN: log"), made.end()]
    text = printed(report.to_text([made.write(tmp_path / "run.jsonl", lines)]))
    assert "problem: Weights contain NaN or Inf since step 200 (or earlier)" in text
    assert "culprit step 200: first NaN: log" in text


def test_an_unknown_origin_is_said_once(tmp_path: Path) -> None:
    plant = dict.fromkeys(range(200, 301), made.NAN_LOSS)
    unknown = made.culprit(200, "origin unknown: a generator", known=False)
    lines = [made.header(), made.optimizer(), *made.steps(plant=plant), unknown, made.end()]
    text = printed(report.to_text([made.write(tmp_path / "run.jsonl", lines)]))
    assert text.lower().count("origin unknown: a generator") == 1


def test_several_runs_end_with_a_comparison(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{name}.jsonl", label=f"train.py --seed {name}") for name in "12"]
    text = printed(report.to_text(paths))
    assert text.count("Healthy:") == 2
    assert "identical in 300 common steps" in " ".join(text.split())


@pytest.mark.parametrize("show", ["report", "watch", "ls"])
def test_hostile_names_cannot_control_the_terminal(show: str, tmp_path: Path) -> None:
    path = hostile_run(tmp_path / "run.jsonl")
    end = made.end(verdict=f"[red]{HOSTILE}", severity="problem", status=HOSTILE)
    with path.open("a") as file:
        file.write(json.dumps(end) + "\n")
    if show == "report":
        text = printed(report.to_text([path]), width=1000)
    elif show == "watch":
        text = printed(watch.view(runfile.read(path)), width=1000)
    else:
        text = printed(ls.to_text(ls.list_runs(tmp_path)), width=2000)
        assert "[red]" in text, "markup is not interpreted"
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[31m" in text


# --- watch ------------------------------------------------------------------------------------------------------------


def test_watch_once_prints_the_present_state(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl")
    console = Console(file=io.StringIO(), width=100)
    watch.watch(path, once=True, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Healthy: 300 steps" in text
    assert "█" in text
    assert "status: finished" in text


def test_watch_and_report_show_the_same_numbers(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.jsonl")
    lines = printed(report.to_text([path])).splitlines()
    seen = printed(watch.view(runfile.read(path))).splitlines()
    for name in ("lowest loss", "typical norm", "skipped", "clipped", "steps/s", "duration"):
        (mine,), (theirs,) = ([line.split() for line in text if line.startswith(name)] for text in (lines, seen))
        assert mine == theirs


def test_watch_ends_with_the_run(tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.jsonl", [made.header(), made.optimizer()])

    def train() -> None:
        for record in [*made.steps(20), made.end()]:
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    thread = threading.Thread(target=train)
    thread.start()
    watch.watch(path, console=console, interval=0.01)
    thread.join()
    assert "Healthy: 20 steps" in console.file.getvalue()  # type: ignore[attr-defined]


def test_watch_waits_for_a_file_and_ends_on_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps = []

    def interrupt(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    console = Console(file=io.StringIO(), width=200)
    watch.watch(tmp_path / "run.jsonl", console=console)
    assert len(naps) == 3
    assert "waiting for" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(runfile.BadRunFile):
        watch.watch(tmp_path / "run.jsonl", once=True, console=console)


def test_watch_shows_nan_as_soon_as_it_is_there(tmp_path: Path) -> None:
    lines = [
        made.header(),
        made.optimizer(),
        *made.steps(20, plant={20: made.NAN_LOSS}),
        made.culprit(20, "first NaN: log"),
    ]
    text = printed(watch.view(watch.Follower(made.write(tmp_path / "run.jsonl", lines)).poll()))
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines() if len(line.split()) > 1}
    assert (rows["loss"], rows["norm"]) == ("NaN", "NaN")
    assert text.count("first NaN: log") == 1


def test_a_run_that_is_silent_is_said_to_be(tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.jsonl", [made.header(time=time.time() - 130), made.optimizer()])
    text = printed(watch.view(watch.Follower(path).poll()))
    assert "no steps yet" in text
    assert "no update for 2 min 10 s" in text


def test_a_follower_merges_ranks_and_starts_again_after_a_replacement(tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.jsonl", [made.header(), *made.steps(10)])
    follower = watch.Follower(path)
    assert len(follower.poll().steps[0]) == 10
    made.write(
        tmp_path / "run.rank1.jsonl", [made.header(rank=1), *made.steps(1, first=4, always=lambda _: {"nan": 1})]
    )
    assert follower.poll().steps[0][4]["rank"] == 1
    made.write(path, [made.header(), *made.steps(2)])
    assert sorted(follower.poll().steps[0]) == [1, 2, 4]


@pytest.mark.parametrize(
    ("values", "bars"), [([0.0, 1.0], "▁█"), ([1.0, 1.0], ""), ([0.0, float("nan"), 7.0], "▁ █"), ([], "")]
)
def test_sparklines(values: list[float], bars: str) -> None:
    assert watch.sparkline(np.array(values)) == bars
    assert len(watch.sparkline(np.arange(1000.0))) == watch.WIDTH


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_shows_runs_by_their_first_and_last_lines(tmp_path: Path) -> None:
    closing = made.end(verdict="Healthy: fine; a; b", severity="ok", final_loss=1.5, steps=600)  # Of two sessions.
    made.write(tmp_path / "b.jsonl", [made.header(time=2e9, label="train.py --b"), *made.steps(300), closing])
    made.write(tmp_path / "a.jsonl", [made.header(time=1.9e9, label="train.py --a"), *made.steps(20)])
    made.write(tmp_path / "a.rank1.jsonl", [made.header(rank=1)])
    made.write(tmp_path / "audit.jsonl", [{"kind": "audit", "format": 3, "label": "audit.py"}])
    (tmp_path / "other.jsonl").write_text("text\n")
    (tmp_path / "notes.txt").write_text("text\n")
    entries = ls.list_runs(tmp_path)
    assert [entry.path.name for entry in entries] == ["audit.jsonl", "a.jsonl", "b.jsonl"]
    assert printed(ls.to_text(entries), width=60).count(".jsonl ") == 3  # File names are not wrapped.
    text = " ".join(printed(ls.to_text(entries), width=200).split())
    assert "train.py --b" in text
    assert "300 1.5 finished Healthy: fine; a" in text
    assert "not closed, last written" in text
    assert text.index("Audits") < text.index("audit.py")
    assert (entries[1].last_step, entries[2].final_loss) == (20, 1.5)


def test_a_damaged_time_does_not_hide_the_other_runs(tmp_path: Path) -> None:
    for name, begin in (("a", 1e18), ("b", "inf"), ("c", "soon"), ("d", 1e9)):
        path = made.write(tmp_path / f"{name}.jsonl", [made.header(time=begin), made.optimizer(), *made.steps(3)])
        report.write_page([path], tmp_path / "page.html")
    console = Console(file=io.StringIO(), width=200)
    console.print(ls.to_text(ls.list_runs(tmp_path)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert [f"{name}.jsonl" in shown for name in "abcd"] == [True] * 4
    assert "2001-09-" in shown


def test_ls_of_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert printed(ls.to_text(ls.list_runs(tmp_path))).strip() == "The folder contains no run files."
    with pytest.raises(runfile.BadRunFile, match="is not a folder"):
        ls.list_runs(tmp_path / "missing")


def test_ls_reads_only_the_ends_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.write(tmp_path / "run.jsonl", [made.header(), *made.steps(5000), made.end(final_loss=1.0, steps=5000)])
    assert path.stat().st_size > 10 * ls.TAIL
    monkeypatch.setattr(runfile, "read", lambda path: pytest.fail("reads the whole file"))
    (entry,) = ls.list_runs(tmp_path)
    assert (entry.last_step, entry.final_loss, entry.state) == (5000, 1.0, "finished")
