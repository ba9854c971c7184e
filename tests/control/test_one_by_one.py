"""`step(only=)` and `update()`: one scale, and a decision, a norm and a clip state for each optimizer, as in torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from control.given_gradients import INF, NAN, assert_same, contents, loss_giving, parameter
from gradilocks import AdaGC, DynamicScale, GradientControl, HeadroomScale, SkipSpikes, StaticScale
from gradilocks.errors import ScaleMisuse

FAST = DynamicScale(init_scale=64.0, growth_interval=3)


def pair(device="cpu", **options):
    p, q = parameter(1.0, 2.0, device=device), parameter(3.0, device=device)
    first = torch.optim.SGD([p], lr=0.1)
    second = torch.optim.AdamW([q], lr=0.1, fused=True)
    return p, q, first, second, GradientControl(first, second, **options)


def iteration(control, first, second, p, q, g, h):
    control.zero_grad()
    control.backward(loss_giving((p, g), (q, h)))
    outcomes = control.step(only=first), control.step(only=second)
    control.update()
    return outcomes


def test_two_optimizers_are_those_of_torchs_scaler(device):
    p, q, first, second, control = pair(device, scale=FAST)
    r, s = nn.Parameter(p.detach().clone()), nn.Parameter(q.detach().clone())
    third, fourth = torch.optim.SGD([r], lr=0.1), torch.optim.AdamW([s], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=3)
    for g, h in [(1.0, 2.0), (INF, 1.0), (1.0, NAN), (0.5, 0.5), (1.0, 1.0), (2.0, 1.0), (1.0, 3.0)]:
        outcomes = iteration(control, first, second, p, q, g, h)
        third.zero_grad()
        fourth.zero_grad()
        scaler.scale(loss_giving((r, g), (s, h))).backward()
        scaler.step(third)
        scaler.step(fourth)
        scaler.update()
        assert [outcome.skipped for outcome in outcomes] == [g in (INF, NAN), h != h]
        assert control.scale == scaler.get_scale()
    assert_same([contents(first), contents(second)], [contents(third), contents(fourth)])


def test_each_optimizer_has_its_own_norm_and_limit(device):
    p, q, first, second, control = pair(device, clip=1.0)
    outcomes = iteration(control, first, second, p, q, torch.tensor([3.0, 4.0]), 0.5)
    assert [outcome.norm for outcome in outcomes] == pytest.approx([5.0, 0.5])
    assert [outcome.clipped for outcome in outcomes] == [True, False]
    torch.testing.assert_close(p.detach().cpu(), torch.tensor([1.0 - 0.06, 2.0 - 0.08]))


def test_the_scale_stands_still_until_update(device):
    p, q, first, second, control = pair(device, scale=FAST)
    control.backward(loss_giving((p, INF), (q, 1.0)))
    assert control.step(only=first).skipped
    assert control.scale == 64.0
    assert not control.step(only=second).skipped
    control.update()
    assert control.scale == 32.0
    control.update()  # Nothing has stepped since.
    assert control.scale == 32.0


def test_update_without_a_step_raises():
    p, _, _, _, control = pair()
    with pytest.raises(ScaleMisuse, match=r"update\(\) without a step"):
        control.update()
    control.backward(loss_giving((p, 1.0)))
    with pytest.raises(ScaleMisuse, match=r"update\(\) without a step"):
        control.update()


def test_an_overflow_found_by_unscale_counts_though_nobody_steps(device):
    p, q, first, second, control = pair(device, scale=FAST)
    control.backward(loss_giving((p, INF), (q, 1.0)))
    control.unscale_(only=first)
    control.step(only=second)
    control.update()
    assert control.scale == 32.0
    control.zero_grad()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.unscale_()
    control.update()
    assert control.scale == 32.0
    assert control.state_dict()["_growth_tracker"] == 1


def test_stepping_one_optimizer_twice_raises():
    p, q, first, second, control = pair()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.step(only=first)
    for only in (first, None):
        with pytest.raises(ScaleMisuse, match="already called for this optimizer"):
            control.step(only=only)
    control.step(only=second)
    control.update()


def test_an_optimizer_of_another_control_raises():
    *_, control = pair()
    stranger = torch.optim.SGD([parameter(1.0)], lr=0.1)
    for method in (control.step, control.unscale_, control.norm, control.zero_grad):
        with pytest.raises(ValueError, match=r"this SGD is not an optimizer of the control"):
            method(only=stranger)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_update_may_set_the_scale(kind, device):
    p, q, first, second, control = pair(device, scale=FAST)
    iteration(control, first, second, p, q, 1.0, 1.0)
    tracker = control.state_dict()["_growth_tracker"]
    control.update(kind(8.0))
    assert control.scale == 8.0
    assert control.state_dict()["_growth_tracker"] == tracker
    iteration(control, first, second, p, q, 1.0, 1.0)
    for bad in (0.0, -1.0, INF, NAN, True):
        with pytest.raises((ValueError, TypeError), match="new_scale"):
            control.update(bad)
    control.update(torch.tensor(0.0))
    assert 0.0 < control.scale < INF
    with pytest.raises(ValueError, match="scale=None"):
        GradientControl(torch.optim.SGD([parameter(1.0)], lr=0.1), scale=None).update(2.0)


def test_a_rejected_step_does_not_count_as_a_finite_one():
    scale = DynamicScale(init_scale=4.0, growth_interval=1)
    p, q, first, second, control = pair(scale=scale, clip=SkipSpikes(max_norm=10))
    outcomes = iteration(control, first, second, p, q, 100.0, 100.0)
    assert all(outcome.rejected for outcome in outcomes)
    assert control.scale == 4.0
    outcomes = iteration(control, first, second, p, q, 100.0, 1.0)
    assert [outcome.rejected for outcome in outcomes] == [True, False]
    assert control.scale == 8.0


def test_each_optimizer_has_its_own_clip_state(device):
    p, q, first, second, control = pair(device, scale=8.0, clip=SkipSpikes(window=4))
    for size in (1.0, 1.1, 0.9):
        iteration(control, first, second, p, q, torch.tensor([size, 0.0]), 100.0 * size)
    outcomes = iteration(control, first, second, p, q, torch.tensor([90.0, 0.0]), 100.0)
    assert [outcome.rejected for outcome in outcomes] == [True, False]


@pytest.mark.parametrize("scale", [FAST, HeadroomScale(), StaticScale(8.0), None])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(scale):
    script = [(1.0, 2.0), (3.0, 1.0), (INF, 1.0), (0.5, 0.25), (2.0, 4.0), (1.0, NAN), (9.0, 1.0)]

    def run(resume_at):
        p, q, first, second, control = pair(scale=scale, clip=AdaGC(warmup=2))
        for step, (g, h) in enumerate(script):
            if step == resume_at:
                state = copy.deepcopy(control.state_dict())
                control = GradientControl(first, second, scale=scale, clip=AdaGC(warmup=2))
                control.load_state_dict(state)
            iteration(control, first, second, p, q, g, h)
        return contents(first), contents(second), control.state_dict()

    whole = run(None)
    for at in (1, 3, 5):
        assert_same(run(at), whole)


def test_the_schedule_of_one_optimizer_ignores_the_steps_of_the_other():
    p, q, first, second, control = pair(scale=FAST)
    schedules = [
        control.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)) for optimizer in (first, second)
    ]
    for g, h in [(INF, 1.0), (1.0, 1.0), (1.0, NAN)]:
        iteration(control, first, second, p, q, g, h)
        for schedule in schedules:
            schedule.step()
    assert [schedule.last_epoch for schedule in schedules] == [2, 2]
    iteration(control, first, second, p, q, 1.0, NAN)
    for schedule in schedules:
        schedule.step()
    assert [schedule.last_epoch for schedule in schedules] == [3, 2]


def test_the_records_name_the_optimizers_that_stepped():
    p, q, first, second, control = pair()
    records = []
    unsubscribe = control.subscribe(records.append)
    control.backward(loss_giving((p, 1.0), (q, 1.0), value=2.5))
    control.step(only=second)
    control.step(only=first)
    control.update()
    control.zero_grad()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.step()
    unsubscribe()
    control.zero_grad()
    control.backward(loss_giving((p, 1.0), (q, 1.0)))
    control.step()
    assert [record.optimizers for record in records] == [(1,), (0,), (0, 1)]
    assert [record.learning_rates for record in records] == [(0.1,), (0.1,), (0.1, 0.1)]
    assert records[0].loss.item() == 2.5
    assert [record.outcome.step for record in records] == [1, 2, 3]
