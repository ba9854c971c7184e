"""``gradilocks export``: what it writes is read back with what users read it with."""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
from pathlib import Path

import pandas
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gradilocks.runfile import Logged, log_line
from tests.cli.cli_process import COMMAND, SOURCE, OnATerminal, environment, run
from tests.runfile.run_files import DETAIL, END, STEP, plain_step, training, write_run

RANKS = {"loss_ranks": 4, "bad_loss_ranks": (1, 3)}
STEPS = [plain_step(1, loss=None, **RANKS), plain_step(2, detail=DETAIL), STEP]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run.jsonl", STEPS, end=END)


def test_csv_has_a_row_a_step_and_a_row_a_parameter_of_a_detailed_step(path, tmp_path):
    done = run("export", path, "--to", "csv")
    steps, detail = tmp_path / "run.csv", tmp_path / "run.detail.csv"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{steps}: 3 rows\n{detail}: 3 rows\n"
    rows = list(csv.DictReader(steps.read_text("utf-8").splitlines()))
    assert [row["loss"] for row in rows] == ["", "2.0", "2.25"]
    assert rows[2]["clipped"] == "true"
    assert json.loads(rows[2]["culprits"]) == [{"name": "scale", "nan": 3, "inf": 4}]
    assert rows[0]["culprits"] == ""
    assert [row["bad_loss_ranks"] for row in rows] == ["[1,3]", "", ""]
    assert [row["loss_ranks"] for row in rows] == ["4", "", ""]
    long = list(csv.reader(detail.read_text("utf-8").splitlines()))
    assert long == [
        [
            "step",
            "optimizer",
            "parameter",
            "norm",
            "largest",
            "zeros",
            "nan",
            "inf",
            "weight",
            "update",
        ],
        ["2", "0", "embed.weight", "0.5", "0.25", "0.125", "0", "0", "12.5", "0.001"],
        ["2", "0", "head.bias", "", "3.0", "0.0", "7", "2", "1.5", "0.5"],
        ["7", "1", "scale", "3.5", "3.0", "0.5", "3", "4", "1.25", "0.0625"],
    ]


def test_parquet_has_the_same_with_types(path, tmp_path):
    done = run("export", path, "--to", "parquet", "-o", tmp_path / "out.parquet")
    assert (done.returncode, done.stderr) == (0, "")
    steps = pandas.read_parquet(tmp_path / "out.parquet")
    assert list(steps.step) == [1, 2, 7]
    assert steps.loss.isna().tolist() == [True, False, False]
    assert steps.skipped.dtype == bool
    assert steps.culprits[2][0] == {"name": "scale", "nan": 3, "inf": 4}
    assert [list(ranks) for ranks in steps.bad_loss_ranks] == [[1, 3], [], []]
    detail = pandas.read_parquet(tmp_path / "out.detail.parquet")
    assert detail.parameter.tolist() == ["embed.weight", "head.bias", "scale"]
    assert detail.largest.tolist() == [0.25, 3.0, 3.0]


def test_tensorboard_gets_every_step(path, tmp_path):
    done = run("export", path, "--to", "tensorboard")
    folder = tmp_path / "run.tensorboard"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder}: 3 steps; see them with: tensorboard --logdir {folder}\n"
    events = EventAccumulator(str(folder)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [(2, 2.0)]
    assert events.Scalars("optimizer1/loss")[0].value == 2.25


def test_a_run_without_detail_has_one_file(tmp_path):
    path = write_run(tmp_path / "run.jsonl", training(50, detail_every=0))
    assert run("export", path, "--to", "csv").stdout == f"{tmp_path / 'run.csv'}: 50 rows\n"
    assert not (tmp_path / "run.detail.csv").exists()


@pytest.mark.parametrize("to", ["csv", "parquet", "tensorboard"])
def test_what_is_there_is_kept_unless_forced(path, tmp_path, to):
    assert run("export", path, "--to", to).returncode == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    again = run("export", path, "--to", to)
    assert (again.returncode, again.stdout) == (1, "")
    assert "--force replaces it, -o names another." in again.stderr
    assert again.stderr.count("\n") == 1
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    write_run(path, STEPS[:1])
    forced = run("export", path, "--to", to, "--force")
    assert (forced.returncode, forced.stderr) == (0, "")
    assert len(list(tmp_path.rglob("*tfevents*"))) == (to == "tensorboard")


def test_a_second_file_that_is_there_stops_the_first_from_being_written(path, tmp_path):
    (tmp_path / "run.detail.csv").write_text("mine")
    assert run("export", path, "--to", "csv").returncode == 1
    assert not (tmp_path / "run.csv").exists()


def test_places_that_cannot_be_written_are_one_clear_line(path, tmp_path):
    for to, place, said in (
        ("csv", tmp_path, "is a folder; give the path of a file with -o."),
        ("csv", path, "is the run file itself; name another with -o."),
        ("parquet", path / "x", "cannot be written: Not a directory."),
        ("tensorboard", path, "is a file; TensorBoard needs a folder: give another -o."),
        ("tensorboard", path / "x", "cannot be written: Not a directory."),
    ):
        done = run("export", path, "--to", to, "-o", place, "--force")
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert done.stderr == f"gradilocks: {place} {said}\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.jsonl"]


def no_room() -> None:
    """Lets this process write files of at most 8 KiB: a disk that is full, without one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


@pytest.mark.parametrize("to", ["csv", "parquet", "tensorboard"])
def test_a_disk_without_room_is_one_clear_line_and_leaves_no_half_table(tmp_path, to):
    path = write_run(tmp_path / "run.jsonl", training(3000))
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [*COMMAND, "export", path, "--to", to, "-o", out / "x"],
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=no_room,
    )
    assert done.stderr == f"gradilocks: {out / 'x'} cannot be written: File too large.\n"
    assert done.returncode == 1
    assert to == "tensorboard" or list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("to", "module", "said"),
    [
        ("parquet", "pyarrow", "pyarrow is not installed: pip install 'gradilocks[parquet]'"),
        (
            "tensorboard",
            "tensorboard",
            "TensorBoard is not installed: pip install 'gradilocks[tensorboard]'",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(path, tmp_path, to, module, said):
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / f"{module}.py").write_text("raise ImportError")
    both = os.pathsep.join([str(tmp_path / "absent"), str(SOURCE)])
    done = run("export", path, "--to", to, PYTHONPATH=both)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gradilocks: {said}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing option '--to'"),
        (["--to", "excel"], "expected csv, parquet or tensorboard, got 'excel'."),
        (["--to", "csv", "--fast"], "No such option: --fast"),
    ],
)
def test_a_bad_option_is_a_usage_error(path, arguments, said):
    done = run("export", path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bad_file_is_one_clear_line(tmp_path):
    done = run("export", tmp_path / "absent.jsonl", "--to", "csv")
    assert done.returncode == 1
    assert done.stderr.endswith("absent.jsonl does not exist. Run files are usually under runs/.\n")


def test_a_long_export_shows_a_bar_on_a_terminal_and_none_in_a_pipe(tmp_path):
    path = write_run(tmp_path / "run.jsonl", training(30_000, detail_every=0), end=END)
    shown = OnATerminal("export", path.name, "--to", "tensorboard", cwd=tmp_path)
    assert shown.close() == 0
    assert "writing run.tensorboard" in shown.seen
    assert "%" in shown.seen
    piped = run("export", path, "--to", "tensorboard", "--force")
    assert piped.stderr == ""


def test_numbers_of_the_users_own_go_to_a_file_of_their_own(path, tmp_path):
    with path.open("a") as file:
        file.write(log_line(Logged(1, 0.25, {"val_loss": 0.5, "accuracy": None})))
        file.write(log_line(Logged(7, 1.75, {"val_loss": 0.25})))
    done = run("export", path, "--to", "csv")
    logged = tmp_path / "run.logged.csv"
    assert done.stdout.splitlines()[-1] == f"{logged}: 3 rows"
    assert logged.read_text().splitlines() == [
        "step,time,name,value",
        "1,0.25,val_loss,0.5",
        "1,0.25,accuracy,",
        "7,1.75,val_loss,0.25",
    ]
    assert run("export", path, "--to", "parquet").returncode == 0
    frame = pandas.read_parquet(tmp_path / "run.logged.parquet")
    assert frame.name.tolist() == ["val_loss", "accuracy", "val_loss"]
    assert frame.value.isna().tolist() == [False, True, False]
    assert run("export", path, "--to", "tensorboard").returncode == 0
    events = EventAccumulator(str(tmp_path / "run.tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("log/val_loss")] == [
        (1, 0.5),
        (7, 0.25),
    ]
    assert "log/accuracy" not in events.Tags()["scalars"]


@pytest.mark.parametrize("to", ["csv", "parquet", "tensorboard"])
def test_the_folder_of_an_export_is_made(path, tmp_path, to):
    target = tmp_path / "deep" / "er" / "out"
    done = run("export", path, "--to", to, "-o", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert target.exists()


def test_a_folder_that_cannot_be_made_is_one_line(path, tmp_path):
    (tmp_path / "file").touch()
    done = run("export", path, "--to", "csv", "-o", tmp_path / "file" / "deep" / "a.csv")
    assert done.returncode == 1
    assert "cannot be written: Not a directory" in done.stderr
    assert done.stderr.count("\n") == 1
