"""What recording does on the host at a good step is the same for 10 tensors as for 200.

Counted are torch's operations and Python's calls, inside of what listens to the steps: neither
depends on a machine.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradilocks
from gradilocks import GradientControl, Recorder, kernels, read_run
from gradilocks.kernels import native
from gradilocks.observe import step_recorder
from gradilocks.observe.script_calls import ScriptCalls
from gradilocks.observe.script_tracer import ScriptTracer
from gradilocks.observe.step_recorder import ScriptRecorder, StepRecorder
from gradilocks.observe.torch_hooks import TorchHooks
from gradilocks.record.journal import Journal
from gradilocks.step.events import EVENTS, StepListener
from tests import PATIENCE

pytestmark = pytest.mark.skipif(
    native.library() is None or not kernels.BACKENDS["cpu"].BY_ADDRESS,
    reason="the native library is not built: Python walks over the tensors one by one",
)
HOUSE = str(Path(gradilocks.__file__).parent)  # Not its name, which a clone's folder has too.
DETAIL, STEPS, WARM_UP = 4, 8, 8
HELD = {"flush_every": 100, "flush_seconds": PATIENCE}  # Nothing is written because time passes.


class Counter(TorchDispatchMode):
    """Counts operations and calls while it is `on`."""

    def __init__(self):
        super().__init__()
        self.operations, self.calls = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:  # One of those launches nothing, and C++ makes them.
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))

    def around(self, act):
        def counted(*args, **kwargs):
            with self:
                sys.setprofile(self.called)
                try:
                    return act(*args, **kwargs)
                finally:
                    sys.setprofile(None)

        return counted

    def called(self, frame, event, argument):
        # What this mode adds to an operation, and what it runs in C, are not ours.
        code = frame.f_code
        if event in ("call", "c_call") and code.co_filename.startswith(HOUSE):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no such.
            self.calls.append(f"{code.co_filename.rpartition('/')[2]} {name}")


def counts(counter):
    """Each with how often it was met; for the message, where two differ."""
    return [
        {name: names.count(name) for name in sorted(set(names))}
        for names in (counter.operations, counter.calls)
    ]


def parameters(many, elements):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(elements)) for _ in range(many)]


def train(params, optimizer, step, *, clip=False):
    """Gradients are new at every step, and finite."""
    for _ in range(WARM_UP + STEPS):
        yield
        # Held, so that the next ones lie elsewhere: addresses that are as they were are not sent.
        kept = [param.grad for param in params]  # noqa: F841
        optimizer.zero_grad()
        torch.stack([param.square().sum() for param in params]).sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        step()


def recorded_by_a_control(many, elements, path, monkeypatch):
    counter = Counter()
    params = parameters(many, elements)
    optimizer = torch.optim.SGD(params, lr=1e-3)
    with Recorder(path, detail_every=DETAIL, **HELD, log=False) as recorder:
        control = GradientControl(optimizer, scale=None, clip=1.0, record=recorder)
        for number, _ in enumerate(train(params, optimizer, control.step)):
            if number == WARM_UP:
                for name in ("step_begins", "step_ended"):
                    act = getattr(Journal, name)
                    monkeypatch.setattr(Journal, name, counter.around(act))
        monkeypatch.undo()
    return counter


def watched(many, elements, path, monkeypatch, *, clip=False):
    """As `gradilocks run` does it, in this process."""
    counter = Counter()
    params = parameters(many, elements)
    made = ScriptRecorder(path, all_ranks=False, git=None, detail_every=DETAIL, **HELD, log=False)
    steps = StepRecorder(lambda: made, warn=pytest.fail)
    calls = ScriptCalls(keeps=True, began=steps.data_wait.forward_begins)
    tracer = ScriptTracer(calls, lambda: made, waits=False)
    guard = step_recorder.Guard(lambda error: pytest.fail(repr(error)))
    monkeypatch.setattr(step_recorder, "unseen_by_modes", torch.no_grad)  # This test looks on.
    listener = guard.around((steps.losses, calls, steps, tracer))
    hooks = TorchHooks()
    EVENTS.add(listener)
    hooks.install()
    try:
        optimizer = torch.optim.SGD(params, lr=1e-3)
        for number, _ in enumerate(train(params, optimizer, optimizer.step, clip=clip)):
            if number == WARM_UP:
                for name, unheard in vars(StepListener).items():
                    if callable(unheard) and name in vars(listener):
                        setattr(listener, name, counter.around(getattr(listener, name)))
    finally:
        hooks.remove()
        EVENTS.discard(listener)
        tracer.close()
        calls.close()
        made.finish(status="finished", exit=0, error=None)
    return counter


watched_with_clips = partial(watched, clip=True)


@pytest.mark.parametrize("elements", [(3,), (66_000,)], ids=["small", "large"])
@pytest.mark.parametrize(
    "way", [recorded_by_a_control, watched, watched_with_clips], ids=["control", "run", "clips"]
)
def test_a_good_step_costs_the_same_whatever_the_number_of_tensors(
    way, elements, tmp_path, monkeypatch
):
    few, many = (10, 200) if elements == (3,) else (3, 8)
    one = way(few, elements, tmp_path / "few.jsonl", monkeypatch)
    other = way(many, elements, tmp_path / "many.jsonl", monkeypatch)
    for path, number in (("few.jsonl", few), ("many.jsonl", many)):
        steps = read_run(tmp_path / path).steps
        assert len(steps) == WARM_UP + STEPS
        assert sum(step.detail is not None for step in steps) == (WARM_UP + STEPS) // DETAIL
        assert all(len(step.detail.norm) == number for step in steps if step.detail is not None)
    assert one.operations
    assert one.calls
    for here, there in zip(counts(one), counts(other), strict=True):
        assert here.items() ^ there.items() == set()
