"""Of several ranks one writes, unless all are asked to; nobody waits for anybody."""

from __future__ import annotations

import pytest
import torch

from gradilocks import Recorder, read_run
from gradilocks.runfile import origin_of
from tests.ranks.rank_programs import run_all
from tests.record.recorded import NAN, recorded, train


def test_other_ranks_record_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    control, _ = recorded(tmp_path / "runs" / "a.jsonl", steps=3)
    assert not control.recorder.recording
    assert not control.recorder.wants_detail(0)
    assert (control.recorder.steps, control.recorder.elapsed()) == (0, 0.0)
    control.recorder.flush()
    control.recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_rank_zero_writes_and_says_how_many_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    recorded(tmp_path / "a.jsonl", steps=3)
    header = read_run(tmp_path / "a.jsonl").header
    assert (header.rank, header.ranks) == (0, 4)


def test_all_ranks_write_files_of_their_own_if_asked(tmp_path, monkeypatch):
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with Recorder(tmp_path / "a.jsonl", all_ranks=True) as recorder:
            recorded(recorder, steps=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "a.rank1.jsonl",
        "a.rank2.jsonl",
    ]
    assert read_run(tmp_path / "a.rank2.jsonl").header.rank == 2


@pytest.mark.parametrize(("ranks", "tells"), [("1", True), ("2", False)])
def test_a_finite_loss_of_one_rank_of_several_names_no_parameter(
    tmp_path, monkeypatch, ranks, tells
):
    """Another rank's loss may have been NaN: averaged gradients show the same on every rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", ranks)
    control, model = recorded(tmp_path / "a.jsonl", steps=2)
    model[0].weight.register_hook(lambda gradient: gradient * NAN)
    train(control, model, steps=1, start=3)
    control.recorder.close()
    step = read_run(tmp_path / "a.jsonl").steps[-1]
    assert [culprit.name for culprit in step.culprits] == ["0.weight"]
    assert (origin_of(step).where == "parameter") == tells
    assert tells or origin_of(step).where == "unknown"


def record_as_a_rank(rank):
    """In a process group: the group says which rank this is, not the environment."""
    import os
    import tempfile

    folder = tempfile.mkdtemp()
    with Recorder(f"{folder}/a.jsonl") as recorder:
        recorded(recorder, steps=2)
    return os.listdir(folder)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_the_process_group_says_who_writes(tmp_path):
    returned = run_all([record_as_a_rank], tmp_path)
    assert returned["record_as_a_rank"] == [["a.jsonl"], []]
