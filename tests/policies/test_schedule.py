"""The schedule that does not run ahead."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from gradilocks import GradientControl, SkipSpikes, optim
from gradilocks.errors import BadState
from gradilocks.step import lr_schedule as schedule

MAKERS = {
    "StepLR": lambda o: lr.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 1.0, total_steps=20),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda k: 1.0 / (k + 1)),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ExponentialLR(o, 0.9), lr.StepLR(o, 3)]),
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ours": lambda params: optim.AdamW(params, lr=0.1),
}


def trained(maker, optimizer_maker, bad, *, steps=9):
    param = nn.Parameter(torch.zeros(2))
    optimizer = optimizer_maker([param])
    control = GradientControl(optimizer)
    plan = control.scheduler(maker(optimizer))
    rates = []
    for number in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        control.zero_grad()
        control.backward(param.sum() * (math.inf if number in bad else 1.0))
        control.step()
        plan.step()
    return rates, plan, optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", MAKERS)
def test_skipped_steps_do_not_move_it_and_torch_does_not_complain(name, kind):
    bad = {0, 1, 4, 8}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        warnings.filterwarnings("error", message=".*optimizer.step.*")
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")
        rates, plan, _ = trained(MAKERS[name], OPTIMIZERS[kind], bad)
        straight, _, _ = trained(MAKERS[name], OPTIMIZERS[kind], set(), steps=5)
    taken = [rate for number, rate in enumerate(rates) if number not in bad]
    assert taken == pytest.approx(straight)
    assert plan.ahead == 0


def test_a_metric_is_handed_on():
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    for metric in (1.0, 2.0, 3.0):
        control.zero_grad()
        control.backward(param.sum())
        control.step()
        plan.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_epoch_counts_if_one_of_its_steps_was_taken():
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.ExponentialLR(optimizer, 0.5))
    for epoch in ((math.inf, 1.0), (math.inf, math.inf), (1.0, 1.0)):
        for factor in epoch:
            control.zero_grad()
            control.backward(param.sum() * factor)
            control.step()
        plan.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert plan.last_epoch == 2
    assert plan.get_last_lr() == [0.25]


def test_rejected_steps_do_not_move_it_either():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer, clip=SkipSpikes(at_least=2, window=4))
    plan = control.scheduler(lr.ExponentialLR(optimizer, 0.5))
    for factor in (1.0, 1.0, 100.0, 1.0):
        control.zero_grad()
        control.backward(param.sum() * factor)
        control.step()
        plan.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


class Late:
    """A flag that arrives when it is told to, as one from a GPU does."""

    at_once = False

    def __init__(self, row):
        self.value, self.arrived = float(row[0]) > 0, False
        flags.append(self)

    def skipped(self, *, wait=False):
        return self.value if self.arrived or wait else None


flags: list[Late] = []


@pytest.fixture
def late(monkeypatch):
    flags.clear()
    monkeypatch.setattr(schedule, "Flag", Late)
    return flags


def test_a_skip_that_is_learned_of_late_is_made_up_for(late, caplog):
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.LambdaLR(optimizer, lambda k: 1.0 + k))
    rates = []
    with caplog.at_level(logging.INFO, logger="gradilocks"):
        for number in range(6):
            rates.append(optimizer.param_groups[0]["lr"])
            control.zero_grad()
            control.backward(param.sum() * (math.inf if number == 2 else 1.0))
            control.step()
            if number:
                late[number - 1].arrived = True  # A step late.
            plan.step()
    # Steps 0, 1, 3, 4 and 5 were taken, at the rates 1, 2, 4 (one ahead), 4, 5.
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0]
    assert "a step ahead" in caplog.text
    late[-1].arrived = True
    assert "gradilocks" not in plan.state_dict()
    assert plan.ahead == 0


@pytest.mark.parametrize("hurry", ["at once", "never", "in time"])
def test_beside_other_ranks_a_skip_counts_at_the_same_step_whenever_it_arrives(
    late, monkeypatch, hurry
):
    monkeypatch.setattr(schedule, "has_other_ranks", lambda: True)
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.LambdaLR(optimizer, lambda k: 1.0 + k))
    rates = []
    for number in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        control.zero_grad()
        control.backward(param.sum() * (math.inf if number == 2 else 1.0))
        control.step()
        if hurry == "at once":
            late[number].arrived = True
        elif hurry == "in time" and number > 2:
            late[number - 2].arrived = True
        plan.step()
    # The third step was skipped, and the schedule stands still once, five steps later.
    assert rates == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.0, 9.0]
    assert plan.last_epoch == 9


def test_its_state_says_how_far_it_is_ahead(late):
    _, plan, _ = trained(MAKERS["LambdaLR"], OPTIMIZERS["SGD"], {8})
    saved = plan.state_dict()
    assert saved["gradilocks"]["ahead"] == 1
    _, other, optimizer = trained(MAKERS["LambdaLR"], OPTIMIZERS["SGD"], set(), steps=1)
    other.load_state_dict(saved)
    assert other.ahead == 1
    assert other.state_dict() == saved
    own = {key: value for key, value in saved.items() if key != "gradilocks"}
    other.load_state_dict(own)  # That of torch's own is taken as well.
    assert other.ahead == 0
    assert optimizer.param_groups[0]["lr"] is not None


def test_it_does_not_outlive_its_user():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.ExponentialLR(optimizer, 0.5))
    assert len(control._schedules) == 1
    del plan
    assert len(control._schedules) == 0


@pytest.mark.parametrize("given", [None, 0.1, torch.optim.SGD([nn.Parameter(torch.zeros(1))])])
def test_what_is_no_scheduler_is_refused(given):
    control = GradientControl(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    with pytest.raises(TypeError, match=r"takes an LR scheduler such as .* got"):
        control.scheduler(given)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", ["fused AdamW", "ours"])
def test_on_a_gpu_it_never_waits_and_ends_where_it_should(kind):
    param = nn.Parameter(torch.zeros(2, device="cuda"))
    optimizer = OPTIMIZERS[kind]([param])
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.LambdaLR(optimizer, lambda k: 1.0 + k))
    factors = [torch.tensor(math.inf if k in (4, 9) else 1.0, device="cuda") for k in range(20)]
    torch.cuda.synchronize()
    try:
        for number, factor in enumerate(factors):
            if number > 2:
                torch.cuda.set_sync_debug_mode("error")
            control.backward(param.sum() * factor)
            control.step()
            plan.step()
            control.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plan.state_dict()  # Waits for the last flag.
    assert plan.last_epoch - plan.ahead == 18


def test_two_calls_for_one_step_count_once():
    _, plan, _ = trained(MAKERS["LambdaLR"], OPTIMIZERS["SGD"], set(), steps=2)
    before = plan.last_epoch
    plan.step()
    assert plan.last_epoch == before


def test_a_bad_state_changes_nothing():
    _, plan, _ = trained(MAKERS["LambdaLR"], OPTIMIZERS["SGD"], set(), steps=2)
    saved = plan.state_dict()
    with pytest.raises(BadState, match="ahead in the state_dict must be 0 or more, got None"):
        plan.load_state_dict({"scheduler": {"last_epoch": 77}, "ahead": None})
    assert plan.state_dict() == saved


def test_steps_that_were_not_counted_yet_are_saved():
    for bad, since, moved in ((set(), "taken", 1), ({2}, "skipped", 0)):
        param = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([param], lr=1.0)
        control = GradientControl(optimizer)
        plan = control.scheduler(lr.LambdaLR(optimizer, lambda k: 1.0 + k))
        for number in range(3):
            control.backward(param.sum() * (math.inf if number in bad else 1.0))
            control.step()
            control.zero_grad()
            if number < 2:
                plan.step()
        saved = plan.state_dict()
        assert saved["gradilocks"]["since"] == since
        other = control.scheduler(lr.LambdaLR(optimizer, lambda k: 1.0 + k))
        other.load_state_dict(saved)
        before = other.last_epoch
        other.step()
        assert other.last_epoch == before + moved
    with pytest.raises(BadState, match="since in the state_dict must be 'taken', 'skipped' or"):
        plan.load_state_dict({**saved, "gradilocks": {**saved["gradilocks"], "since": 3}})
    with pytest.raises(BadState, match="gradilocks in the state_dict must be a dict, got 3"):
        plan.load_state_dict({**saved, "gradilocks": 3})


def test_an_epoch_of_many_steps_holds_few_flags(late):
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.ExponentialLR(optimizer, 0.5))
    for number in range(50):
        control.backward(param.sum() * (1.0 if number > 20 else math.inf))
        control.step()
        control.zero_grad()
        for flag in late[:-3]:
            flag.arrived = True
        assert len(plan._since) <= 5
    plan.step()
    assert plan.last_epoch == 1


class Foreign:
    """A schedule that is none of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        pass

    def state_dict(self):
        return {}


def test_the_schedule_of_another_controls_optimizer_is_refused():
    mine, other = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    control = GradientControl(mine)
    with pytest.raises(ValueError, match="ExponentialLR is a schedule of an optimizer that this"):
        control.scheduler(lr.ExponentialLR(other, 0.5))
    plan = lr.SequentialLR(mine, [lr.ConstantLR(mine), lr.ExponentialLR(mine, 0.5)], [3])
    control.scheduler(plan)


@pytest.mark.parametrize(
    "make", [lambda o: lr.StepLR(o, 3), lambda o: lr.ReduceLROnPlateau(o), lambda o: Foreign(o)]
)
def test_a_schedule_passes_for_the_scheduler_inside_it(make):
    """Lightning and accelerate ask what it is, and treat ReduceLROnPlateau apart."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    control = GradientControl(optimizer)
    inside = make(optimizer)
    plan = control.scheduler(inside)
    for kind in (lr.LRScheduler, lr.StepLR, lr.ReduceLROnPlateau, schedule.Scheduler):
        expected = isinstance(inside, kind) or kind is schedule.Scheduler
        assert isinstance(plan, kind) is expected
    assert type(plan) is schedule.Scheduler


@pytest.mark.parametrize("first", ["control", "schedule"])
def test_a_deep_copy_goes_on_by_itself(first):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.LambdaLR(optimizer, lambda k: 1.0 + k))
    pair = [control, plan] if first == "control" else [plan, control]
    copied = copy.deepcopy([*pair, optimizer])
    twin, plan_too = copied[:2] if first == "control" else copied[1::-1]
    for number in range(3):
        twin.zero_grad()
        params = [p for o in twin.optimizers for g in o.param_groups for p in g["params"]]
        twin.backward(sum(p.sum() for p in params) * (math.inf if number == 1 else 1.0))
        twin.step()
        plan_too.step()
    assert plan_too.last_epoch == 2
    assert plan.last_epoch == 0
    assert copied[2].param_groups[0]["lr"] == 3.0
    with pytest.raises(TypeError, match=r"cannot be pickled. Save its state_dict"):
        pickle.dumps(plan)


def test_a_call_that_fails_can_be_made_again():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.ReduceLROnPlateau(optimizer))
    control.backward(param.sum())
    control.step()
    with pytest.raises(TypeError, match="metrics"):
        plan.step()
    plan.step(1.0)
    assert plan.last_epoch == 1


@pytest.mark.parametrize("given", [{}, {"scale": 1.0}])
def test_the_state_of_something_else_is_refused(given):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    plan = GradientControl(optimizer).scheduler(lr.ExponentialLR(optimizer, 0.5))
    with pytest.raises(BadState, match="none of ExponentialLR"):
        plan.load_state_dict(given)


def test_a_schedule_that_counts_every_call_stands_still_for_skipped_steps_alone():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    control = GradientControl(optimizer)
    plan = control.scheduler(lr.LambdaLR(optimizer, lambda k: 1.0 + k), every_call=True)
    rates = []
    for factor in (1.0, None, math.inf, None, 1.0):  # None: no step at all.
        if factor is not None:
            control.backward(model(torch.ones(1, 2)).sum() * factor)
            control.step()
            control.zero_grad()
        plan.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [2.0, 3.0, 3.0, 4.0, 5.0]
