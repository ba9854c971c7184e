"""give_up_after: the error says why training goes nowhere and whether a scale could help."""

import math

import pytest
import torch
from torch import nn

from gradilocks import DynamicScale, GradientControl, StaticScale
from gradilocks.errors import GradilocksError, NeverFinite, NonFiniteGradient
from tests.control.gradient_scripts import (
    INF,
    NAN,
    assert_same,
    contents,
    control_step,
    loss_making,
    parameter,
)


def give_up(control, make_loss, at_most=400):
    """Trains until NeverFinite and hands it over, with the number of steps it took."""
    for step in range(1, at_most + 1):
        control.zero_grad()
        control.backward(make_loss())
        try:
            control.step()
        except NeverFinite as error:
            return error, step
    raise AssertionError("the control never gave up")


def half_gradient(p, size):
    """A loss through float16: the gradient is `size` times the scale, or Inf above 65504."""
    return (p.half() * torch.tensor(size, dtype=torch.float16)).float().sum()


def test_an_overflow_that_a_smaller_scale_cures_is_called_curable():
    p = parameter(0.0, 0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=2.0**30), give_up_after=4
    )
    error, steps = give_up(control, lambda: half_gradient(p, 1.0))
    assert steps == 4
    assert error.curable
    assert error.scales == (2.0**30, 2.0**29, 2.0**28, 2.0**27)
    assert error.culprits == ("param_groups[0]['params'][0]",)
    text = str(error)
    for part in ("4 steps in a row", "Inf in param_groups", "smaller scale", "init_scale="):
        assert part in text


def test_an_overflow_in_a_float16_model_with_a_fused_optimizer_is_called_curable():
    model = nn.Linear(3, 1).half()
    control = GradientControl(
        torch.optim.Adam(model.parameters(), lr=0.1, fused=True),
        model=model,
        scale=DynamicScale(init_scale=2.0**20),
        give_up_after=3,
    )
    error, _ = give_up(control, lambda: model(torch.full((1, 3), 8.0).half()).float().sum())
    assert error.curable
    assert set(error.culprits) == {"weight", "bias"}


def test_what_is_called_curable_is_cured_by_more_steps():
    p = parameter(0.0, 0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=2.0**30), give_up_after=100
    )
    outcomes = []
    for _ in range(20):
        control.zero_grad()
        control.backward(half_gradient(p, 1.0))
        outcomes.append(control.step())
    assert [o.skipped for o in outcomes] == [True] * 15 + [False] * 5
    assert outcomes[-1].scale == 2.0**15


def test_an_inf_at_the_floor_is_not_curable():
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1),
        scale=DynamicScale(init_scale=8.0, min_scale=2.0),
        give_up_after=5,
    )
    error, _ = give_up(control, lambda: loss_making((p, INF)))
    assert not error.curable
    assert "floor of 2" in str(error)
    assert error.scales == (8.0, 4.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("floor", [0.1, 0.3, 0.7, 1e-3])
def test_a_floor_that_float32_rounds_is_still_known_as_the_floor(floor):
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1),
        scale=DynamicScale(init_scale=floor * 4, min_scale=floor),
        give_up_after=6,
    )
    error, _ = give_up(control, lambda: loss_making((p, INF)))
    assert not error.curable
    assert "floor" in str(error)


def test_an_inf_without_a_scale_is_not_curable():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=None, give_up_after=3)
    error, _ = give_up(control, lambda: loss_making((p, INF)))
    assert not error.curable
    assert "not scaled" in str(error)
    assert "1 throughout" in str(error)


def test_an_inf_under_a_static_scale_may_be_cured_by_a_smaller_one():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=StaticScale(4096.0))
    error, steps = give_up(control, lambda: loss_making((p, INF)))
    assert steps == 100
    assert error.curable
    assert "fixed at 4096" in str(error)


@pytest.mark.parametrize(("scale", "steps"), [("dynamic", 12), (None, 3), (1024.0, 3)])
def test_a_nan_is_told_apart_from_an_inf(scale, steps):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale, give_up_after=steps)
    error, _ = give_up(control, lambda: loss_making((p, NAN)))
    assert not error.curable
    assert "NaN in param_groups" in str(error)
    assert "NaN and no Inf" in str(error)
    assert "set_detect_anomaly" in str(error)


def test_a_nan_that_float16_made_of_an_overflow_is_called_curable():
    p = parameter(0.5)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=3)

    def loss():
        half = p.half()
        return (half * 100 - half * 100).float().sum()  # Inf - Inf on the way back

    error, _ = give_up(control, loss)
    assert error.curable
    assert "NaN and no Inf" in str(error)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_nonfinite_loss_is_told_apart_from_a_nonfinite_gradient(bad):
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=3)
    error, _ = give_up(control, lambda: (p * bad).sum())
    assert not error.curable
    assert "loss itself" in str(error)


def test_a_loss_that_only_overflows_once_scaled_is_not_called_broken():
    p = parameter(1.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=2.0**16), give_up_after=3
    )
    error, _ = give_up(control, lambda: (p * 1e36).sum())
    assert error.curable
    assert "loss itself" not in str(error)


def test_one_broken_micro_batch_among_many_is_named():
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=1)
    control.backward((p * NAN).sum())
    control.backward(p.sum())
    with pytest.raises(NeverFinite, match="loss itself"):
        control.step()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_broken_loss_that_was_cleared_away_is_not_blamed(by_hand):
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=1)
    control.backward((p * NAN).sum())
    if by_hand:
        p.grad = None
    else:
        control.zero_grad()
    control.backward(loss_making((p, INF)))
    with pytest.raises(NeverFinite) as caught:
        control.step()
    assert "loss itself" not in str(caught.value)


def test_an_inf_that_does_not_shrink_with_the_scale_is_not_curable():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=12)
    error, _ = give_up(control, lambda: torch.sqrt(p).sum())  # 1/(2·0) at any scale
    assert not error.curable
    assert "does not cure" in str(error)
    assert "2048-fold" in str(error)


def test_infs_that_become_fewer_as_the_scale_falls_are_curable():
    p = nn.Parameter(torch.zeros(12))
    sizes = 2.0 ** torch.arange(12)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=2.0**24), give_up_after=12
    )
    error, _ = give_up(control, lambda: (p.half() * sizes.half()).float().sum())
    assert error.curable


def test_the_culprits_and_the_scales_way_are_in_the_text():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, give_up_after=9
    )

    def loss():
        return loss_making((model[0].weight, INF), (model[1].bias, NAN), (model[1].weight, 1.0))

    error, _ = give_up(control, loss)
    assert error.culprits == ("1.bias", "0.weight")
    text = str(error)
    assert "NaN in 1.bias, Inf in 0.weight" in text
    assert "65536 → 32768 → 16384 → … → 512 → 256 (8 halvings)" in text
    assert "9 steps in a row" in text


def test_many_culprits_are_counted_rather_than_listed():
    params = [parameter(0.0) for _ in range(10)]
    control = GradientControl(torch.optim.SGD(params, lr=0.1), give_up_after=1)
    bad = [(p, NAN) for p in params[:9]]
    error, _ = give_up(control, lambda: loss_making(*bad, (params[9], 1.0)))
    assert "(+4 more)" in str(error)
    assert len(error.culprits) == 9


def test_never_finite_is_caught_by_its_wider_names():
    p = parameter(0.0)
    for kind in (NonFiniteGradient, GradilocksError, RuntimeError):
        control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=1)
        with pytest.raises(kind):
            control_step(control, (p, NAN))


def test_giving_up_leaves_parameters_and_control_usable():
    p = parameter(1.0, 2.0)
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    control = GradientControl(optimizer, give_up_after=3)
    control_step(control, (p, 1.0))
    before = contents(optimizer)
    give_up(control, lambda: loss_making((p, NAN)))
    assert_same(contents(optimizer), before)
    assert control.scale == 65536.0 / 8
    with pytest.raises(NeverFinite):
        control_step(control, (p, NAN))
    assert not control_step(control, (p, 1.0)).skipped
    assert control_step(control, (p, NAN)).skipped


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_counter_starts_again_after_a_finite_step(limit):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=limit)
    for _ in range(4):
        for _ in range(limit - 1):
            control_step(control, (p, NAN))
        control_step(control, (p, 1.0))
    _, steps = give_up(control, lambda: loss_making((p, NAN)))
    assert steps == limit


@pytest.mark.parametrize("offset", range(6))
def test_giving_up_comes_at_exactly_the_limit_wherever_the_bad_steps_begin(offset):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=4)
    for _ in range(offset):
        control_step(control, (p, 1.0))
    _, steps = give_up(control, lambda: loss_making((p, NAN)))
    assert steps == 4


def test_none_means_never():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=None)
    for _ in range(250):
        assert control_step(control, (p, INF)).skipped
    assert control.scale == 2.0**-24


def test_the_counter_survives_a_checkpoint_and_the_text_counts_all_steps():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=5)
    for _ in range(3):
        control_step(control, (p, INF))
    resumed = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=5)
    resumed.load_state_dict(control.state_dict())
    error, steps = give_up(resumed, lambda: loss_making((p, INF)))
    assert steps == 2
    assert "5 steps in a row" in str(error)


def test_a_limit_beyond_what_is_remembered_is_still_counted_right():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=1200)
    error, steps = give_up(control, lambda: loss_making((p, NAN)), at_most=1300)
    assert steps == 1200
    assert "1200 steps in a row" in str(error)


def test_one_step_is_written_in_the_singular():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=1)
    error, _ = give_up(control, lambda: loss_making((p, NAN)))
    assert "1 steps" not in str(error)


def test_raise_tells_the_culprit_at_once_and_changes_nothing_but_the_scale():
    p, q = parameter(1.0), parameter(2.0)
    optimizer = torch.optim.Adam([p, q], lr=0.1)
    control = GradientControl(optimizer, on_nonfinite="raise", clip=1.0)
    assert not control_step(control, (p, 1.0), (q, 1.0)).skipped
    before = contents(optimizer)
    with pytest.raises(NonFiniteGradient, match=r"step 2 skipped: Inf in .*scale 65536") as caught:
        control_step(control, (p, 1.0), (q, INF))
    assert not isinstance(caught.value, NeverFinite)
    assert caught.value.culprits == ("param_groups[0]['params'][1]",)
    assert_same(contents(optimizer), before)
    assert control.scale == 32768.0
    assert not control_step(control, (p, 1.0), (q, 1.0)).skipped


def test_raise_counts_towards_giving_up_too():
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), on_nonfinite="raise", give_up_after=3)
    kinds = []
    for _ in range(3):
        with pytest.raises(NonFiniteGradient) as caught:
            control_step(control, (p, NAN))
        kinds.append(type(caught.value))
    assert kinds == [NonFiniteGradient, NonFiniteGradient, NeverFinite]


def test_the_scales_in_the_error_are_finite_numbers():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=60)
    error, _ = give_up(control, lambda: loss_making((p, INF)))
    assert all(math.isfinite(s) and s > 0 for s in error.scales)
    assert len(error.scales) == 60
