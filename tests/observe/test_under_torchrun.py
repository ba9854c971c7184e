"""Under torchrun rank 0 records, the others train; with --all-ranks each has a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradilocks import read_run
from gradilocks.report import examine
from gradilocks.runfile import Run
from tests.observe.sessions import SCRIPTS, process, write
from tests.ranks.launched import Launcher, launching

DDP = """
import gc
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
total = sum(p.double().sum().item() for p in model.parameters())
with open(f"rank{dist.get_rank()}.txt", "w") as file:
    print(total, torch.rand(1).item(), file=file)
# Where a DistributedDataParallel (a cycle of references) outlives its group, torch itself aborts
# now and then as the process ends, with all done: 9 of 30 on a busy machine, collected 0 of 32.
dist.barrier()
del model, optimizer
gc.collect()
dist.destroy_process_group()
"""

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


def test_ranks_train_as_before_and_rank_0_records(tmp_path):
    write(tmp_path, "train.py", DDP)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = process(*torchrun, "train.py", cwd=tmp_path)
    assert plain.status == 0, plain.err
    before = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    shown = process(*torchrun, "-m", "gradilocks", "run", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == before
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.steps) == 5
    assert (run.header.rank, run.header.ranks) == (0, 2)
    assert run.optimizers[0].names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert not (tmp_path / "a.rank1.jsonl").exists()
    assert shown.err.count("gradilocks: recorded") == 1
    ours = ["-m", "gradilocks", "run", "--all-ranks", "-o", "b.jsonl", "train.py"]
    shown = process(*torchrun, *ours, cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert len(read_run(tmp_path / "b.jsonl").steps) == 5
    assert read_run(tmp_path / "b.rank1.jsonl").header.rank == 1
    for name in ("b.jsonl", "b.rank1.jsonl"):
        assert shown.err.count(f"gradilocks: recording to {name}\n") == 1


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with launching() as made:
        yield made


def _watched(launcher: Launcher, folder: Path, script: str, *words: str) -> tuple[Run, list[str]]:
    """A script run by itself and under watch: it prints the same, and rank 0 records."""
    path = SCRIPTS / script
    plain = launcher.run(path, *words, cwd=folder)
    assert plain.statuses == [0, 0], plain.err
    shown = launcher.run("gradilocks", "run", "-o", "a.jsonl", path, *words, cwd=folder)
    assert shown.statuses == [0, 0], shown.err
    assert shown.out == plain.out
    assert shown.err[1] == plain.err[1]  # Nothing is said twice.
    assert sorted(each.name for each in folder.glob("*.jsonl")) == ["a.jsonl"]
    return read_run(folder / "a.jsonl"), shown.err[0].splitlines()


@pytest.mark.parametrize("words", [(), ("--amp",)], ids=["plain", "scaler"])
def test_sharded_parameters_are_told_as_one_ranks(launcher, tmp_path, words):
    run, said = _watched(launcher, tmp_path, "fsdp2_amp.py", *words)
    assert len(run.steps) == 8
    assert all(step.of_rank for step in run.steps)
    assert run.optimizers[0].names[:2] == ("0.weight", "0.bias")
    assert run.optimizers[0].sizes[0] == 128
    assert sum("are of what rank 0 holds" in line for line in said) == 1
    assert any(finding.rule == "of-one-rank" for finding in examine(run).findings)
    skipped = [step for step in run.steps if step.skipped]
    assert [step.step for step in skipped] == ([6] if words else [])
    for step in skipped:
        assert step.culprits
        assert all(culprit.name.endswith(" on rank 0") for culprit in step.culprits)
    norms = [float(line.split()[-1]) for line in (tmp_path / ".out0").read_text().splitlines()]
    taken = [(own.norm, whole) for own, whole in zip(run.steps, norms, strict=True) if own.norm]
    assert all(own < whole for own, whole in taken)  # It is not the whole, and is not told so.


def test_flat_shards_are_told_as_one_ranks(launcher, tmp_path):
    run, _ = _watched(launcher, tmp_path, "fsdp1_amp.py")
    assert len(run.steps) == 8
    assert all(step.of_rank for step in run.steps)
    assert [step.step for step in run.steps if step.skipped] == [4]


def test_replicas_are_told_as_the_whole(launcher, tmp_path):
    run, said = _watched(launcher, tmp_path, "ddp_amp.py")
    assert not any(step.of_rank for step in run.steps)
    assert not any("of what rank" in line for line in said)
    norms = [float(line.split()[-1]) for line in (tmp_path / ".out0").read_text().splitlines()]
    assert [step.norm for step in run.steps if step.norm] == pytest.approx(
        [norm for norm in norms if norm == norm], rel=1e-5
    )
    (skipped,) = [step for step in run.steps if step.skipped]
    assert skipped.step == 5
    assert not any(" on rank" in culprit.name for culprit in skipped.culprits)
    assert skipped.finite_gradients is None  # Another rank's loss may have made them bad.


def test_ranks_that_step_differently_often_wait_for_nobody(launcher, tmp_path):
    run, _ = _watched(launcher, tmp_path, "local_sgd.py")
    assert len(run.steps) == 9
    assert all(step.of_rank for step in run.steps)  # Nothing tells copies from parts.


def test_a_control_tells_of_all_ranks_under_watch_too(launcher, tmp_path):
    shown = launcher.run(
        "gradilocks", "run", "-o", "a.jsonl", "--flush-every", "2",
        SCRIPTS / "controlled_ranks.py", cwd=tmp_path,
    )  # fmt: skip
    assert shown.statuses == [0, 0], shown.err
    run = read_run(tmp_path / "a.jsonl")
    norms = [float(line) for line in shown.out[0].split()]
    assert [step.norm for step in run.steps if step.norm] == [n for n in norms if n == n]
    assert not any(step.of_rank for step in run.steps)
    sharded, replicated = (
        [step for step in run.steps if step.optimizer == number] for number in (0, 1)
    )
    assert [step.loss_ranks for step in sharded] == [2] * 5
    assert [step.loss_ranks for step in replicated] == [2] * 4 + [None]
    for steps in (sharded, replicated):
        assert [step.step for step in steps if step.bad_loss_ranks == (1,)] == [3]
    assert all(" on all 2 ranks" in culprit.name for culprit in sharded[2].culprits)
    assert sharded[0].detail is not None
    total = sum(norm**2 for norm in sharded[0].detail.norm) ** 0.5
    assert total == pytest.approx(sharded[0].norm, rel=1e-5)  # Of the tensors whole.
    assert shown.err[0].count("the loss of step 3 was NaN or Inf on rank 1") == 1
    assert shown.err[1] == ""  # The ranks share a terminal.


def test_an_audit_says_on_which_rank_it_counted(launcher, tmp_path):
    command = ("gradilocks", "audit", "-n", "4", "-o", "a.jsonl")
    shown = launcher.run(*command, SCRIPTS / "fsdp2_amp.py", "--amp", cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    assert "Counted on rank 0 of 2" in shown.out[0]
    assert shown.out[1] == ""
    assert "gradilocks" not in shown.err[1]
    audit = read_run(tmp_path / "a.jsonl").audit
    assert audit is not None
    counted = sum(audit["total"]["parameters"]["counts"]) + audit["total"]["parameters"]["zeros"]
    # Of four steps, the half of every parameter that rank 0 holds.
    elements = 8 * 16 + 16 + 2 * (16 * 32) + 32 + 16 + 16 * 4 + 4
    assert counted == 4 * elements // 2
    assert not (tmp_path / "a.rank1.jsonl").exists()
