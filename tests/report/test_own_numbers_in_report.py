"""The report shows the user's own numbers, which code ran, and that a file was damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gradilocks.cli import main
from gradilocks.report import render, report_on
from gradilocks.runfile import Logged, Run, read_run
from tests.runfile.run_files import HEADER, lines_of, training, write_run


def run_with(path: Path, *logs: Logged, **more) -> Run:
    return replace(read_run(write_run(path, training(40), **more)), logs=logs)


LOGS = (
    Logged(10, 0.1, {"val_loss": 2.5, "<b>": 1.0}),
    Logged(20, 0.2, {"val_loss": 1.25}),
    Logged(40, 0.4, {"val_loss": 1.5, "<b>": None}),
)


def test_the_page_has_a_row_for_each_number(tmp_path):
    html = render([report_on(run_with(tmp_path / "a", *LOGS), "a")])
    table = html.split("<h2>Own numbers</h2>")[1].split("</table>")[0]
    assert '<th scope="row">val_loss</th>' in table
    cells = table.split("val_loss</th>")[1].split("</tr>")[0]
    assert cells.replace(" <small>", " (").replace("</small>", ")") == (
        "<td>2.5</td><td>1.5 (step 40)</td><td>1.25 (step 20)</td><td>2.5 (step 10)</td><td>3</td>"
    )
    assert "<b>" not in table
    assert "Own numbers" not in render([report_on(run_with(tmp_path / "b"), "b")])


def test_two_runs_have_their_numbers_in_one_table(tmp_path):
    reports = [report_on(run_with(tmp_path / name, LOGS[0]), name) for name in "ab"]
    table = render(reports).split("<h2>Own numbers</h2>")[1].split("</table>")[0]
    assert "a, val_loss" in table
    assert "b, val_loss" in table


def test_the_terminal_and_json_tell_them_too(tmp_path, capsys):
    path = write_run(tmp_path / "a.jsonl", training(40))
    with path.open("a") as file:
        for each in LOGS:
            file.write(json.dumps({"kind": "log", **each._asdict()}) + "\n")
    assert main(["report", str(path)]) == 0
    assert "val_loss 2.5 → 1.5 (step 40)" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"][0]["logged"]["val_loss"]
    assert (told["least"], told["least_at"], told["values"]) == (1.25, 20, 3)


def test_commit_and_configuration_stand_with_what_ran(tmp_path):
    git = {"commit": "c0ffee" * 6 + "abcd", "branch": "trunk", "dirty": True}
    header = replace(HEADER, git=git, config={"lr": 0.25})
    html = render([report_on(run_with(tmp_path / "a", header=header), "a")])
    assert f"{git['commit']} on trunk, with changes that were not committed" in html
    assert "lr 0.25" in html
    plain = render([report_on(run_with(tmp_path / "b"), "b")])
    assert "<dt>commit</dt>" not in plain
    argv = replace(HEADER, config={"argv": ["train.py"]})  # The command has it.
    assert "<dt>config</dt>" not in render([report_on(run_with(tmp_path / "c", header=argv), "c")])


def test_a_report_on_a_damaged_file_says_so_and_judges_the_rest(tmp_path, capfd):
    path = tmp_path / "a.jsonl"
    lines = lines_of(training(40)).splitlines(keepends=True)
    path.write_text("".join([*lines[:20], "wreck\n", *lines[20:]]))
    assert main(["report", str(path), "--json"]) == 0
    captured = capfd.readouterr()
    assert "line 21 is damaged and was left out (not JSON)" in captured.err
    (told,) = json.loads(captured.out)["runs"]
    (finding,) = [each for each in told["findings"] if each["rule"] == "damaged-lines"]
    assert finding["severity"] == "note"
    assert finding["title"] == "The run file is damaged: 1 line left out"
    assert finding["sentence"].startswith("Line 21 is damaged and was left out (not JSON).")
    assert "40 steps" in told["sentence"]
