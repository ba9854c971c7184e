"""Learning-rate schedules stand still for skipped steps, also if the host learns of a skip late."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import gradilocks
from control.given_gradients import INF, NAN, parameter, take_step
from gradilocks import GradientControl, SkipSpikes
from gradilocks.schedule import Scheduler
from gradilocks.step.host_copy import LAG

MAKERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1.0 / (k + 1)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "own AdamW": lambda ps: gradilocks.optim.AdamW(ps, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", MAKERS)
def test_skipped_steps_do_not_move_the_schedule_and_torch_does_not_warn(name, kind):
    p, q = parameter(0.0), parameter(0.0)
    optimizer, plain = OPTIMIZERS[kind]([p]), torch.optim.SGD([q], lr=0.1)
    control = GradientControl(optimizer)
    schedule, expected = control.scheduler(MAKERS[name](optimizer)), MAKERS[name](plain)
    for gradient in (INF, 1.0, NAN, 1.0, 1.0, INF, INF, 1.0):
        take_step(control, (p, gradient))
        schedule.step()
        if gradient == 1.0:
            plain.step()
            expected.step()
    assert schedule.get_last_lr() == expected.get_last_lr()


def test_an_epoch_counts_if_one_of_its_steps_was_taken():
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    control = GradientControl(optimizer)
    schedule = control.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
    for epoch in ([INF, 1.0, INF], [INF, NAN], [1.0] * 200, [1.0, *[INF] * 69], []):
        for gradient in epoch:
            take_step(control, (p, gradient))
        schedule.step()
    assert schedule.last_epoch == 4
    assert len(schedule._since_call) == 0


def test_rejected_steps_do_not_move_the_schedule():
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    control = GradientControl(optimizer, clip=SkipSpikes(max_norm=2.0))
    schedule = control.scheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))
    for gradient in (1.0, 100.0, 1.0):
        take_step(control, (p, gradient))
        schedule.step()
    assert schedule.last_epoch == 2


class LateCopy:
    """A HostCopy as on a GPU: its value arrives some calls later."""

    clock = 0
    delay = 2

    def __init__(self, tensor):
        self._value, self._sent = float(tensor), LateCopy.clock

    is_immediate = False

    def has_arrived(self):
        return LateCopy.clock - self._sent >= LateCopy.delay

    def read(self):
        return self._value


@pytest.fixture
def late(monkeypatch):
    """Copies to the host arrive two steps late."""
    monkeypatch.setattr("gradilocks.schedule.HostCopy", LateCopy)
    monkeypatch.setattr(LateCopy, "clock", 0)
    return LateCopy


def advance(schedule, skipped):
    LateCopy.clock += 1
    schedule.note(torch.tensor(float(skipped)))
    schedule.step()


def schedule_of(**options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    inner = lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (k + 1))
    optimizer.step()  # torch warns if a scheduler advances before that.
    return Scheduler(inner, **options)


def test_a_skip_that_is_noticed_late_is_made_up_for(late):
    schedule = schedule_of()
    for skipped in (False, True, True, False, False, False, False):
        advance(schedule, skipped)
    assert schedule.last_epoch == 5


@pytest.mark.parametrize("delay", [0, 1, LAG, 100])
def test_over_ranks_a_skip_counts_at_the_same_step_whenever_it_arrives(late, delay, monkeypatch):
    monkeypatch.setattr(late, "delay", delay)
    schedule = schedule_of(has_ranks=True)
    epochs = []
    for skipped in (False, True, False, False, False, False, False, False):
        advance(schedule, skipped)
        epochs.append(schedule.last_epoch)
    assert epochs == [1, 2, 3, 4, 5, 5, 6, 7]


def test_the_state_says_how_far_the_schedule_is_ahead(late):
    schedule = schedule_of()
    for skipped in (False, True, True):
        advance(schedule, skipped)
    state = schedule.state_dict()
    other = schedule_of()
    other.load_state_dict(state)
    for skipped in (False, False, False):
        advance(other, skipped)
    assert other.last_epoch == 4
    bare = lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), lambda k: 1.0)
    other.load_state_dict(bare.state_dict())
    assert other.last_epoch == 0
    bare.load_state_dict(other.state_dict())


def test_a_call_without_a_step_before_it_advances():
    schedule = schedule_of()
    schedule.step()
    assert schedule.last_epoch == 1


def test_attributes_of_the_inner_scheduler_are_forwarded():
    schedule = schedule_of()
    assert schedule.get_last_lr() == [0.1]
    assert schedule.base_lrs == [0.1]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = schedule.nonsense


@pytest.mark.parametrize("given", [None, 0.1, torch.optim.SGD([nn.Parameter(torch.zeros(1))])])
def test_an_object_that_is_no_scheduler_raises(given):
    control = GradientControl(torch.optim.SGD([parameter(0.0)], lr=0.1))
    with pytest.raises(TypeError, match=r"scheduler\(\) takes an LR scheduler such as"):
        control.scheduler(given)
