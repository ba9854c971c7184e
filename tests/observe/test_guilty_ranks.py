"""A rank that makes NaN is found, by `gradilocks run`, and named by rank 0; nothing else changes.

Each rank runs a bad step once more by itself. Where ranks would have to do it together none does,
and that is said.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradilocks import read_run
from gradilocks.report import examine
from gradilocks.runfile import Trace
from tests.observe.sessions import SCRIPTS, write
from tests.ranks.launched import Ended, Launcher, rank_launcher

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)
GUILTY = SCRIPTS / "guilty_ranks.py"


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return rank_launcher()


def _run(launcher: Launcher, folder: Path, *words: object) -> Ended:
    return launcher.run("gradilocks", "run", "-o", "a.jsonl", *words, cwd=folder)


def _traces(folder: Path, name: str = "a.jsonl") -> list[Trace]:
    return list(read_run(folder / name).traces)


def _places(traces: list[Trace]) -> list[tuple[object, ...]]:
    return [(t.step, t.where, t.phase, t.module, t.ranks, t.certainty) for t in traces]


SEVERAL = "forward:3,backward:5,loss:7,batch:9,+forward:11"


@pytest.mark.parametrize("way", ["scaled", "static"])
def test_the_guilty_rank_is_named_and_training_goes_on_bit_for_bit(launcher, tmp_path, way):
    plain = launcher.run(GUILTY, SEVERAL, way, cwd=tmp_path)
    assert plain.statuses == [0, 0], plain.err
    shown = _run(launcher, tmp_path, GUILTY, SEVERAL, way)
    assert shown.statuses == [0, 0], shown.err
    assert shown.out == plain.out
    assert "gradilocks" not in shown.err[1]
    traces = _traces(tmp_path)
    assert _places(traces) == [
        (3, "module", "forward", "divide", (1,), "certain"),
        (5, "module", "backward", "length", (1,), "certain"),
        (7, "after", "forward", "", (1,), "certain"),
        (9, "input", "forward", "", (1,), "certain"),
        (11, "module", "forward", "divide", (0, 1), "certain"),
    ]
    assert traces[0].text.startswith("On rank 1: NaN and Inf first in the output of divide (Div")
    assert traces[-1].text.startswith("On all 2 ranks: ")
    lines = shown.err[0].splitlines()
    for trace in traces:  # Each of them once, after its step.
        told = [line for line in lines if trace.text in line]
        assert told == [f"step {trace.step} traced: {trace.text}"]
        skipped = next(line for line in lines if line.startswith(f"step {trace.step} skipped"))
        assert lines.index(skipped) < lines.index(told[0])
    report = " ".join(found.sentence for found in examine(read_run(tmp_path / "a.jsonl")).findings)
    assert "At step 3 NaN and Inf first appeared in divide on rank 1 (certain)" in report


def test_with_all_ranks_each_file_has_what_its_own_rank_found(launcher, tmp_path):
    """Without a scaler, where the bad step is taken."""
    shown = _run(launcher, tmp_path, "--all-ranks", GUILTY, "batch:3", "plain")
    assert shown.statuses == [0, 0], shown.err
    expected = (3, "input", "forward", "", (1,), "certain")
    assert _places(_traces(tmp_path)) == [expected]
    assert _places(_traces(tmp_path, "a.rank1.jsonl")) == [expected]
    health = examine(read_run(tmp_path / "a.jsonl"))
    assert "it was in the input on rank 1 (certain)" in health.sentence


def test_a_guard_stops_all_ranks_at_the_same_step(launcher, tmp_path):
    shown = _run(launcher, tmp_path, "--guard", "stop", GUILTY, "backward:4", "plain")
    assert shown.statuses == [70, 70], shown.err
    assert [len(out.splitlines()) for out in shown.out] == [3, 3]
    (found,) = _traces(tmp_path)
    assert _places([found]) == [(4, "module", "backward", "length", (1,), "certain")]
    assert found.text.endswith(". That rank's step is in a.rank1-first-bad-step.pt")
    names = ("a-first-bad-step.pt", "a.rank1-first-bad-step.pt")
    kept = [torch.load(tmp_path / name, weights_only=True) for name in names]
    assert [each["step"] for each in kept] == [4, 4]
    assert [bool(each["found"]) for each in kept] == [False, True]


def test_a_guard_skips_on_all_ranks_and_an_innocent_one_blames_nobody(launcher, tmp_path):
    command = ("--guard", "skip", "--all-ranks", GUILTY, "loss:3,-forward:5", "plain")
    shown = _run(launcher, tmp_path, *command)
    assert shown.statuses == [0, 0], shown.err
    weights = [[line.split()[1] for line in out.splitlines()] for out in shown.out]
    assert weights[0] == weights[1]  # Else one of them has taken it.
    assert [weights[0][step - 2] == weights[0][step - 1] for step in (3, 4, 5)] == [
        True,
        False,
        True,
    ]
    assert _places(_traces(tmp_path)) == [
        (3, "after", "forward", "", (1,), "certain"),
        (5, "module", "forward", "divide", (0,), "certain"),
    ]
    own, others = _traces(tmp_path, "a.rank1.jsonl")
    assert (own.step, own.where, own.ranks) == (3, "after", (1,))
    assert (others.step, others.where, others.certainty) == (5, "gradients", "unknown")
    assert "what other ranks found is told by rank 0" in others.text


def test_gradients_that_the_script_itself_spoils_are_nobodys_module(launcher, tmp_path):
    spoils = "    if step == 3:\n        net.head.weight.grad[0, 0] = float('inf')\n"
    text = GUILTY.read_text().replace("    scaler.step(opt", f"{spoils}    scaler.step(opt")
    script = write(tmp_path, "spoils.py", text)
    shown = _run(launcher, tmp_path, script, "none:3")
    assert shown.statuses == [0, 0], shown.err
    (found,) = _traces(tmp_path)
    assert (found.where, found.ranks, found.certainty) == ("gradients", (0, 1), "certain")
    assert "On all 2 ranks: Inf in the gradient of head.weight, but in no module" in found.text


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
if kind == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
elif kind == "fsdp2":
    fully_shard(model)
else:
    parallelize_module(
        model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(0 if kind == "tp" else dist.get_rank())
for step in range(1, 6):
    optimizer.zero_grad()
    x = torch.randn(4, 6)
    if step == 3 and (kind == "tp" or dist.get_rank() == 1):
        x[0, 0] = float("nan")
    model(x).square().mean().backward()
    optimizer.step()
    print(step, torch.rand(1).item(), flush=True)
"""


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "tp"])
def test_ranks_that_hold_a_model_together_run_nothing_again_and_say_so(launcher, tmp_path, kind):
    script = write(tmp_path, "sharded.py", SHARDED)
    plain = launcher.run(script, kind, cwd=tmp_path)
    guard = ("--guard", "skip") if kind == "fsdp2" else ()
    shown = _run(launcher, tmp_path, *guard, script, kind)
    assert shown.statuses == [0, 0], shown.err
    assert shown.out == plain.out
    assert shown.err[0].count("--guard: steps of SGD are not held back") == len(guard) // 2
    assert "--guard" not in shown.err[1]
    (found,) = _traces(tmp_path)
    assert (found.step, found.where, found.certainty) == (3, "gradients", "unknown")
    assert "where it arose is not known: the model is spread over ranks" in found.text
    assert all(
        finding.culprit is None for finding in examine(read_run(tmp_path / "a.jsonl")).findings
    )


def test_a_model_in_which_ranks_meet_is_run_up_to_there(launcher, tmp_path):
    plain = launcher.run(GUILTY, "backward:3,batch:5", "sync", cwd=tmp_path)
    shown = _run(launcher, tmp_path, GUILTY, "backward:3,batch:5", "sync")
    assert shown.statuses == [0, 0], shown.err
    assert shown.out == plain.out
    met = "the model meets other ranks as it runs"
    unknown, likely = _traces(tmp_path)
    assert (unknown.step, unknown.where, unknown.certainty) == (3, "gradients", "unknown")
    assert f"where it arose is not known: {met}" in unknown.text
    assert _places([likely]) == [(5, "input", "forward", "", (1,), "likely")]
    assert f"Likely, not certain: {met}" in likely.text


STAGES = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)

class Fault(nn.Module):
    step = 0

    def forward(self, x):
        if self.step == 3 and rank == 0:
            return x / 0.0
        if self.step == 5 and rank == 1:
            return (x * 0.0).sqrt() + x
        return x

stage = nn.Sequential(nn.Linear(4, 4), Fault(), nn.Linear(4, 4))
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
scaler.scale(torch.ones(()))  # It holds bad steps back; nothing is scaled.
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for step in range(1, 7):
    optimizer.zero_grad()
    stage[1].step = step
    if rank == 0:
        out = stage(torch.randn(2, 4))
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
    else:
        came = torch.empty(2, 4)
        dist.recv(came, 0)
        came.requires_grad_()
        stage(came).square().mean().backward()
        dist.send(came.grad, 0)
    scaler.step(optimizer)
    scaler.update(1.0)
"""


def test_a_pipelines_stage_is_not_blamed_for_what_another_sent(launcher, tmp_path):
    script = write(tmp_path, "stages.py", STAGES)
    shown = _run(launcher, tmp_path, script)
    assert shown.statuses == [0, 0], shown.err
    assert _places(_traces(tmp_path)) == [
        (3, "module", "forward", "1", (0,), "certain"),
        (5, "module", "backward", "1", (1,), "certain"),
    ]


MEETINGS = """
import threading
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
import warnings
from torch.distributed import all_reduce
from gradilocks.lab.trace.no_collectives import MeetsOthers, NoCollectives

warnings.simplefilter("ignore")
dist.init_process_group("gloo")

class Late(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())

    @staticmethod
    def backward(ctx, grad):
        all_reduce(grad)
        return grad

def swallowed():
    try:
        dist.barrier()
    except Exception:
        pass

def late():
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Late.apply(x).sum(), [x])

ways = {
    "imported": lambda: all_reduce(torch.ones(2)),
    "swallowed": swallowed,
    "with gradients": lambda: with_gradients.all_reduce(torch.ones(2, requires_grad=True) * 1),
    "functional": lambda: functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD),
    "objects": lambda: dist.all_gather_object([None, None], "hello"),
    "message": lambda: dist.send(torch.ones(2), 1 - dist.get_rank()),
    "late": late,
}
for name, way in ways.items():
    alone = NoCollectives()
    try:
        with alone:
            way()
        print(name, "was let pass")
    except MeetsOthers:
        print(name, alone.met)
with NoCollectives() as alone:  # Another thread of the script meets as ever.
    total = torch.ones(2)
    thread = threading.Thread(target=all_reduce, args=(total,))
    thread.start()
    thread.join()
print("thread", alone.met, total.tolist())
all_reduce(total)
print("after", total.tolist())
"""


def test_a_rank_alone_begins_no_collective_by_whatever_way(launcher, tmp_path):
    script = write(tmp_path, "meetings.py", MEETINGS)
    shown = launcher.run(script, cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    names = ["imported", "swallowed", "with gradients", "functional", "objects", "message", "late"]
    expected = [*(f"{name} True" for name in names), "thread False [2.0, 2.0]", "after [4.0, 4.0]"]
    assert [out.splitlines() for out in shown.out] == [expected, expected]


CONTROLLED = """
import logging
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gradilocks

traced = sys.argv[1:]  # The ranks that have a tracer.
dist.init_process_group("gloo")
rank = dist.get_rank()
logging.basicConfig(format="%(message)s")
torch.manual_seed(0)

class Divide(nn.Module):
    by = 1.0

    def forward(self, x):
        return x / self.by

net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), Divide(), nn.Linear(16, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
recorder = gradilocks.Recorder("a.jsonl", exists="replace")
control = gradilocks.GradientControl(optimizer, model=model, record=recorder)
tracer = gradilocks.trace(model, control=control) if str(rank) in traced else None
torch.manual_seed(rank)
for step in range(1, 6):
    net[2].by = 0.0 if step == 3 and rank == 1 else 1.0
    control.backward(model(torch.randn(4, 8)).square().mean())
    control.step()
    control.zero_grad()
    print(step, *(each.double().sum().item() for each in net.state_dict().values()))
if tracer is not None:
    tracer.close()
    for found in tracer.findings:
        print("found", found.module, found.ranks, found.certainty)
recorder.close()
dist.barrier()
"""


def test_a_controls_tracers_answer_each_other(launcher, tmp_path):
    script = write(tmp_path, "controlled.py", CONTROLLED)
    plain = launcher.run(script, cwd=tmp_path)
    assert plain.statuses == [0, 0], plain.err
    shown = launcher.run(script, "0", "1", cwd=tmp_path)
    assert shown.statuses == [0, 0], shown.err
    expected = "found 2 (1,) certain\n"
    assert shown.out == [out + expected for out in plain.out]
    assert _places(_traces(tmp_path)) == [(3, "module", "forward", "2", (1,), "certain")]
    for err in shown.err:
        assert err.count("step 3 traced: On rank 1: Inf first in the output of 2 (Divide)") == 1


def test_in_a_file_that_goes_on_the_ranks_number_their_steps_alike(launcher, tmp_path):
    words = ("-o", "a.jsonl", GUILTY, "forward:3", "scaled")
    last = []
    for goes_on in ((), ("--append",)):
        shown = launcher.run("gradilocks", "run", *goes_on, *words, cwd=tmp_path)
        assert shown.statuses == [0, 0], shown.err
        last.append(read_run(tmp_path / "a.jsonl").steps[-1].step)
    assert last[1] == 2 * last[0]
    assert _places(_traces(tmp_path)) == [
        (3, "module", "forward", "divide", (1,), "certain"),
        (last[0] + 3, "module", "forward", "divide", (1,), "certain"),
    ]
