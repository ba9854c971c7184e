"""A rank raises, exits, is killed or sleeps: the other gets torch's error, and everything is whole.

Whole is: parameters, optimizer state, scale and the control's checkpoint as they were before the
step; the checkpoint goes on in one process; rank 0's run file ends readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import read_run
from gradilocks.report import examine
from tests.ranks.launched import Launcher, rank_launcher

TRAIN = """
import copy, json, os, signal, sys, time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import gradilocks

layout, fault, place = sys.argv[1:4]
# A rank that sleeps is noticed by the time-out, all others by the connection that is gone.
dist.init_process_group("gloo", timeout=timedelta(seconds=4 if fault == "sleep" else 300))
rank = dist.get_rank()


def give_out():
    if fault == "raise":
        raise RuntimeError("the batch could not be read")
    if fault == "exit":
        sys.exit(3)
    if fault == "_exit":
        os._exit(4)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "interrupt":
        raise KeyboardInterrupt
    time.sleep(3600)


torch.manual_seed(0)
told = {}
if layout == "stages":
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))[rank : rank + 1]
    told = {"process_group": dist.group.WORLD}
else:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
if layout == "fsdp2":
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
if layout == "ddp":
    model = nn.parallel.DistributedDataParallel(model)


def loss_of(step):
    width = model[0].in_features if layout == "stages" else 4
    return model(torch.full((2, width), 0.1 * (step + rank))).square().mean()


def whole_state():
    params = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    states = [v for s in optimizer.state.values() for v in s.values()]
    states = [v.to_local() if hasattr(v, "to_local") else v for v in states]
    tensors = [t.detach().clone() for t in (*params, *states)]
    return tensors, copy.deepcopy(control.state_dict())


optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
# In the midst of the update of a step that is recorded tensor by tensor, or of one that is not.
fault_at = 2 if place == "update" else 3
if place == "update" and rank == 1:
    calls = iter(range(9))
    optimizer.register_step_pre_hook(lambda *_: give_out() if next(calls) == fault_at else None)
recorder = gradilocks.Recorder("run.jsonl", detail_every=2, flush_every=2)
with recorder:
    control = gradilocks.GradientControl(
        optimizer,
        model=model,
        clip=gradilocks.ZScoreClip(3.0),
        scale=gradilocks.DynamicScale(init_scale=64.0, growth_interval=2),
        record=recorder,
        **told,
    )
    for step in range(6):
        before = whole_state()
        try:
            if step == fault_at and rank == 1 and place == "forward":
                give_out()
            control.backward(loss_of(step))
            if step == fault_at and rank == 1 and place == "step":
                give_out()
            control.step()
            control.zero_grad()
        except BaseException as error:
            after = whole_state()
            same = all(map(torch.equal, before[0], after[0])) and before[1] == after[1]
            torch.save(
                {
                    "same": same,
                    "error": f"{type(error).__name__}: {error}",
                    "state": after[1],
                    "params": [p.detach().clone() for p in after[0]],
                    "scale": control.scale,
                },
                f"{rank}.pt",
            )
            raise
"""


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return rank_launcher()


CASES = [
    ("fsdp2", "raise", "forward"),
    ("fsdp2", "kill", "step"),
    ("fsdp2", "_exit", "update"),
    ("fsdp2", "sleep", "step"),
    ("stages", "_exit", "step"),
    ("stages", "interrupt", "forward"),
    ("stages", "kill", "update"),
    ("ddp", "exit", "forward"),
    ("ddp", "kill", "step"),
]
STATUS = {"raise": 1, "kill": -9, "_exit": 4, "exit": 3, "interrupt": -2, "sleep": -15}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_survivor_gets_torchs_error_and_is_whole(
    launcher: Launcher, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ended = launcher.run("train.py", *case, cwd=tmp_path, ends_others=case[1] == "sleep")
    assert ended.statuses == [1, STATUS[case[1]]], ended.err
    kept = torch.load(tmp_path / "0.pt", weights_only=False)
    assert kept["same"]
    expected = "imed out" if case[1] == "sleep" else "onnection"
    assert expected in kept["error"]
    assert kept["scale"] == kept["state"]["scale"]
    run = read_run(tmp_path / "run.jsonl")
    # The step that was taken when the other rank went is told, without what that one knew.
    taken = {("ddp", "step"): 4}.get((case[0], case[2]), 3)
    assert len(run.steps) == taken
    assert run.end is not None
    assert (run.end.status, run.end.exit) == ("error", 1)
    assert run.end.error is not None
    assert expected in run.end.error
    assert any(finding.rule == "ended-in-error" for finding in examine(run).findings)
    _goes_on_alone(kept["state"], taken)


def _goes_on_alone(state: dict[str, Any], taken: int) -> None:
    """The survivor's checkpoint in a control of one process."""
    model = nn.Linear(4, 1)
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1),
        clip=gradilocks.ZScoreClip(3.0),
        scale=gradilocks.DynamicScale(init_scale=64.0, growth_interval=2),
    )
    control.load_state_dict(state)
    assert control.state_dict() == state
    control.backward(model(torch.ones(2, 4)).square().mean())
    assert control.step().step == taken + 1


WATCHED = """
import os, signal, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 6 and dist.get_rank() == 1:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no such batch")
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(4, 4)), torch.randint(2, (4,))).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_watched_run_ends_readable_when_a_rank_goes(
    launcher: Launcher, tmp_path: Path, fault: str
) -> None:
    """As torchrun does, the survivor is sent SIGTERM, if its collective has not failed before."""
    (tmp_path / "train.py").write_text(WATCHED)
    words = ("gradilocks", "run", "-o", "run.jsonl", "train.py", fault)
    ended = launcher.run(*words, cwd=tmp_path, ends_others=True)
    assert ended.statuses[1] == STATUS[fault]
    assert ended.statuses[0] in (1, -15)
    run = read_run(tmp_path / "run.jsonl")
    assert len(run.steps) == 6
    assert run.end is not None
    assert run.end.status in ("error", "interrupted")
    assert any(f.rule in ("ended-in-error", "interrupted") for f in examine(run).findings)
    assert "recorded 6 steps" in ended.err[0]
    assert "recorded" not in ended.err[1]
