"""give_up_after: the error says why training goes nowhere and whether a scale could help."""

import copy
import io
import json
import math
import pickle

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


def test_an_overflow_that_has_not_begun_to_fade_is_not_called_hopeless():
    p = parameter(0.0, 0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=2.0**30), give_up_after=4
    )
    error, steps = give_up(control, lambda: half_gradient(p, 1.0))
    assert steps == 4
    assert error.curable is None
    assert error.scales == (2.0**30, 2.0**29, 2.0**28, 2.0**27)
    assert error.culprits == ("param_groups[0]['params'][0]",)
    text = str(error)
    parts = ("4 steps in a row", "Inf in param_groups", "smaller scale", "not known", "init_scale=")
    for part in parts:
        assert part in text


def test_an_overflow_in_a_float16_model_with_a_fused_optimizer_is_not_called_hopeless():
    model = nn.Linear(3, 1).half()
    control = GradientControl(
        torch.optim.Adam(model.parameters(), lr=0.1, fused=True),
        model=model,
        scale=DynamicScale(init_scale=2.0**20),
        give_up_after=3,
    )
    error, _ = give_up(control, lambda: model(torch.full((1, 3), 8.0).half()).float().sum())
    assert error.curable is None
    assert set(error.culprits) == {"weight", "bias"}


def test_what_is_not_called_hopeless_may_be_cured_by_more_steps():
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


def test_whether_an_inf_at_the_floor_is_curable_is_not_known():
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1),
        scale=DynamicScale(init_scale=8.0, min_scale=2.0),
        give_up_after=5,
    )
    error, _ = give_up(control, lambda: loss_making((p, INF)))
    assert error.curable is None
    assert "floor of 2" in str(error)
    assert "min_scale sets the floor" in str(error)
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
    assert error.curable is None
    assert "at its floor" in str(error)


def test_whether_an_inf_without_a_scale_is_curable_is_not_known():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=None, give_up_after=3)
    error, _ = give_up(control, lambda: loss_making((p, INF)))
    assert error.curable is None
    assert "not scaled" in str(error)
    assert "1 throughout" in str(error)


def test_an_inf_under_a_static_scale_may_be_cured_by_a_smaller_one():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=StaticScale(4096.0))
    error, steps = give_up(control, lambda: loss_making((p, INF)))
    assert steps == 100
    assert error.curable is None  # Nor does it: this one is Inf at any scale.
    assert "fixed at 4096" in str(error)


@pytest.mark.parametrize(("scale", "steps"), [("dynamic", 12), (None, 3), (1024.0, 3)])
def test_a_nan_is_told_apart_from_an_inf(scale, steps):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale, give_up_after=steps)
    error, _ = give_up(control, lambda: loss_making((p, NAN)))
    assert error.curable is None
    assert "NaN in param_groups" in str(error)
    assert "NaN and no Inf" in str(error)
    assert "set_detect_anomaly" in str(error)


def cancelling(p):
    """A loss whose gradient is 0, or NaN above 65504: Inf - Inf on the way back."""
    half = p.half()
    return (half * 100 - half * 100).float().sum()


CURED_BY_A_SMALLER_SCALE = {
    "Megatron's rule": (
        DynamicScale.megatron(),
        lambda p: half_gradient(p, 1000.0),
        20,
        DynamicScale.megatron(),
    ),
    "a NaN under a static scale": (StaticScale(2.0**20), cancelling, 3, StaticScale(2.0**9)),
    "a NaN under Megatron's rule": (DynamicScale.megatron(), cancelling, 12, StaticScale(2.0**9)),
    "a NaN under torch's rule": ("dynamic", cancelling, 3, StaticScale(2.0**9)),
    "an Inf without a scale": (None, lambda p: half_gradient(p, 300.0) * 300, 3, 2.0**-3),
    "an Inf under a static scale of 1": (1.0, lambda p: half_gradient(p, 300.0) * 300, 3, 2.0**-3),
    "an Inf at a floor of 1": (
        DynamicScale(init_scale=4.0, min_scale=1.0),
        lambda p: half_gradient(p, 300.0) * 300,
        10,
        2.0**-3,
    ),
    "an Inf at a floor of 2^-13": (
        DynamicScale.fairseq(),
        lambda p: half_gradient(half_gradient(p, 30000.0), 30000.0),
        30,
        2.0**-20,
    ),
}


@pytest.mark.parametrize("case", CURED_BY_A_SMALLER_SCALE)
def test_what_a_smaller_scale_cures_is_never_called_hopeless(case):
    scale, loss, limit, smaller = CURED_BY_A_SMALLER_SCALE[case]
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale, give_up_after=limit)
    error, steps = give_up(control, lambda: loss(p))
    assert steps == limit
    assert error.curable is None
    assert "not known" in str(error)
    cured = GradientControl(torch.optim.SGD([p], lr=0.1), scale=smaller)
    for _ in range(28):
        cured.zero_grad()
        cured.backward(loss(p))
        outcome = cured.step()
    assert not outcome.skipped


@pytest.mark.parametrize("limit", [1, 3, 4, 12, 30])
@pytest.mark.parametrize("scale", ["dynamic", DynamicScale.megatron(), 1024.0, None], ids=str)
def test_what_no_scale_cures_is_never_called_curable(scale, limit):
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale, give_up_after=limit)
    error, _ = give_up(control, lambda: torch.sqrt(p).sum())  # 1/(2·0) at any scale
    assert error.curable is None
    assert "not known" in str(error)


def test_what_is_there_where_float16_has_room_for_everything_is_hopeless():
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    error, steps = give_up(control, lambda: torch.sqrt(p).sum())
    assert steps == 100
    assert error.curable is False
    assert "not an overflow that a smaller scale cures" in str(error)
    assert "set_detect_anomaly" in str(error)


def test_a_loss_of_which_nobody_was_told_is_not_called_finite():
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=None, give_up_after=2)
    (p * NAN).sum().backward()
    assert control.step().skipped
    (p * NAN).sum().backward()
    with pytest.raises(NeverFinite) as caught:
        control.step()
    assert caught.value.curable is None
    assert "finite gradients;" in str(caught.value)
    assert "loss is finite" not in str(caught.value)
    assert "Print the loss" in str(caught.value)


def test_a_loss_that_broke_only_at_the_end_does_not_speak_for_all_steps():
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=4)
    losses = iter([loss_making((p, INF))] * 3 + [(p * NAN).sum()])
    error, _ = give_up(control, lambda: next(losses))
    assert error.curable is None
    assert "The loss itself was NaN or Inf at 1 of 4 steps, the last among them" in str(error)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_nonfinite_loss_is_told_apart_from_a_nonfinite_gradient(bad):
    p = parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=3)
    error, _ = give_up(control, lambda: (p * bad).sum())
    assert error.curable is False
    assert "loss itself" in str(error)


def test_a_loss_that_only_overflows_once_scaled_is_not_called_broken():
    p = parameter(1.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=2.0**16), give_up_after=3
    )
    error, _ = give_up(control, lambda: (p * 1e36).sum())
    assert error.curable is None
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


def test_a_scale_that_fell_far_for_nothing_is_told_of():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=12)
    error, _ = give_up(control, lambda: torch.sqrt(p).sum())
    assert error.curable is None
    assert "fallen 2048-fold" in str(error)


def test_infs_that_become_fewer_as_the_scale_falls_are_curable():
    p = nn.Parameter(torch.zeros(12))
    sizes = 2.0 ** torch.arange(12)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=2.0**24), give_up_after=12
    )
    error, _ = give_up(control, lambda: (p.half() * sizes.half()).float().sum())
    assert error.curable is True
    assert "12 at 1.67772e+07, 9 at 8192" in str(error)


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


def through_json(saved):
    return json.loads(json.dumps(saved, allow_nan=False))


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def loaded(control, saved, **options):
    made = GradientControl(
        torch.optim.SGD([parameter(*[0.0] * 12)], lr=0.0),
        scale=control._engine.scale_policy,
        **{"give_up_after": control._engine.streak.limit, **options},
    )
    made.load_state_dict(saved)
    return made


def bound(control):
    control.bind(torch.optim.SGD(control.optimizers[0].param_groups[0]["params"], lr=0.0))
    return control


GOES_ON = {
    "JSON": lambda control: loaded(control, through_json(control.state_dict())),
    "a file": lambda control: loaded(control, through_a_file(control.state_dict())),
    "twice": lambda control: GOES_ON["JSON"](GOES_ON["JSON"](control)),
    "a copy": copy.deepcopy,
    "a pickle": lambda control: pickle.loads(pickle.dumps(control)),
    "a bind": bound,
    "a bind later": lambda control: _bound_later(control),
    "a scaler's": lambda control: _behind_a_scaler(control),
}


def _bound_later(control):
    made = GradientControl(
        scale=control._engine.scale_policy, give_up_after=control._engine.streak.limit
    )
    made.load_state_dict(through_json(control.state_dict()))
    made.bind(torch.optim.SGD([parameter(*[0.0] * 12)], lr=0.0))
    return made


def _behind_a_scaler(control):
    made = loaded(
        control, GradientControl(one_sgd(), scale=control._engine.scale_policy).state_dict()
    )
    made.as_scaler().load_state_dict(through_json(control.as_scaler().state_dict()))
    return made


def one_sgd():
    return torch.optim.SGD([parameter(0.0)], lr=0.0)


def fading(p):
    """Gradients of 1 to 2^11 in float16: each halving of the scale cures one more."""
    return (p.half() * 2.0 ** torch.arange(12).half()).float().sum()


STREAKS = {
    "fading": (DynamicScale(init_scale=2.0**20), fading, 8, True),
    "staying": (DynamicScale(init_scale=2.0**16), lambda p: torch.sqrt(p).sum(), 12, None),
    "hopeless": (DynamicScale(init_scale=2.0**-20), lambda p: torch.sqrt(p).sum(), 8, False),
    "a broken loss": ("dynamic", lambda p: (p * NAN).sum(), 6, False),
    "Megatron's rule": (DynamicScale.megatron(), lambda p: half_gradient(p, 1000.0), 20, None),
    "a static scale": (StaticScale(1024.0), lambda p: loss_making((p, INF)), 6, None),
    "no scale": (None, lambda p: loss_making((p, NAN)), 6, None),
}


@pytest.mark.parametrize("by", GOES_ON)
@pytest.mark.parametrize("case", STREAKS)
def test_a_run_that_goes_on_in_mid_streak_gives_up_in_the_same_words(case, by):
    scale, loss, limit, curable = STREAKS[case]
    said = []
    for goes_on in (None, GOES_ON[by]):
        p = parameter(*[0.0] * 12)
        control = GradientControl(torch.optim.SGD([p], lr=0.0), scale=scale, give_up_after=limit)
        control_step(control, (p, 1.0))
        for _ in range(limit - 2):
            control.zero_grad()
            control.backward(loss(p))
            control.step()
        control.zero_grad()
        if goes_on is not None:
            control = goes_on(control)
            (p,) = control.optimizers[0].param_groups[0]["params"]
        error, steps = give_up(control, lambda p=p: loss(p))
        assert steps == 2
        said.append((str(error), error.curable, error.scales, error.in_a_row))
    assert said[0] == said[1]
    assert said[0][1] is curable
    assert len(said[0][2]) == said[0][3] == limit


def test_a_streak_of_one_optimizer_alone_goes_on_whole():
    def two():
        params = parameter(0.0), parameter(0.0)
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in params]
        return params, GradientControl(*optimizers, give_up_after=6)

    def step(params, control):
        control.zero_grad()
        control.backward(loss_making((params[0], INF), (params[1], 1.0)))
        for optimizer in control.optimizers:
            control.step(only=optimizer)

    params, control = two()
    for _ in range(4):
        step(params, control)
    saved = through_json(control.state_dict())
    params, control = two()
    control.load_state_dict(saved)
    step(params, control)
    with pytest.raises(NeverFinite) as caught:
        step(params, control)
    assert caught.value.scales == tuple(2.0 ** (16 - k) for k in range(6))
    assert caught.value.in_a_row == 6


def test_a_finite_step_ends_what_a_checkpoint_knew_of_a_streak():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=5)
    for _ in range(4):
        control_step(control, (p, INF))
    control.load_state_dict(through_json(control.state_dict()))
    control_step(control, (p, 1.0))
    assert control.state_dict()["gradilocks"]["streak_steps"] == []
    error, steps = give_up(control, lambda: loss_making((p, INF)))
    assert steps == 5
    assert error.scales == tuple(2.0 ** (12 - k) for k in range(5))


def test_a_checkpoint_without_the_steps_of_its_streak_loads_and_the_error_says_so():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=12)
    for _ in range(10):
        control_step(control, (p, INF))
    saved = control.state_dict()
    del saved["gradilocks"]["streak_steps"]
    control.load_state_dict(saved)
    error, steps = give_up(control, lambda: loss_making((p, INF)))
    assert steps == 2
    assert error.in_a_row == 12
    assert error.scales == (64.0, 32.0)
    assert "64 → 32 (1 halving), of the last 2 of 12 steps: no more of them are kept" in str(error)


@pytest.mark.parametrize(("before", "after"), [(None, 12), (50, 12), (12, 50)])
def test_a_streak_goes_on_under_another_limit(before, after):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=before)
    for _ in range(10):
        control_step(control, (p, INF))
    again = loaded(control, through_json(control.state_dict()), give_up_after=after)
    (p,) = again.optimizers[0].param_groups[0]["params"]
    error, steps = give_up(again, lambda: loss_making((p, INF)))
    assert steps == after - 10
    assert len(error.scales) == error.in_a_row == after
    assert "no more of them are kept" not in str(error)


def test_a_limit_beyond_what_is_remembered_is_still_counted_right():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), give_up_after=1200)
    error, steps = give_up(control, lambda: loss_making((p, NAN)), at_most=1300)
    assert steps == 1200
    assert "1200 steps in a row" in str(error)
    assert error.in_a_row == 1200
    assert len(error.scales) == 1000
    assert "of the last 1,000 of 1,200 steps: no more of them are kept" in str(error)


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
