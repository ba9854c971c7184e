"""`gradilocks run --trace` finds the module, in a script that knows nothing of it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradilocks import read_run
from gradilocks.observe import script_models
from gradilocks.step import events
from gradilocks.step.events import Step
from tests.observe.sessions import forked, process, write

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
print(any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
"""


@pytest.mark.parametrize(
    "optimizer", ["SGD(model.parameters(), 0.1)", "Adam(model.parameters(), fused=True)"]
)
def test_the_step_after_a_skip_is_traced_and_no_number_changes(optimizer, tmp_path):
    write(tmp_path, "train.py", SCRIPT.format(optimizer=optimizer))
    shown = forked("--trace", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert shown.out == process("train.py", cwd=tmp_path).out
    assert shown.out.splitlines()[-1] == "False"
    run = read_run(tmp_path / "a.jsonl")
    assert [s.step for s in run.steps if s.skipped] == [5, 6, 10]
    (found,) = run.traces  # Step 6; what follows 10 is well.
    assert (found.step, found.phase, found.module, found.kind) == (6, "forward", "1", "Hot")
    assert run.header.settings["trace"] is True
    assert any("traced: Inf first in the output of 1 (Hot)" in line for line in shown.told)


class Bad(nn.Module):
    """Makes -Inf of everything."""

    def forward(self, x):
        return (x * 0).log()


@pytest.fixture
def ids(monkeypatch):
    """Ids that a test gives out itself: Python gives those of what is gone to new objects."""
    given = {}
    for module in (script_models, events):
        told = lambda thing: given.get(id(thing), id(thing))  # noqa: E731
        monkeypatch.setattr(module, "id", told, raising=False)
    return given


def taken(tracer, model, steps, ids, *, same):
    """Takes steps of a model, whose first parameter or optimizer has the id that others had."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids.clear()
    ids[id(optimizer if same == "optimizer" else model[0].weight)] = -1
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        bad = sum(torch.logical_not(torch.isfinite(p.grad)).sum() for p in model.parameters())
        found = SimpleNamespace(nan=bad.reshape(1), inf=torch.zeros(1))
        tracer.step_ended(Step(optimizer, (optimizer,), statistics=found))
        optimizer.zero_grad()


@pytest.mark.parametrize("same", ["parameter", "optimizer"])
def test_a_model_after_another_is_traced_though_it_has_its_ids(same, ids):
    tracer = script_models.ScriptTracer(lambda: None)
    taken(tracer, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 4, ids, same=same)
    gc.collect()
    model = nn.Sequential(nn.Linear(4, 4), Bad())
    taken(tracer, model, 2, ids, same=same)
    ((found,),) = [each.findings for each in tracer._tracers if each.findings]
    tracer.close()
    assert (found.step, found.module, found.kind) == (2, "1", "Bad")
    assert tracer.findings() == (found.text,)


def test_an_optimizer_that_is_given_another_model_has_that_one_traced():
    tracer = script_models.ScriptTracer(lambda: None)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    found = SimpleNamespace(nan=torch.zeros(1), inf=torch.ones(1))
    for model in (first, second):
        optimizer.param_groups[0]["params"] = list(model.parameters())
        tracer.step_ended(Step(optimizer, (optimizer,), statistics=found))
        assert len(model._forward_hooks) == 1
    tracer.close()
