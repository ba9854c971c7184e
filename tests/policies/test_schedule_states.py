"""A schedule's state goes both ways: between ours and torch's own, exact, also in the midst."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from gradilocks import GradientControl
from gradilocks.errors import BadState
from gradilocks.step import lr_schedule as schedule


class Falling:
    """A callable object: torch saves what it holds."""

    def __init__(self, by):
        self.by, self.calls = by, 0

    def __call__(self, epoch):
        self.calls += 1
        return 1.0 / (1.0 + self.by * epoch)


def nested(o):
    inner = lr.ChainedScheduler([lr.ConstantLR(o, 0.5, total_iters=2), lr.ExponentialLR(o, 0.9)])
    return lr.ChainedScheduler([inner, lr.LambdaLR(o, Falling(0.1))])


MAKERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda k: 1.0 / (k + 1)),
    "LambdaLR of an object": lambda o: lr.LambdaLR(o, Falling(0.25)),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, Falling(0.01)),
    "StepLR": lambda o: lr.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 1.0, total_steps=40),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingWarmRestarts(o, 3)], [3]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ExponentialLR(o, 0.9), lr.StepLR(o, 3)]),
    "nested": nested,
}
METRICS = [3.0, 2.0, 2.5, 2.6, 2.7, 1.0, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")
        warnings.filterwarnings("ignore", message=".*optimizer.step.*")
        yield


class Session:
    """A model of two groups, its optimizer, and a schedule, bare or of a control."""

    def __init__(self, name, *, bare):
        self.params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
        groups = [{"params": [p], "lr": 0.1 * (k + 1)} for k, p in enumerate(self.params)]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        plain = MAKERS[name](self.optimizer)
        self.control = None if bare else GradientControl(self.optimizer)
        self.plan = plain if bare else self.control.scheduler(plain)
        self.metrics = name == "ReduceLROnPlateau"
        self.seen = []

    def train(self, numbers, bad=(), *, last_uncounted=False):
        numbers = list(numbers)
        for number in numbers:
            self.seen.append([group["lr"] for group in self.optimizer.param_groups])
            loss = sum(p.square().sum() for p in self.params)
            self.optimizer.zero_grad()
            if self.control is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.control.backward(loss * (math.inf if number in bad else 1.0))
                self.control.step()
            if last_uncounted and number == numbers[-1]:
                return
            self.count(number)

    def count(self, number):
        self.plan.step(*([METRICS[number]] if self.metrics else []))

    def save(self):
        """Through a file that holds tensors and plain values alone, as checkpoints should."""
        state = {"optimizer": self.optimizer.state_dict(), "plan": self.plan.state_dict()}
        if self.control is not None:
            state["control"] = self.control.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, other):
        state = other.save()
        self.optimizer.load_state_dict(state["optimizer"])
        if self.control is not None and "control" in state:
            self.control.load_state_dict(state["control"])
        self.plan.load_state_dict(state["plan"])
        for mine, theirs in zip(self.params, other.params, strict=True):
            mine.data.copy_(theirs.data)

    def inner(self):
        """The state of torch's scheduler itself."""
        return (self.plan if self.control is None else self.plan._scheduler).state_dict()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("before", ["ours", "torch's"])
@pytest.mark.parametrize("after", ["ours", "torch's"])
def test_a_state_loads_into_the_other_and_the_run_goes_on_bit_for_bit(name, before, after):
    straight = Session(name, bare=True)
    straight.train(range(12))
    first = Session(name, bare=before == "torch's")
    first.train(range(7))
    second = Session(name, bare=after == "torch's")
    second.load(first)
    assert second.inner() == first.inner()
    assert second.plan.state_dict() == first.plan.state_dict()
    second.train(range(7, 12))
    assert first.seen + second.seen == straight.seen
    assert second.inner() == straight.inner()
    assert all(map(torch.equal, second.params, straight.params))


@pytest.mark.parametrize("name", MAKERS)
def test_ours_without_pending_steps_saves_what_torch_saves(name):
    ours, bare = Session(name, bare=False), Session(name, bare=True)
    assert ours.plan.state_dict() == bare.plan.state_dict()
    for session in (ours, bare):
        session.train(range(5))
    assert ours.plan.state_dict() == bare.plan.state_dict()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("pending", ["skipped", "taken"])
def test_a_step_that_was_not_counted_yet_is_resumed_bit_for_bit(name, pending):
    bad = {1, 4, 6} if pending == "skipped" else {1, 4}
    straight = Session(name, bare=False)
    straight.train(range(12), bad)
    first = Session(name, bare=False)
    first.train(range(7), bad, last_uncounted=True)
    assert first.plan.state_dict()["gradilocks"]["since"] == pending
    second = Session(name, bare=False)
    second.load(first)
    assert second.plan.state_dict() == first.plan.state_dict()
    second.count(6)
    second.train(range(7, 12), bad)
    assert first.seen + second.seen == straight.seen
    assert second.plan.state_dict() == straight.plan.state_dict()
    assert all(map(torch.equal, second.params, straight.params))


@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_that_is_ahead_stands_still_after_it_was_resumed(name, monkeypatch):
    straight = Session(name, bare=False)
    straight.train(range(12), {6})

    class Late(schedule.Flag):  # Heard of when somebody waits for it.
        def skipped(self, *, wait=False):
            return super().skipped(wait=wait) if wait else None

    first = Session(name, bare=False)
    with monkeypatch.context() as patched:
        patched.setattr(schedule, "Flag", Late)
        first.train(range(7), {6})
        assert first.plan.state_dict()["gradilocks"]["ahead"] == 1
    second = Session(name, bare=False)
    second.load(first)
    assert second.plan.ahead == 1
    second.train(range(7, 12))
    if name != "ReduceLROnPlateau":  # Which saw one metric earlier.
        assert second.inner() == straight.inner()
        assert second.seen[1:] == straight.seen[8:]


@pytest.mark.parametrize("name", MAKERS)
def test_every_scheduler_of_torchs_takes_a_state_with_pending_steps_and_hands_it_back(name):
    first, bare = Session(name, bare=False), Session(name, bare=True)
    first.train(range(4), last_uncounted=True)
    bare.load(first)
    again = Session(name, bare=False)
    again.load(bare)
    assert again.plan.state_dict() == first.plan.state_dict()
    assert again.plan.state_dict()["gradilocks"]["since"] == "taken"
    straight = Session(name, bare=True)
    straight.train(range(6))
    bare.count(3)
    bare.train(range(4, 6))
    assert bare.seen == straight.seen[4:]


def test_torch_takes_a_state_with_pending_steps_and_hands_it_back():
    first = Session("StepLR", bare=False)
    first.train(range(4), last_uncounted=True)
    bare = Session("StepLR", bare=True)
    bare.load(first)
    assert (bare.plan.last_epoch, bare.plan._step_count) == (3, 4)
    again = Session("StepLR", bare=False)
    again.load(bare)
    assert again.plan.state_dict() == first.plan.state_dict()
    bare.count(3)  # It has counted the step: what was pending is not any more.
    again.load(bare)
    assert "gradilocks" not in again.plan.state_dict()
    assert again.plan.last_epoch == 4
    again.count(4)  # No step has been tried since.
    assert again.plan.last_epoch == 4


def test_a_bare_scheduler_that_loaded_ours_can_be_given_to_a_control():
    first = Session("ExponentialLR", bare=False)
    first.train(range(3), last_uncounted=True)
    bare = Session("ExponentialLR", bare=True)
    bare.load(first)
    plan = GradientControl(bare.optimizer).scheduler(bare.plan)
    assert plan.state_dict() == first.plan.state_dict()
    plan.step()
    assert plan.last_epoch == 3
    assert "gradilocks" not in plan.state_dict()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("since", [(), ("since",)])
def test_checkpoints_of_the_first_version_load(name, since):
    first = Session(name, bare=False)
    first.train(range(7))
    inner = copy.deepcopy(first.inner())
    old = {"scheduler": inner, "ahead": 2, **dict.fromkeys(since, "skipped")}
    second = Session(name, bare=False)
    second.plan.load_state_dict(old)
    assert second.inner() == first.inner()
    assert second.plan.ahead == 2
    assert second.plan.state_dict()["gradilocks"]["since"] == ("skipped" if since else None)


def test_loading_leaves_the_callers_dict_alone_and_json_can_hold_it():
    first = Session("CosineAnnealingLR", bare=False)
    first.train(range(4), last_uncounted=True)
    saved = json.loads(json.dumps(first.plan.state_dict()))
    kept = copy.deepcopy(saved)
    second = Session("CosineAnnealingLR", bare=False)
    second.plan.load_state_dict(saved)
    assert saved == kept
    assert second.plan.state_dict() == kept


@pytest.mark.parametrize("given", [None, 3, [1]])
def test_what_is_no_state_is_refused(given):
    with pytest.raises(BadState, match="none of StepLR"):
        Session("StepLR", bare=False).plan.load_state_dict(given)
