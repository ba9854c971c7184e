"""`give_up_after` and `on_nonfinite`: when a run ends, and what the error says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from control.given_gradients import INF, NAN, assert_same, contents, loss_giving, parameter, take_step
from gradilocks import DynamicScale, GradientControl, SkipSpikes
from gradilocks.errors import NeverFinite, NonFiniteGradient


@pytest.mark.parametrize("offset", range(7))
def test_giving_up_comes_at_exactly_the_limit_wherever_the_bad_steps_begin(offset, device):
    if device == "cuda":
        pytest.skip("on a GPU the host notices the limit a few steps late")
    p = parameter(0.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=3)
    for _ in range(offset):
        take_step(control, (p, 1.0))
    for _ in range(2):
        assert take_step(control, (p, NAN)).skipped
    with pytest.raises(NeverFinite, match="gave up after 3 non-finite steps in a row") as caught:
        take_step(control, (p, NAN))
    assert caught.value.culprits == ("param_groups[0]['params'][0]",)


def test_the_counter_starts_again_after_a_finite_step():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=3)
    for gradient in [NAN, NAN, 1.0] * 5:
        take_step(control, (p, gradient))
    assert control.state_dict()["gradilocks"]["streak"] == 0


def test_giving_up_leaves_parameters_and_control_usable():
    p = parameter(1.0)
    optimizer = torch.optim.Adam([p], lr=0.1)
    control = GradientControl(optimizer, give_up_after=2)
    take_step(control, (p, 1.0))
    before = contents(optimizer)
    take_step(control, (p, INF))
    for expected in (2, 3):
        with pytest.raises(NeverFinite, match=f"gave up after {expected} non-finite"):
            take_step(control, (p, INF))
    assert_same(contents(optimizer), before)
    assert not take_step(control, (p, 1.0)).skipped


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (0, 3), (3, 1)])
def test_the_counter_survives_a_checkpoint(before, after):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    control = GradientControl(optimizer, give_up_after=100)
    for _ in range(before):
        take_step(control, (p, NAN))
    other = GradientControl(optimizer, give_up_after=3)
    other.load_state_dict(control.state_dict())
    for _ in range(after - 1):
        take_step(other, (p, NAN))
    with pytest.raises(NeverFinite, match=f"after {before + after} non-finite steps in a row"):
        take_step(other, (p, NAN))


def test_the_diagnosis_tells_a_broken_loss_from_an_overflow_and_from_a_nan():
    p = parameter(0.0)

    def message(scale, gradient, value=0.0):
        control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale, give_up_after=2)
        take_step(control, (p, gradient), value=value)
        with pytest.raises(NeverFinite) as caught:
            take_step(control, (p, gradient), value=value)
        return str(caught.value)

    assert "No scale helps: the loss is NaN or Inf before scaling" in message("dynamic", NAN, value=NAN)
    text = message("dynamic", INF)
    assert "The scale was 32768" in text
    assert "a NaN with another cause remains at any scale" in text
    at_the_floor = message(DynamicScale(init_scale=2.0, min_scale=1.0), NAN)
    assert "The scale has fallen to its lower bound, 1." in at_the_floor
    assert "gradilocks run" in at_the_floor


@pytest.mark.parametrize("scale", [None, 8.0])
def test_without_a_moving_scale_nobody_says_that_it_has_fallen(scale):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale, give_up_after=1)
    with pytest.raises(NeverFinite) as caught:
        take_step(control, (p, INF))
    assert "fallen" not in str(caught.value)
    assert str(caught.value).startswith("gave up after 1 non-finite step, the last at step 1: Inf in param_groups")


def test_raise_names_the_culprit_at_once_and_changes_nothing_but_the_scale(device):
    model = nn.Linear(2, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=model, on_nonfinite="raise")
    before = contents(optimizer)
    with pytest.raises(NonFiniteGradient, match=r"step 1 skipped: Inf in weight; scale 65536\.") as caught:
        take_step(control, (model.weight, INF), (model.bias, 1.0))
    assert not isinstance(caught.value, NeverFinite)
    assert caught.value.culprits == ("weight",)
    assert_same(contents(optimizer), before)
    assert control.scale == 32768.0
    assert control.outcome.skipped
    assert not take_step(control, (model.weight, 1.0), (model.bias, 1.0)).skipped


def test_raise_counts_towards_giving_up_and_ignores_rejected_steps():
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), on_nonfinite="raise", give_up_after=2, clip=SkipSpikes(max_norm=1.0)
    )
    assert take_step(control, (p, 50.0)).rejected
    with pytest.raises(NonFiniteGradient):
        take_step(control, (p, NAN))
    with pytest.raises(NeverFinite):
        take_step(control, (p, NAN))


def test_subscribers_hear_of_the_step_that_raises():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), on_nonfinite="raise")
    records = []
    control.subscribe(records.append)
    control.backward(loss_giving((p, NAN), value=1.5))
    with pytest.raises(NonFiniteGradient):
        control.step()
    assert [(record.outcome.skipped, record.loss.item()) for record in records] == [(True, 1.5)]
