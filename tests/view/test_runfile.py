"""Reading run files: later lines win, broken lines are skipped, ranks are merged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.view import runfile
from gradilocks.view.columns import columns
from view import made_runs as made


def test_a_run_is_read_with_all_kinds_of_records(tmp_path: Path) -> None:
    log = {"kind": "log", "step": 2, "time": 1.0, "values": {"accuracy": 0.5, "perplexity": "inf"}}
    lines = [
        made.header(),
        made.optimizer(),
        {"kind": "start", "step": 0},
        *made.steps(3),
        log,
        made.culprit(2),
        made.end(),
    ]
    run = runfile.read(made.write(tmp_path / "run.jsonl", lines))
    assert run.header["label"] == run.name == "train.py"
    assert sorted(run.steps[0]) == [1, 2, 3]
    assert run.optimizers[0]["class"] == "AdamW"
    assert run.logs[0]["values"] == {"accuracy": 0.5, "perplexity": np.inf}
    assert run.culprits[2, 0, 0]["known"] is True
    assert run.end is not None
    assert run.end["status"] == "finished"
    assert run.skipped_lines == 0


def test_later_lines_replace_earlier_ones(tmp_path: Path) -> None:
    lines = [made.header(), *made.steps(3), *made.steps(1, first=2, always=lambda step: {"loss": 9.0})]
    run = runfile.read(made.write(tmp_path / "run.jsonl", lines))
    assert run.steps[0][2]["loss"] == 9.0
    assert len(run.steps[0]) == 3


def test_a_resumed_run_discards_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    log = {"kind": "log", "step": 8, "values": {"a": 1.0}}
    first = [made.header(time=0.0), *made.steps(10), log, made.culprit(9), made.end(status="SIGTERM")]
    second = [
        made.header(time=50.0),
        {"kind": "start", "step": 6},
        *made.steps(2, first=7, always=lambda _: {"loss": 9.0}),
    ]
    run = runfile.read(made.write(tmp_path / "run.jsonl", [*first, *second]))
    assert sorted(run.steps[0]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.steps[0][7]["loss"] == 9.0
    assert (run.logs, run.culprits, run.end) == ([], {}, None)
    assert run.header["time"] == 50.0


@given(cut=st.integers(1, 4000))
def test_a_file_cut_at_any_byte_is_read_up_to_its_last_whole_line(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in [made.header(), made.optimizer(), *made.steps(15)])
    data = whole[: max(cut, whole.index(b"\n") + 1)]
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    path.write_bytes(data)
    run = runfile.read(path)
    lines = data.count(b"\n")
    assert len(run.steps.get(0, {})) == max(0, lines - 2)
    assert run.skipped_lines == 0


@pytest.mark.parametrize(
    "line",
    [
        b"{broken",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b'{"no": "kind"}',
        b'{"kind": "step"}',
        b'{"kind": "step", "step": "x"}',
        b'{"kind": "log", "step": 1, "values": {"a": "x"}}',
        b'{"kind": "step", "step": 1, "norms": ["x"]}',
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_record_is_skipped_and_counted(line: bytes, tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.jsonl", [made.header(), *made.steps(3)])
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(made.end()).encode() + b"\n")
    run = runfile.read(path)
    assert (len(run.steps[0]), run.skipped_lines) == (3, 1)
    assert run.end is not None


def test_numbers_of_any_kind_become_columns(tmp_path: Path) -> None:
    odd = {
        1: {"loss": "nan"},
        2: {"loss": "-inf"},
        3: {"loss": None},
        4: {"loss": "x"},
        5: {"loss": 10**400},
        6: {"loss": [1]},
    }
    lines = [made.header(), *made.steps(7, plant=odd)]
    (steps,) = columns(runfile.read(made.write(tmp_path / "run.jsonl", lines)))
    assert np.isnan(steps.loss).tolist() == [True, False, True, True, True, True, False]
    assert steps.loss[1] == -np.inf
    assert not steps.has_loss[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no header"),
        ('{"kind": "step", "step": 1}\n', "no header"),
        ('{"kind": "header", "format": 2}\n', "format 2; this version of gradilocks reads format 3"),
        ("not json\n", "no header"),
    ],
)
def test_another_file_is_refused_in_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(runfile.BadRunFile, match=words):
        runfile.read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path, tmp_path / "no" / "folder.jsonl"):
        with pytest.raises(runfile.BadRunFile, match=r"directory"):
            runfile.read(path)


def test_a_file_is_followed_from_an_offset(tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.jsonl", [made.header(), *made.steps(2)])
    records, offset = runfile.follow(path, 0)
    assert (len(records), offset) == (3, path.stat().st_size)
    with path.open("ab") as file:
        file.write(json.dumps(made.steps(1, first=3)[0]).encode() + b'\n{"kind": "st')
    records, offset = runfile.follow(path, offset)
    assert [record and record["step"] for record in records] == [3]
    with path.open("ab") as file:
        file.write(b'ep", "step": 4}\n')
    records, offset = runfile.follow(path, offset)
    assert [record and record["step"] for record in records] == [4]
    made.write(path, [made.header()])
    assert runfile.follow(path, offset) == ([], 0)


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_bad_step_of_another_rank_is_merged_and_names_the_rank(tmp_path: Path) -> None:
    made.write(tmp_path / "run.jsonl", [made.header(world_size=2), made.optimizer(), *made.steps(50), made.end()])
    bad = made.steps(1, first=40, always=lambda _: {"nan": 2, "loss": "nan", "norm": "nan"})
    made.write(tmp_path / "run.rank1.jsonl", [made.header(rank=1), *bad, made.culprit(40, rank=1)])
    run = runfile.read(tmp_path / "run.jsonl")
    (steps,) = columns(run)
    assert steps.step[steps.nonfinite].tolist() == [40]
    assert steps.rank[39] == 1
    assert np.isfinite(steps.loss).all(), "the losses are those of rank 0"
    assert (40, 0, 1) in run.culprits


def test_a_bad_step_after_the_last_one_of_rank_0_is_kept(tmp_path: Path) -> None:
    made.write(tmp_path / "run.jsonl", [made.header(), *made.steps(10)])
    made.write(
        tmp_path / "run.rank3.jsonl", [made.header(rank=3), *made.steps(1, first=14, always=lambda _: {"inf": 1})]
    )
    (steps,) = columns(runfile.read(tmp_path / "run.jsonl"))
    assert (steps.step[-1], steps.rank[-1], bool(steps.nonfinite[-1])) == (14, 3, True)
    assert not steps.has_loss[-1]


def test_rank_files_are_found_by_name_and_ordered_by_rank(tmp_path: Path) -> None:
    for name in ("r[1].rank10.jsonl", "r[1].rank2.jsonl", "r1.rank3.jsonl", "r[1].rankx.jsonl", "r[1].jsonl"):
        made.write(tmp_path / name, [made.header()])
    assert [path.name for path in runfile.rank_files(tmp_path / "r[1].jsonl")] == [
        "r[1].rank2.jsonl",
        "r[1].rank10.jsonl",
    ]


def test_a_rank_file_can_be_read_alone(tmp_path: Path) -> None:
    made.write(tmp_path / "run.rank1.jsonl", [made.header(rank=1), *made.steps(2)])
    assert len(runfile.read(tmp_path / "run.rank1.jsonl").steps[0]) == 2
