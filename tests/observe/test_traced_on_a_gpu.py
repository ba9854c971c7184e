"""On a GPU: a bad step that is looked at before it is taken is named; else that is said."""

from __future__ import annotations

import pytest

from gradilocks import read_run
from tests.observe.sessions import both, watched, write

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys, warnings
import torch
from torch import nn

warnings.simplefilter("ignore")
kind = sys.argv[1]
torch.manual_seed(0)


class Gate(nn.Module):
    by = torch.tensor(1.0, device="cuda")

    def forward(self, x):
        return torch.dropout(x, 0.1, True) / self.by


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.gate, self.last = Gate(), nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.gate(self.norm(self.first(x))))


model = Net().cuda()
fused = kind in ("fused", "guarded fused")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
scaler = torch.amp.GradScaler(
    "cuda", init_scale=1024.0, enabled=kind in ("scaler", "fused", "dropin", "waiting")
)
control = None
if kind == "dropin":
    import gradilocks

    scaler = gradilocks.GradScaler("cuda", init_scale=1024.0)
if kind == "control":
    import gradilocks

    control = gradilocks.GradientControl(optimizer, model=model)
inputs = torch.randn(32, 64, device="cuda")
targets = torch.randint(10, (32,), device="cuda")
zero, one = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
losses = []
for number in range(1, 41):
    model.gate.by = zero if number == 21 else one
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16, enabled=scaler.is_enabled()):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    if control is not None:
        control.backward(loss)
        control.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    losses.append(loss.detach())
    if kind in ("waiting", "control"):
        torch.cuda.synchronize()
finite = all(bool(param.isfinite().all()) for param in model.parameters())
print([float(loss).hex() for loss in losses[-3:]], finite, torch.rand(1, device="cuda").item())
print([float(param.detach().double().sum()).hex() for param in model.parameters()])
"""


def found_in(folder):
    return [
        (trace.step, trace.module, trace.certainty) for trace in read_run(folder / "a.jsonl").traces
    ]


@pytest.mark.parametrize("kind", ["scaler", "dropin", "waiting", "control", "fused"])
def test_a_step_that_was_held_back_is_run_again_and_no_number_changes(kind, tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    plain, seen = both("train.py", kind, cwd=tmp_path)
    assert (plain.status, seen.status) == (0, 0), seen.err
    assert plain.out == seen.out
    (path,) = (tmp_path / "runs").glob("*.jsonl")
    path.rename(tmp_path / "a.jsonl")
    ((step, module, certainty),) = found_in(tmp_path)
    assert (step, module) == (21, "gate")
    if kind != "fused":  # There the host may have gone on by then.
        assert certainty == "certain"


def test_without_a_scaler_it_is_said_that_trace_would_look(tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    shown = watched("-o", "a.jsonl", "train.py", "plain", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert found_in(tmp_path) == []
    (line,) = [line for line in shown.told if "was not looked for" in line]
    assert line.endswith("gradilocks run --trace train.py plain")


def test_trace_waits_and_is_certain_without_a_scaler(tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    shown = watched("--trace", "-o", "a.jsonl", "train.py", "plain", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert found_in(tmp_path) == [(21, "gate", "certain")]


@pytest.mark.parametrize("kind", ["guarded", "guarded fused"])
def test_a_guarded_step_is_not_taken(kind, tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    shown = watched("--guard", "skip", "-o", "a.jsonl", "train.py", kind, cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert "True" in shown.out.splitlines()[0], "the weights are finite"
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps if step.skipped] == [21]
    assert {(step, module) for step, module, _ in found_in(tmp_path)} <= {(21, "gate")}
    shown = watched("--guard", "stop", "-o", "b.jsonl", "train.py", kind, cwd=tmp_path)
    assert shown.status == 70, shown.err
    assert (tmp_path / "b-first-bad-step.pt").exists()
    ((step, module, certainty),) = [
        (trace.step, trace.module, trace.certainty)
        for trace in read_run(tmp_path / "b.jsonl").traces
    ]
    assert (step, module, certainty) == (21, "gate", "certain")
