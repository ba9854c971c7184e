"""``gradilocks ls``, ``page`` and the latest run: one's runs found, with the report's verdict."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradilocks.cli import main
from gradilocks.errors import GradilocksError
from gradilocks.report import run_list
from gradilocks.runfile import End, Logged, log_line, process_here
from tests.runfile.run_files import HEADER, lines_of, plain_step, training, write_run

FINISHED = End(20.0, "finished", 0, None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with three runs under runs/, a data set and a damaged file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = tmp_path / "runs"
    (runs / "deep").mkdir(parents=True)
    write_run(runs / "old.jsonl", training(60), header=started(100.0), end=FINISHED)
    bad = [plain_step(n, loss=None, loss_nonfinite=True, nan=3, norm=None) for n in range(31, 61)]
    write_run(runs / "bad.jsonl", [*training(30), *bad], header=started(200.0))
    git = {"commit": "c0ffee" + "0" * 34, "branch": "trunk", "dirty": True}
    new = started(300.0, git=git, process={**process_here(), "began": 1})
    write_run(runs / "deep" / "new.jsonl", training(80), header=new)
    with (runs / "deep" / "new.jsonl").open("a") as file:
        file.write(log_line(Logged(40, 0.5, {"accuracy": 0.5})))
        file.write(log_line(Logged(80, 0.9, {"accuracy": 0.75, "bleu": None})))
    (runs / "data.jsonl").write_text('{"text": "no run"}\n')
    (runs / ".hidden.jsonl").write_text(lines_of())
    return tmp_path


def started(seconds: float, **more):
    return replace(HEADER, started=1.7e9 + seconds, rank=0, ranks=1, **more)


def rows_of(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [re.split(r"\s{2,}", line) for line in lines if "──" not in line]


def test_runs_are_listed_newest_first_with_the_verdict_of_their_report(folder, capsys):
    assert main(["ls"]) == 0
    heads, *rows = rows_of(capsys.readouterr().out)
    assert heads == ["run", "started", "steps", "loss, end", "verdict", "ended"]
    assert [row[0] for row in rows] == ["deep/new", "bad", "old"]
    assert [row[2] for row in rows] == ["80", "60", "60"]
    assert [row[5] for row in rows] == ["killed", "no end", "finished"]
    assert rows[1][3:5] == ["NaN", "in trouble"]
    assert main(["report", "runs/old.jsonl", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"][0]
    assert rows[2][4] == told["verdict"]


def test_json_tells_all_that_is_known_of_each(folder, capsys):
    assert main(["ls", "--json"]) == 0
    new, bad, old = json.loads(capsys.readouterr().out)
    assert (new["name"], new["path"]) == ("deep/new", os.path.join("runs", "deep", "new.jsonl"))
    assert (new["commit"][:6], new["dirty"]) == ("c0ffee", True)
    assert new["logged"] == {"accuracy": 0.75, "bleu": None}
    assert (bad["verdict"], bad["last_loss"]) == ("in trouble", None)
    assert 0 < old["last_loss"] < 5
    assert old["loss"].endswith(f"→ {old['last_loss']:.3g}")


def test_a_file_is_read_again_only_if_it_has_changed(folder, capsys, monkeypatch):
    read = []
    original = run_list.read_quietly
    monkeypatch.setattr(run_list, "read_quietly", lambda p: read.append(p.name) or original(p))
    assert main(["ls"]) == 0
    first = capsys.readouterr().out
    assert sorted(read) == ["bad.jsonl", "new.jsonl", "old.jsonl"]
    read.clear()
    assert main(["ls", "runs"]) == 0
    assert (read, capsys.readouterr().out) == ([], first)
    write_run(folder / "runs" / "old.jsonl", training(70), header=started(100.0), end=FINISHED)
    assert main(["ls"]) == 0
    assert read == ["old.jsonl"]
    assert rows_of(capsys.readouterr().out)[3][2] == "70"


@pytest.mark.parametrize("wreck", ["[]", "{", '{"gradilocks": 1}', '{"runs": 3}'])
def test_a_cache_that_is_damaged_or_cannot_be_written_does_no_harm(folder, capsys, wreck):
    place = folder / "cache" / "gradilocks"
    place.mkdir(parents=True)
    (place / "runs.json").write_text(wreck)
    assert main(["ls"]) == 0
    assert len(rows_of(capsys.readouterr().out)) == 4
    (place / "runs.json").unlink()
    (place / "runs.json").mkdir()
    assert main(["ls"]) == 0


def test_a_damaged_run_is_listed_and_one_that_cannot_be_read_says_why(folder, capsys):
    path = folder / "runs" / "old.jsonl"
    path.write_text(path.read_text() + "wreck\n" + lines_of(header=started(100.0)))
    other = lines_of(header=started(400.0)) + '{"kind":"header","gradilocks":99}\n'
    (folder / "runs" / "future.jsonl").write_text(other)
    assert main(["ls", "--json"]) == 0
    future, *_, old = json.loads(capsys.readouterr().out)
    assert (old["name"], old["steps"]) == ("old", 60)
    assert (future["name"], future["verdict"]) == ("future", "cannot be read")
    assert "of version 99" in future["sentence"]


def test_an_empty_folder_a_file_and_a_missing_one_are_said(folder, capsys):
    (folder / "empty").mkdir()
    assert main(["ls", "empty"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert main(["ls", "absent"]) == 1
    assert "absent does not exist. Runs are usually under runs/" in capsys.readouterr().err
    assert main(["ls", "runs/old.jsonl"]) == 1
    assert "is a file; expected a folder" in capsys.readouterr().err


# --- the latest -----------------------------------------------------------------------------------


def test_report_watch_and_export_without_a_path_take_the_latest_and_say_which(folder, capfd):
    latest = os.path.join("runs", "deep", "new.jsonl")
    for words in (["report"], ["watch", "--once"], ["export", "--to", "csv"]):
        assert main(words) == 0
        captured = capfd.readouterr()
        assert captured.err.startswith(f"gradilocks: the latest run: {latest}\n"), words
    assert (folder / "runs" / "deep" / "new.html").exists()
    assert (folder / "runs" / "deep" / "new.logged.csv").exists()


def test_compare_without_paths_takes_the_two_latest_the_older_first(folder, capfd):
    assert main(["compare", "--json"]) == 0
    captured = capfd.readouterr()
    first, second = json.loads(captured.out)["runs"]
    assert [Path(each["path"]).name for each in (first, second)] == ["bad.jsonl", "new.jsonl"]
    assert "the 2 latest runs: " in captured.err
    assert second["logged"]["accuracy"]["most"] == 0.75


def test_without_any_run_the_way_out_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    said = capsys.readouterr().err
    assert "no run file was named, and there is none under runs/" in said
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs" / "a.jsonl")
    assert main(["compare"]) == 2
    assert "there is only one under runs/" in capsys.readouterr().err


# --- the page over all ----------------------------------------------------------------------------


def test_a_page_over_all_runs_links_to_their_reports_which_it_makes(folder, capsys):
    assert main(["page", "runs"]) == 0
    assert capsys.readouterr().out == "Page: runs/index.html, over 3 runs\n"
    html = (folder / "runs" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<a href="([^"]+)">', html) == ["deep/new.html", "bad.html", "old.html"]
    assert len(html) < 100_000  # Without plotly.js.
    (plotly,) = (folder / "runs").glob("plotly-*.js")  # In none of the reports.
    for name, up in (("deep/new.html", "../"), ("bad.html", ""), ("old.html", "")):
        report = (folder / "runs" / name).read_text(encoding="utf-8")
        assert f'<script src="{up}{plotly.name}"></script>' in report
        assert len(report) < 500_000 < plotly.stat().st_size
    before = (folder / "runs" / "old.html").stat().st_mtime_ns
    os.utime(folder / "runs" / "bad.jsonl", (4e9, 4e9))  # It has gone on.
    gone_on = (folder / "runs" / "bad.html").stat().st_mtime_ns
    assert main(["page"]) == 0
    assert (folder / "runs" / "old.html").stat().st_mtime_ns == before
    assert (folder / "runs" / "bad.html").stat().st_mtime_ns > gone_on


def test_a_page_elsewhere_links_across_folders_and_makes_no_report_if_told_so(folder, capsys):
    assert main(["report", "runs/old.jsonl"]) == 0
    (folder / "runs" / "bad.html").write_text("somebody else's")
    assert main(["page", "--no-reports", "-o", "over view.html"]) == 0
    html = (folder / "over view.html").read_text(encoding="utf-8")
    assert re.findall(r'<a href="([^"]+)">', html) == ["runs/old.html"]
    assert not (folder / "runs" / "deep" / "new.html").exists()
    assert (folder / "runs" / "bad.html").read_text() == "somebody else's"


def test_a_report_that_cannot_be_made_is_said_and_the_page_is_made_without_it(folder, capfd):
    (folder / "runs" / "bad.html").write_text("somebody else's")
    assert main(["page"]) == 0
    captured = capfd.readouterr()
    assert "no report on runs/bad.jsonl: " in captured.err
    html = (folder / "runs" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<a href="([^"]+)">', html) == ["deep/new.html", "old.html"]
    assert (folder / "runs" / "bad.html").read_text() == "somebody else's"


def test_what_is_no_page_is_not_overwritten(folder, capsys):
    (folder / "runs" / "index.html").write_text("<html>mine</html>")
    assert main(["page", "--no-reports"]) == 1
    assert "is never overwritten" in capsys.readouterr().err
    assert main(["page", "absent"]) == 1


def test_names_and_commands_cannot_break_out_of_the_page(folder, capsys):
    wicked = "<script>alert(1)</script>\x1b[31m"
    header = replace(started(900.0), command=(wicked,))
    (folder / "runs" / 'a"b.jsonl').write_text(
        lines_of(training(5), header=header) + log_line(Logged(5, 1.0, {wicked: 1.0}))
    )
    assert main(["page", "--no-reports"]) == 0
    html = (folder / "runs" / "index.html").read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "\x1b" not in html


def test_where_no_report_can_be_made_the_page_is_made_all_the_same(folder, capfd, monkeypatch):
    def refuse():
        raise GradilocksError("plotly is not installed: pip install plotly")

    monkeypatch.setattr("gradilocks.report.plotly_script", refuse, raising=False)
    assert main(["page"]) == 0
    shown = capfd.readouterr()
    assert "no reports are made: plotly is not installed" in shown.err
    assert "Page: runs/index.html, over 3 runs" in shown.out
    assert not list((folder / "runs").rglob("plotly-*.js"))
