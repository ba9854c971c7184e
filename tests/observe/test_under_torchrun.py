"""Under torchrun rank 0 records, the others train; with --all-ranks each has a file."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradilocks import read_run
from gradilocks.report import examine
from gradilocks.runfile import Run
from tests.observe.sessions import SCRIPTS, process, write
from tests.ranks.launched import Launcher, rank_launcher

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


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return rank_launcher()


def test_ranks_train_as_before_and_rank_0_records(launcher, tmp_path):
    write(tmp_path, "train.py", DDP)
    plain = launcher.run("train.py", cwd=tmp_path)
    assert plain.statuses == [0, 0], plain.err
    before = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    # By torchrun itself, which imports torch three times.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shown = process(*torchrun, "-m", "gradilocks", "run", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == before
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.steps) == 5
    assert (run.header.rank, run.header.ranks) == (0, 2)
    assert run.optimizers[0].names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert not (tmp_path / "a.rank1.jsonl").exists()
    assert shown.err.count("gradilocks: recorded") == 1


def test_with_all_ranks_each_has_a_file(launcher, tmp_path):
    write(tmp_path, "train.py", DDP)
    command = ("gradilocks", "run", "--all-ranks", "-o", "b.jsonl", "train.py")
    shown = launcher.run(*command, cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    assert len(read_run(tmp_path / "b.jsonl").steps) == 5
    assert read_run(tmp_path / "b.rank1.jsonl").header.rank == 1
    for err, name in zip(shown.err, ("b.jsonl", "b.rank1.jsonl"), strict=True):
        assert err.count(f"gradilocks: recording to {name}\n") == 1
        assert err.count(f", in {name}\n") == 1


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


def _printed(run: Run, folder: Path) -> list[tuple[float, float]]:
    """The norms of steps as recorded, and as rank 0 has printed them, where they are finite."""
    norms = [float(line.split()[-1]) for line in (folder / ".out0").read_text().splitlines()]
    return [(s.norm, norm) for s, norm in zip(run.steps, norms, strict=True) if s.norm is not None]


def _script(name: str) -> dict[str, Any]:
    """What a script defines, which has to run nothing for it."""
    return runpy.run_path(str(SCRIPTS / name))


@pytest.mark.parametrize("words", [(), ("--amp",)], ids=["plain", "scaler"])
def test_sharded_parameters_are_told_as_all_ranks_have_them(launcher, tmp_path, words):
    run, said = _watched(launcher, tmp_path, "fsdp2_amp.py", *words)
    assert len(run.steps) == 8
    assert not any(step.of_rank for step in run.steps)
    assert run.optimizers[0].names[:2] == ("0.weight", "0.bias")
    assert run.optimizers[0].sizes[0] == 128
    assert not any("of what rank" in line for line in said)
    assert not any(finding.rule == "of-one-rank" for finding in examine(run).findings)
    for recorded, printed in _printed(run, tmp_path):
        assert recorded == pytest.approx(printed, abs=1e-6)
    assert [step.loss_ranks for step in run.steps] == [2] * 8
    skipped = [step for step in run.steps if step.skipped]
    assert [step.step for step in skipped] == ([6] if words else [])
    for step in skipped:
        assert (step.bad_loss_ranks, step.loss, step.loss_nonfinite) == ((1,), None, True)
        assert step.culprits
        assert all(" on all 2 ranks" in culprit.name for culprit in step.culprits)
        sizes = dict(zip(run.optimizers[0].names, run.optimizers[0].sizes, strict=True))
        for culprit in step.culprits:  # Both ranks' elements, each of them once.
            assert 0 < culprit.nan + culprit.inf <= sizes[culprit.name.split()[0]]
        assert step.nan + step.inf > sum(sizes.values()) / 2
    if not words:
        _compare_with_one_process(run)


def _compare_with_one_process(run: Run) -> None:
    """fsdp2_amp.py without its ranks: each step on both ranks' data."""
    block = _script("fsdp2_amp.py")["Block"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), block(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = []
    for rank in (0, 1):
        torch.manual_seed(100 + rank)
        batches.append([(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(8)])
    for at, step in enumerate(run.steps):
        optimizer.zero_grad()
        loss = sum(F.cross_entropy(model(x), y) for x, y in (b[at] for b in batches)) / 2
        loss.backward()
        norms = [p.grad.norm().item() for p in model.parameters()]
        weights = [p.norm().item() for p in model.parameters()]
        largest = [p.grad.abs().max().item() for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert step.norm == pytest.approx(norm.item(), rel=1e-4)
        assert step.loss == pytest.approx(loss.item(), rel=1e-4)
        if step.detail is not None:
            pairs = zip(model.parameters(), before, weights, strict=True)
            updates = [(p.detach() - old).norm().item() / w for p, old, w in pairs]
            assert step.detail.norm == pytest.approx(norms, rel=1e-4)
            assert step.detail.largest == pytest.approx(largest, rel=1e-4)
            assert step.detail.weight == pytest.approx(weights, rel=1e-4)
            assert step.detail.update == pytest.approx(updates, rel=1e-3)
            assert step.detail.zeros == [0.0] * len(norms)
    assert run.steps[0].detail is not None


def test_flat_shards_are_told_as_all_ranks_have_them(launcher, tmp_path):
    run, _ = _watched(launcher, tmp_path, "fsdp1_amp.py")
    assert len(run.steps) == 8
    assert not any(step.of_rank for step in run.steps)
    for recorded, printed in _printed(run, tmp_path):
        assert recorded == pytest.approx(printed, abs=2e-6)
    (skipped,) = [step for step in run.steps if step.skipped]
    assert (skipped.step, skipped.bad_loss_ranks) == (4, (1,))
    assert skipped.culprits
    assert all(" on " in culprit.name for culprit in skipped.culprits)


def test_tensor_parallel_steps_are_those_of_one_process(launcher, tmp_path):
    run, _ = _watched(launcher, tmp_path, "tensor_parallel.py")
    assert len(run.steps) == 5
    assert not any(step.of_rank for step in run.steps)
    model = _script("tensor_parallel.py")["build"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    steps = iter(run.steps)
    for at in range(6):
        x = torch.randn(4, 8)
        if at == 4:
            continue
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norms = [p.grad.norm().item() for p in model.parameters()]
        step = next(steps)
        assert step.norm == pytest.approx(math.hypot(*norms), rel=1e-4)
        assert (step.loss, step.loss_ranks) == (pytest.approx(loss.item(), rel=1e-4), 2)
        if step.detail is not None:  # Plain tensors count once, shards add up.
            assert step.detail.norm == pytest.approx(norms, rel=1e-4)
        optimizer.step()


@pytest.mark.parametrize("how", ["fewer", "killed"])
def test_a_rank_that_ends_early_keeps_nobody_waiting(launcher, tmp_path, how):
    command = ("gradilocks", "run", "-o", "a.jsonl", "--flush-every", "1")
    shown = launcher.run(*command, SCRIPTS / "shards_apart.py", how, cwd=tmp_path)
    assert shown.statuses == [0, 0 if how == "fewer" else -9], shown.err
    run = read_run(tmp_path / "a.jsonl")
    assert run.end is not None
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert all(step.of_rank for step in run.steps[3:])
    if how == "fewer":
        assert not any(step.of_rank for step in run.steps[:3])
    for step in run.steps:  # Never the one under the name of the other.
        assert step.norm == step.step * (6.0 if step.of_rank else 10.0)
    assert "are of what rank 0 holds" in shown.err[0]


def _ddp_losses(rank: int) -> list[float]:
    """Of one rank of ddp_amp.py, at its first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    torch.manual_seed(rank)
    return [sum(model(torch.randn(4, 8)).square().mean().item() / 2 for _ in range(2))]


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
    assert skipped.bad_loss_ranks == (1,)
    assert [step.loss_ranks for step in run.steps] == [2] * 8
    losses = [_ddp_losses(rank) for rank in (0, 1)]
    first = sum(each[0] for each in losses) / 2  # Of the same weights on both.
    assert run.steps[0].loss == pytest.approx(first, rel=1e-5)
    assert skipped.finite_gradients is None  # Another rank's loss may have made them bad.


@pytest.mark.parametrize(("guard", "status"), [("skip", 0), ("stop", 70)])
def test_data_parallel_ranks_hold_the_same_steps_back(guard, status, launcher, tmp_path):
    words = ("gradilocks", "run", "--guard", guard, "-o", "a.jsonl")
    shown = launcher.run(*words, SCRIPTS / "guarded_ranks.py", "ddp", cwd=tmp_path)
    assert shown.statuses == [status, status], shown.err
    assert shown.out == ["True True\n"] * 2
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps if step.skipped] == [3]
    assert len(run.steps) == (5 if guard == "skip" else 3)
    files = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert files == ["a-first-bad-step.pt", "a.rank1-first-bad-step.pt"], "rank 1 has made it"
    assert not any(line.startswith("gradilocks") for line in shown.err[1].splitlines())


def test_ranks_of_which_nobody_knows_what_they_hold_hold_nothing_back_and_say_so(
    launcher, tmp_path
):
    words = ("gradilocks", "run", "--guard", "skip", "-o", "a.jsonl")
    shown = launcher.run(*words, SCRIPTS / "guarded_ranks.py", cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    assert [each.split()[1] for each in shown.out] == ["True", "False"]
    assert shown.err[0].count("--guard: steps of AdamW are not held back") == 1
    assert "--guard" not in shown.err[1]


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


STAGES = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
stage = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))  # A pipeline's stage.
optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
for step in range(8):
    optimizer.zero_grad()
    (stage(torch.randn(4, 6)).square().mean() * 4.0**rank).backward()
    if step == 2 and rank == 1 and LEAVES:
        raise SystemExit(0)
    optimizer.step()
"""


def _counted(histogram: Any) -> int:
    return sum(histogram["counts"]) + histogram["zeros"]


def test_an_audit_counts_on_every_rank(launcher, tmp_path):
    command = ("gradilocks", "audit", "-n", "4", "-o", "a.jsonl")
    shown = launcher.run(*command, SCRIPTS / "fsdp2_amp.py", "--amp", cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    assert "Counted on all 2 ranks" in shown.out[0]
    assert shown.out[1] == ""
    assert "gradilocks" not in shown.err[1]
    audit = read_run(tmp_path / "a.jsonl").audit
    assert audit is not None
    # Of four steps, both halves of every parameter; and what both batches made of the outputs.
    elements = 8 * 16 + 16 + 2 * (16 * 32) + 32 + 16 + 16 * 4 + 4
    assert _counted(audit["total"]["parameters"]) == 4 * elements
    (last,) = [module for module in audit["modules"] if module["name"] == "2"]
    assert _counted(last["activations"]) == 4 * 2 * (4 * 4)
    assert not (tmp_path / "a.rank1.jsonl").exists()


ROOT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
if sys.argv[1] == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
else:
    fully_shard(model)  # The root unit, which keeps its parameters whole between two passes.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    for _ in range(2):
        scaler.scale(model(torch.randn(4, 6)).square().mean()).backward()
    scaler.unscale_(optimizer)
    clip = getattr(model, "clip_grad_norm_", None)
    if clip is not None:
        norm = clip(1e-3)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor()
    if dist.get_rank() == 0:
        print(f"norm {float(norm):.6f}", flush=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_gradients_of_shards_are_those_before_the_clip(kind, launcher, tmp_path):
    """In an audit each of them counts once, under its module's name; in a run file as its norm."""
    script = write(tmp_path, "root.py", ROOT)
    elements = 6 * 8 + 8 + 8 * 2 + 2
    shown = launcher.run("gradilocks", "run", "-o", "a.jsonl", script, kind, cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    printed = [float(line.split()[1]) for line in shown.out[0].splitlines()]
    steps = read_run(tmp_path / "a.jsonl").steps
    assert [step.norm for step in steps] == pytest.approx(printed, rel=1e-4)
    assert [(step.limit, step.clipped) for step in steps] == [(1e-3, True)] * 4
    command = ("gradilocks", "audit", "-n", "3", "-o", "b.jsonl", script, kind)
    shown = launcher.run(*command, cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    audit = read_run(tmp_path / "b.jsonl").audit
    assert audit is not None
    assert _counted(audit["total"]["parameters"]) == 3 * elements
    names = [module["name"] for module in audit["modules"] if module["parameters"]]
    assert names == ["0", "2"] if kind == "fsdp2" else len(names) == 2
    assert audit["total"]["parameters"]["largest"] > 1e-2  # Unscaled, and not clipped.
    assert audit["total"]["parameters"]["largest"] < 10.0


def test_an_audit_keeps_apart_what_may_be_different_modules(launcher, tmp_path):
    script = write(tmp_path, "stages.py", STAGES.replace("LEAVES", "False"))
    shown = launcher.run("gradilocks", "audit", "-n", "3", "-o", "a.jsonl", script, cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    audit = read_run(tmp_path / "a.jsonl").audit
    assert audit is not None
    modules = {module["name"]: module for module in audit["modules"]}
    assert list(modules) == [f"{name} on rank {rank}" for rank in (0, 1) for name in (0, 1)]
    for module in modules.values():
        assert _counted(module["parameters"]) == 3 * (6 * 6 + 6)


def test_an_audit_has_what_a_rank_counted_that_ended_early(launcher, tmp_path):
    script = write(tmp_path, "stages.py", STAGES.replace("LEAVES", "True"))
    shown = launcher.run("gradilocks", "audit", "-n", "5", "-o", "a.jsonl", script, cwd=tmp_path)
    assert shown.statuses[0] == 0, shown.err
    audit = read_run(tmp_path / "a.jsonl").audit
    assert audit is not None
    assert "Counted on all 2 ranks" in shown.out[0]
    counted = {module["name"]: _counted(module["parameters"]) for module in audit["modules"]}
    steps = {name: number / (6 * 6 + 6) for name, number in counted.items()}
    assert steps == {"0 on rank 0": 5, "1 on rank 0": 5, "0 on rank 1": 3, "1 on rank 1": 3}
