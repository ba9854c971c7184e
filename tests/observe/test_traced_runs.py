"""`gradilocks run` finds the module, in a script that knows nothing of it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from gradilocks import read_run
from gradilocks.observe import script_calls
from gradilocks.observe.gradient_reader import WatchedGradients
from gradilocks.observe.script_tracer import ScriptTracer
from gradilocks.step import events
from gradilocks.step.events import Step
from tests.observe.sessions import forked, write

SCRIPT = """
import torch
from torch import nn

class Hot(nn.Module):
    by = 1.0
    def forward(self, x):
        return x * self.by

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Hot(), nn.Linear(4, 1))
optimizer = torch.optim.{optimizer}
scaler = torch.amp.GradScaler("cpu")
for number in range(12):
    optimizer.zero_grad()
    model[1].by = float("inf") if number in (4, 5, 9) else 1.0
    loss = model(torch.randn(2, 4)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print([p.tolist() for p in model.parameters()], torch.rand(1).item())
print(any(m._forward_hooks or m._forward_pre_hooks for m in model))
"""


@pytest.mark.parametrize(
    "optimizer", ["SGD(model.parameters(), 0.1)", "Adam(model.parameters(), fused=True)"]
)
@pytest.mark.parametrize("words", [(), ("--trace",)], ids=["light", "--trace"])
def test_the_skipped_step_is_traced_and_no_number_changes(words, optimizer, tmp_path):
    write(tmp_path, "train.py", SCRIPT.format(optimizer=optimizer))
    shown = forked(*words, "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert shown.out == forked("train.py", cwd=tmp_path, command="python").out
    assert shown.out.splitlines()[-1] == "False"
    run = read_run(tmp_path / "a.jsonl")
    assert [s.step for s in run.steps if s.skipped] == [5, 6, 10]
    (found,) = run.traces  # What comes again at the same place is not told again.
    assert (found.step, found.phase, found.module, found.kind) == (5, "forward", "1", "Hot")
    assert found.certainty == "certain"
    assert run.header.settings["trace"] == ("always" if words else "light")
    assert shown.err.count("Inf first in the output of 1 (Hot)") == 1
    assert "step 5 traced: Inf first in the output of 1 (Hot)" in shown.err


def test_a_trace_that_the_log_cannot_tell_is_told_at_the_end_and_a_quiet_run_tells_none(tmp_path):
    silenced = "import logging\nlogging.getLogger('gradilocks').setLevel('ERROR')\n"
    write(tmp_path, "train.py", silenced + GOES_ON)
    shown = forked("-o", "a.jsonl", "train.py", "20", cwd=tmp_path)
    (line,) = [line for line in shown.err.splitlines() if "traced: " in line]
    assert line.startswith("gradilocks: traced: ")
    write(tmp_path, "train.py", GOES_ON)
    shown = forked("--quiet", "-o", "b.jsonl", "train.py", "20", cwd=tmp_path)
    assert shown.err == ""
    assert len(read_run(tmp_path / "b.jsonl").traces) == 1


class Bad(nn.Module):
    """Makes -Inf of everything."""

    def forward(self, x):
        return (x * 0).log()


@pytest.fixture
def ids(monkeypatch):
    """Ids that a test gives out itself: Python gives those of what is gone to new objects."""
    given = {}
    for module in (script_calls, events):
        told = lambda thing: given.get(id(thing), id(thing))  # noqa: E731
        monkeypatch.setattr(module, "id", told, raising=False)
    return given


@pytest.fixture
def traced():
    """A function that takes a step of an optimizer under a tracer, and that tracer."""
    calls = script_calls.ScriptCalls(keeps=True)
    tracer = ScriptTracer(calls, lambda: None, waits=False)

    def step(optimizer):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        step = Step(optimizer, (optimizer,))
        step.found = WatchedGradients(params, once=True).measure(detail=False).record
        step.is_finite = all(bool(torch.isfinite(param.grad).all()) for param in params)
        for act in (calls.step_begins, tracer.step_begins, tracer.step_ended):
            act(step)
        optimizer.zero_grad()

    yield step, tracer, calls
    tracer.close()
    calls.close()


@pytest.mark.parametrize("same", ["parameter", "optimizer"])
def test_a_model_after_another_is_traced_though_it_has_its_ids(same, ids, traced):
    step, tracer, calls = traced

    def train(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ids.clear()
        ids[id(optimizer if same == "optimizer" else model[0].weight)] = -1
        calls.optimizer_made(optimizer)
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            step(optimizer)

    train(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 4)
    gc.collect()
    model = nn.Sequential(nn.Linear(4, 4), Bad())
    train(model, 3)
    assert calls.kept.followed == [model]
    (text,) = tracer.findings()
    assert text.startswith("Inf first in the output of 1 (Bad)")


def test_an_optimizer_that_is_given_another_model_has_that_one_traced(traced):
    step, _, calls = traced
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    for model in (first, second):
        optimizer.param_groups[0]["params"] = list(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            step(optimizer)
        assert model in calls.kept.followed


GOES_ON = """
import sys
import torch

bad = int(sys.argv[1])
torch.manual_seed(0)

class Gate(torch.nn.Module):
    on = False

    def forward(self, x):
        return x / (x - x) if self.on else x

model = torch.nn.Sequential(torch.nn.Linear(4, 8), Gate(), torch.nn.Linear(8, 1))
if len(sys.argv) > 2:
    torch.nn.init.constant_(model[2].weight, float("nan"))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for number in range(1, 25):
    model[1].on = number == bad
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_in_a_file_that_goes_on_a_trace_has_the_number_of_its_step_there(tmp_path):
    write(tmp_path, "train.py", GOES_ON)
    forked("-o", "a.jsonl", "train.py", "0", cwd=tmp_path)
    shown = forked("--append", "-o", "a.jsonl", "train.py", "20", cwd=tmp_path)
    run = read_run(tmp_path / "a.jsonl")
    assert [trace.step for trace in run.traces] == [44]
    log = shown.err.splitlines()
    taken = next(n for n, line in enumerate(log) if line.startswith("step 44 taken though"))
    assert log[taken + 1].startswith("step 44 traced: ")
    assert "since step 44 of 48" in shown.told[-1]
    assert "module unknown" not in shown.told[-1]
    shown = forked("--append", "-o", "a.jsonl", "train.py", "0", "spoilt", cwd=tmp_path)
    assert "step 49 traced: NaN in 2.weight itself, before step 49" in shown.err
