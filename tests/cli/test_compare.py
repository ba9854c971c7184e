"""``gradilocks compare``: the table, the sentences below it, JSON, and files it cannot compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradilocks import read_run
from gradilocks.cli import main
from gradilocks.cli.compare_command import rows, short_names
from gradilocks.report import compare
from gradilocks.runfile import End, Logged, OptimizerInfo, log_line, process_here
from tests.cli.cli_process import OnATerminal, run
from tests.runfile.run_files import (
    END,
    FIRST,
    HEADER,
    SECOND,
    plain_step,
    skipped_step,
    training,
    write_run,
)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: another command and clip, a loss that parts at step 40, a parameter less."""
    first = write_run(tmp_path / "a.jsonl", training(300), end=End(5.0, "finished", 0, None))
    header = replace(
        HEADER,
        command=("train.py", "--lr", "1e-3"),
        settings={**HEADER.settings, "clip": "NoClip()", "seed": 3},
    )
    steps = [
        step._replace(clipped=False, limit=None, loss=step.loss + 0.5 * (step.step >= 40))
        for step in training(200)
    ]
    info = OptimizerInfo(1, "SGD", ("other",), (1,), ("float32",))
    second = write_run(tmp_path / "b.jsonl", steps, header=header, optimizers=[FIRST, info])
    return first, second


def table_of(text: str) -> dict[str, list[str]]:
    rows = [line.split("  ") for line in text.splitlines() if line.startswith(" ")]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    return {row[0]: row[1:] for row in cells if row}


def test_the_table_has_what_differs_and_the_numbers(two):
    done = run("compare", *two)
    assert (done.returncode, done.stderr) == (0, "")
    table = table_of(done.stdout)
    assert table["command"] == ["train.py --lr 3e-4", "train.py --lr 1e-3"]
    assert table["settings.clip"] == ["ClipByNorm(1.0)", "NoClip()"]
    assert table["settings.seed"] == ["-", "3"]
    assert "settings.scale" not in table  # the same in both
    assert not [name for name in table if name.startswith(("versions", "hardware"))]
    assert table["ended"] == ["finished", "no end"]
    assert table["steps"] == ["300", "200"]
    assert table["skipped"] == ["3 (1.00%)", "2 (1.00%)"]
    assert table["why"] == ["nonfinite 3", "nonfinite 2"]
    assert table["likely from"] == ["not known", "not known"]  # All gradients were bad.
    assert table["clipped"][1] == "0.00%"
    assert table["scale"] == ["2^14 to 2^16", "2^15 to 2^16"]
    assert table["steps/s"] == ["60", "64"]
    assert table["parameters"] == ["4,161 in 3 tensors", "4,161 in 3 tensors"]


def test_a_long_name_in_the_table_keeps_the_number_of_its_block(tmp_path):
    name = "model.language_model.model.layers.27.self_attn.q_proj.weight"
    bad = skipped_step(2, name, finite_gradients=5)
    path = write_run(tmp_path / "a.jsonl", [plain_step(1), bad, plain_step(3)])
    table = dict(rows(compare([read_run(path)] * 2)))
    assert table["  likely from"] == ["m.l.model.layers.27.self_attn.q_proj.weight (1 x)"] * 2


def test_the_sentences_say_where_losses_part_and_which_parameters_are_missing(two):
    lines = run("compare", *two).stdout.splitlines()
    assert lines[-3].startswith(
        "b.jsonl: the losses differ from step 40 on: 2.2375, against 1.7375"
    )
    assert lines[-2:] == [
        "a.jsonl lacks 1 of the parameters: other",
        "b.jsonl lacks 1 of the parameters: scale",
    ]


def test_a_run_that_turned_nan_is_said_to_be_nan(tmp_path):
    bad = {"loss": None, "norm": None, "nan": 1}
    steps = [plain_step(n) for n in range(1, 31)] + [plain_step(n, **bad) for n in range(31, 61)]
    paths = [write_run(tmp_path / "a.jsonl", training(60)), write_run(tmp_path / "b.jsonl", steps)]
    table = table_of(run("compare", *paths).stdout)
    assert table["loss, last"][1] == "NaN since step 31"
    assert table["loss, NaN or Inf"] == ["0 steps", "30 steps"]
    assert table["taken with NaN"] == ["-", "30"]


def test_the_losses_of_several_optimizers_have_rows_of_their_own(tmp_path):
    steps = [plain_step(n // 2 + 1, loss=float(n % 2), optimizer=n % 2) for n in range(40)]
    paths = [write_run(tmp_path / f"{n}.jsonl", steps) for n in "ab"]
    table = table_of(run("compare", *paths).stdout)
    assert table["loss of optimizer 0, last"] == ["0", "0"]
    assert table["loss of optimizer 1, last"] == ["1", "1"]


def test_equal_runs_are_said_to_be_equal(tmp_path):
    paths = [write_run(tmp_path / f"{n}.jsonl", training(30)) for n in "ab"]
    printed = run("compare", *paths).stdout
    assert "b.jsonl: the losses equal those of a.jsonl at all 30 shared steps" in printed


def test_losses_that_differ_in_the_last_digit_are_shown_apart(tmp_path):
    a = write_run(tmp_path / "a.jsonl", [plain_step(1, loss=0.1)])
    b = write_run(tmp_path / "b.jsonl", [plain_step(1, loss=0.10000000000000002)])
    said = "b.jsonl: the losses differ from step 1 on: 0.10000000000000002, against 0.10000000"
    assert said in run("compare", a, b).stdout


def test_a_loss_that_became_nan_differs_and_two_that_did_are_alike(tmp_path):
    well = [plain_step(1, loss=0.5), plain_step(2, loss=0.25)]
    lost = [plain_step(1, loss=0.5), plain_step(2, loss=None, loss_nonfinite=True)]
    a, b = write_run(tmp_path / "a.jsonl", well), write_run(tmp_path / "b.jsonl", lost)
    c = write_run(tmp_path / "c.jsonl", lost)
    said = run("compare", a, b).stdout
    assert "b.jsonl: the losses differ from step 2 on: NaN or Inf, against 0.25 in a.jsonl" in said
    assert "against NaN or Inf in b.jsonl" in run("compare", b, a).stdout
    assert (
        "c.jsonl: the losses equal those of b.jsonl at all 2 shared" in run("compare", b, c).stdout
    )


def test_runs_without_losses_and_runs_without_steps_can_be_compared(tmp_path):
    a = write_run(tmp_path / "a.jsonl", [plain_step(1, loss=None, norm=None, scale=None)])
    b = write_run(tmp_path / "b.jsonl")
    done = run("compare", a, b)
    assert done.returncode == 0
    assert table_of(done.stdout)["steps"] == ["1", "0"]
    assert "b.jsonl: no step whose loss both it and a.jsonl know" in done.stdout


def test_json_holds_every_number(two):
    done = run("compare", *two, two[0], "--json")
    found = json.loads(done.stdout)
    assert [r["steps"] for r in found["runs"]] == [300, 200, 300]
    assert found["runs"][0]["reasons"] == {"nonfinite": 3}
    assert found["runs"][0]["losses"]["0"]["least_at"] > 250
    assert found["what_ran"]["settings.clip"] == ["ClipByNorm(1.0)", "NoClip()", "ClipByNorm(1.0)"]
    assert found["partings"][0]["step"] == 40
    assert found["partings"][1] == {"shared": 300, "step": None, "first": None, "other": None}
    assert found["missing"] == [["other"], ["scale"], ["other"]]


def test_one_file_is_a_usage_error_and_a_bad_one_a_clear_line(two, tmp_path):
    alone = run("compare", two[0])
    assert alone.returncode == 2
    assert f"expected two run files or more, got one: {two[0]}." in alone.stderr
    empty = tmp_path / "empty"  # Without a file, those of the folder are compared.
    empty.mkdir()
    assert run("compare", cwd=empty).returncode == 2
    (tmp_path / "bad").write_text("no\n")
    for bad in (tmp_path / "bad", tmp_path / "absent", tmp_path):
        done = run("compare", two[0], bad)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"gradilocks: {bad} ")
        assert done.stderr.count("\n") == 1


def test_a_narrow_terminal_folds_cells_and_keeps_its_width(two):
    shown = OnATerminal("compare", *two, cwd=two[0].parent, columns=40)
    assert shown.close() == 0
    assert "a.jsonl" in shown.seen
    assert "\u2026" not in shown.seen  # nothing is cut


def test_names_with_markup_are_shown_as_they_are(tmp_path):
    info = replace(SECOND, names=("[bold]x[/bold]",))
    a = write_run(tmp_path / "[red]a.jsonl", optimizers=[FIRST, info], end=END)
    b = write_run(tmp_path / "b.jsonl")
    printed = run("compare", a, b).stdout
    assert "b.jsonl lacks 1 of the parameters: [bold]x[/bold]" in printed
    assert "[red]a.jsonl" in printed
    assert "ValueError: no" in printed


def test_files_of_the_same_name_are_told_apart_by_their_folders():
    assert short_names(["runs/a/x.jsonl", "runs/b/x.jsonl"]) == ["runs/a/x.jsonl", "runs/b/x.jsonl"]
    assert short_names(["runs/a.jsonl", "runs/b.jsonl"]) == ["a.jsonl", "b.jsonl"]


def test_numbers_of_the_users_own_are_compared(tmp_path):
    for name, values in (("a", [0.5, 0.25, 0.375]), ("b", [0.5])):
        path = write_run(tmp_path / f"{name}.jsonl", training(10))
        with path.open("a") as file:
            for at, value in enumerate(values, start=1):
                file.write(log_line(Logged(at, 1.0, {"val_loss": value})))
    done = run("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert done.returncode == 0, done.stderr
    table = table_of(done.stdout)
    assert table["val_loss, last"] == ["0.375 at step 3", "0.5 at step 1"]
    assert table["least, largest"] == ["0.25 at 2, 0.5 at 1", "0.5 at 1, 0.5 at 1"]


def test_the_commit_and_the_configuration_are_compared_and_the_arguments_are_not(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        config = {"lr": lr, "argv": [name], "same": 1}
        git = {"commit": name * 40, "branch": "trunk", "dirty": False}
        header = replace(HEADER, config=config, git=git)
        write_run(tmp_path / f"{name}.jsonl", training(10), header=header)
    done = run("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--json")
    differs = json.loads(done.stdout)["what_ran"]
    assert differs == {"config.lr": [0.1, 0.2], "git.commit": ["a" * 40, "b" * 40]}


@pytest.mark.skipif(process_here() is None, reason="the system has no /proc")
@pytest.mark.parametrize(
    ("began", "state", "title"),
    [({"began": 1}, "killed", "The run was killed"), ({}, "running", "The run is still going")],
)
def test_a_run_without_an_end_is_killed_or_running_for_all_commands(
    began, state, title, tmp_path, capsys
):
    path, process = tmp_path / "a.jsonl", {**(process_here() or {}), **began}
    write_run(path, training(60), header=replace(HEADER, process=process))
    assert main(["compare", str(path), str(path)]) == 0
    assert table_of(capsys.readouterr().out)["ended"] == [state, state]
    assert main(["report", "--json", str(path)]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert title in {each["title"] for each in told["findings"]}
    assert main(["ls", "--json", str(tmp_path)]) == 0
    assert f'"{state}"' in capsys.readouterr().out
