"""GradientControl trains as torch's GradScaler, clip_grad_norm_ and the same optimizer do."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradilocks import (
    ClipByNorm,
    ClipByValue,
    DynamicScale,
    GradientControl,
    NoClip,
    NoScale,
    StaticScale,
)
from tests.control.gradient_scripts import (
    INF,
    NAN,
    OPTIMIZERS,
    assert_same,
    contents,
    control_step,
    loss_making,
    parameter,
    parameters,
)

STEPS = 60
OVERFLOWS = {17, 18, 33}
"""The steps whose loss, once scaled, is beyond float32."""


def twins(make):
    """Two equal models, each with its optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
    other = copy.deepcopy(model)
    return (model, make(model.parameters())), (other, make(other.parameters()))


def batches(count=STEPS):
    torch.manual_seed(5)
    for step in range(count):
        x, y = torch.randn(12, 7), torch.randn(12, 3)
        yield x, y, 1e36 if step in OVERFLOWS else 1.0


def loss_of(model, x, y, factor):
    return nn.functional.mse_loss(model(x), y) * factor


def torch_step(scaler, optimizer, model, max_norm=None, order=2.0, max_value=None):
    scaler.unscale_(optimizer)
    norm = None
    if max_norm is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=order)
    if max_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), max_value)
    scaler.step(optimizer)
    scaler.update()
    return norm


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 1e9])
def test_an_unclipped_run_is_bit_for_bit_torchs(name, clip):
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS[name])
    control = GradientControl(
        optimizer, model=model, clip=clip, scale=DynamicScale(growth_interval=7)
    )
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    skipped = set()
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, *batch))
        outcome = control.step()
        scaler.scale(loss_of(theirs, *batch)).backward()
        torch_step(scaler, their_optimizer, theirs, clip)
        assert not outcome.clipped
        assert control.scale == scaler.get_scale()
        if outcome.skipped:
            skipped.add(step)
    assert skipped == OVERFLOWS
    assert_same(contents(optimizer), contents(their_optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_clipped_run_is_torchs_within_float32_rounding(name):
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS[name])
    control = GradientControl(
        optimizer, model=model, clip=0.25, scale=DynamicScale(growth_interval=7)
    )
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    clipped = 0
    for batch in batches():
        control.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, *batch))
        outcome = control.step()
        scaler.scale(loss_of(theirs, *batch)).backward()
        norm = torch_step(scaler, their_optimizer, theirs, 0.25)
        clipped += outcome.clipped
        if not outcome.skipped:
            # Two runs that part by a rounding error at each of 60 steps.
            assert outcome.norm == pytest.approx(norm.item(), rel=1e-4)
    assert clipped > 40
    assert control.scale == scaler.get_scale()
    for mine, their in zip(model.parameters(), theirs.parameters(), strict=True):
        # torch multiplies by 1/scale and by the coefficient one after the other, ours by their
        # product: a rounding error a step. An adaptive optimizer divides by a root that starts near
        # zero, which magnifies it.
        torch.testing.assert_close(mine, their, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_one_step_clipped_by_any_norm_is_torchs(order):
    (model, optimizer), (theirs, their_optimizer) = twins(lambda ps: torch.optim.SGD(ps, lr=1.0))
    control = GradientControl(optimizer, clip=ClipByNorm(0.01, order=order))
    scaler = torch.amp.GradScaler("cpu")
    batch = next(batches())
    control.backward(loss_of(model, *batch))
    scaler.scale(loss_of(theirs, *batch)).backward()
    outcome = control.step()
    norm = torch_step(scaler, their_optimizer, theirs, 0.01, order)
    assert outcome.clipped
    assert outcome.limit == 0.01
    assert outcome.norm == pytest.approx(norm.item(), rel=1e-6)
    for mine, their in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["SGD", "SGD fused", "Adam", "AdamW fused"])
@pytest.mark.parametrize("value", [0.0, 0.01, 0.1, 100.0])
def test_clipping_by_value_is_bit_for_bit_torchs_on_unscaled_gradients(name, value):
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS[name])
    control = GradientControl(optimizer, clip=ClipByValue(value))
    scaler = torch.amp.GradScaler("cpu")
    for batch in batches(25):
        control.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, *batch))
        scaler.scale(loss_of(theirs, *batch)).backward()
        largest = max(p.grad.abs().max().item() for p in theirs.parameters()) / scaler.get_scale()
        outcome = control.step()
        torch_step(scaler, their_optimizer, theirs, max_value=value)
        assert outcome.clipped == (largest > value and not outcome.skipped)
    assert_same(contents(optimizer), contents(their_optimizer))


@pytest.mark.parametrize(
    ("scale", "init"),
    [(NoScale(), 1.0), (None, 1.0), (StaticScale(1024.0), 1024.0), (1024, 1024.0), (0.25, 0.25)],
)
@pytest.mark.parametrize("name", ["Adam", "AdamW fused", "SGD nesterov fused"])
def test_a_fixed_scale_trains_as_torch_with_a_scale_that_never_moves(scale, init, name):
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS[name])
    control = GradientControl(optimizer, scale=scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=10**6)
    for x, y, _ in batches(20):
        optimizer.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, x, y, 1.0))
        scaler.scale(loss_of(theirs, x, y, 1.0)).backward()
        assert not control.step().skipped
        scaler.step(their_optimizer)
        scaler.update()
        assert control.scale == init
    assert_same(contents(optimizer), contents(their_optimizer))


@pytest.mark.parametrize("name", ["SGD", "SGD fused", "Adam", "Adam fused"])
def test_a_scale_that_is_no_power_of_two_trains_as_torchs(name):
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS[name])
    control = GradientControl(optimizer, scale=1000.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=10**6)
    for x, y, _ in batches(50):
        optimizer.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, x, y, 1.0))
        scaler.scale(loss_of(theirs, x, y, 1.0)).backward()
        control.step()
        scaler.step(their_optimizer)
        scaler.update()
    assert_same(contents(optimizer), contents(their_optimizer))


def test_a_loss_scaled_by_hand_trains_as_one_handed_to_backward():
    (model, optimizer), (other, other_optimizer) = twins(OPTIMIZERS["AdamW fused"])
    control, by_hand = (
        GradientControl(optimizer, clip=0.5),
        GradientControl(other_optimizer, clip=0.5),
    )
    for batch in batches(20):
        control.zero_grad()
        by_hand.zero_grad()
        control.backward(loss_of(model, *batch))
        by_hand.scale_loss(loss_of(other, *batch)).backward()
        assert control.step().norm == pytest.approx(by_hand.step().norm, rel=0, nan_ok=True)
    assert_same(contents(optimizer), contents(other_optimizer))


def test_training_under_bfloat16_autocast_is_torchs():
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS["AdamW fused"])
    control = GradientControl(optimizer, scale=None, clip=1e9)
    for x, y, _ in batches(20):
        optimizer.zero_grad()
        their_optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mine, their = loss_of(model, x, y, 1.0), loss_of(theirs, x, y, 1.0)
        control.backward(mine)
        their.backward()
        control.step()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1e9)
        their_optimizer.step()
    assert_same(contents(optimizer), contents(their_optimizer))


def test_several_optimizers_share_one_scale_and_one_norm():
    p, q = parameter(0.0, 0.0), parameter(0.0, 0.0, 0.0)
    one, two = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0, fused=True)
    control = GradientControl(one, two, clip=1.0)
    outcome = control_step(
        control, (p, torch.tensor([3.0, 4.0])), (q, torch.tensor([0.0, 0.0, 12.0]))
    )
    assert outcome.norm == pytest.approx(13.0, rel=1e-7)
    torch.testing.assert_close(-p.detach(), torch.tensor([0.23076922, 0.30769229]))
    torch.testing.assert_close(-q.detach(), torch.tensor([0.0, 0.0, 0.92307687]))


def test_several_optimizers_train_as_torch_clipping_over_all_parameters():
    def pair(make_first, make_second):
        torch.manual_seed(1)
        body, head = nn.Linear(7, 9), nn.Linear(9, 3)
        return (
            nn.Sequential(body, nn.Tanh(), head),
            make_first(body.parameters()),
            make_second(head.parameters()),
        )

    makers = OPTIMIZERS["Adam fused"], OPTIMIZERS["SGD momentum"]
    model, *optimizers = pair(*makers)
    theirs, *their_optimizers = pair(*makers)
    control = GradientControl(*optimizers, model=model, clip=0.3)
    scaler = torch.amp.GradScaler("cpu")
    for x, y, _ in batches(50):
        control.zero_grad()
        for optimizer in their_optimizers:
            optimizer.zero_grad()
        control.backward(loss_of(model, x, y, 1.0))
        outcome = control.step()
        scaler.scale(loss_of(theirs, x, y, 1.0)).backward()
        for optimizer in their_optimizers:
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        for optimizer in their_optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert outcome.norm == pytest.approx(norm.item(), rel=1e-4)
    for mine, their in zip(model.parameters(), theirs.parameters(), strict=True):
        # As above: a rounding error at each of 50 steps, magnified by Adam.
        torch.testing.assert_close(mine, their, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("fused", [False, True])
def test_one_nonfinite_gradient_skips_every_optimizer(bad, fused):
    p, q = parameter(1.0, 2.0), parameter(3.0)
    one = torch.optim.Adam([p], lr=0.1, fused=fused)
    two = torch.optim.AdamW([q], lr=0.1, fused=not fused)
    control = GradientControl(one, two, clip=1.0)
    control_step(control, (p, 1.0), (q, 1.0))
    before = contents(one), contents(two)
    outcome = control_step(control, (p, 1.0), (q, bad))
    assert outcome.skipped
    assert_same((contents(one), contents(two)), before)


def test_accumulating_with_several_backward_calls_equals_one_big_batch():
    # Halves and quarters: every sum is exact, so that the order of additions cannot matter.
    x = torch.tensor([[1.0, 0.5], [0.25, 2.0], [1.5, 1.0], [0.5, 0.75]])

    def run(sizes, steps=10):
        p = parameter(0.5, -0.25)
        optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5)
        control = GradientControl(optimizer, clip=ClipByNorm(1e6))
        for _ in range(steps):
            control.zero_grad()
            for part in x.split(sizes):
                control.backward((part @ p).sum() / 4)
            outcome = control.step()
        return contents(optimizer), outcome.norm, control.scale

    whole = run([4])
    assert_same(run([1, 1, 1, 1]), whole)
    assert_same(run([3, 1]), whole)


def test_accumulated_micro_batches_move_the_scale_and_the_counters_once():
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=8.0, growth_interval=2)
    )
    for step in range(2):
        control.zero_grad()
        for _ in range(5):
            control.backward(loss_making((p, 1.0)))
        assert control.step().step == step + 1
    assert control.scale == 16.0


def test_one_bad_micro_batch_spoils_the_accumulated_step():
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    control.backward(loss_making((p, 1.0)))
    control.backward(loss_making((p, torch.tensor([INF, 0.0]))))
    control.backward(loss_making((p, 1.0)))
    assert control.step().skipped
    assert p.tolist() == [0.0, 0.0]


def test_dynamic_is_the_default_and_starts_where_torch_starts():
    p = parameter(0.0)
    for control in (
        GradientControl(torch.optim.SGD([p], lr=0.1)),
        GradientControl(torch.optim.SGD([p], lr=0.1), scale="dynamic"),
        GradientControl(torch.optim.SGD([p], lr=0.1), scale=DynamicScale()),
    ):
        assert control.scale == 65536.0
        assert control_step(control, (p, INF)).skipped
        assert control.scale == 32768.0


def test_no_clip_is_an_object_like_the_other_policies():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0), clip=NoClip())
    outcome = control_step(control, (p, 1e6))
    assert (outcome.clipped, outcome.limit) == (False, INF)
    assert outcome.norm == pytest.approx(1e6, rel=1e-7)  # Squares are rounded to float32.
    assert p.item() == -1e6


def test_the_scale_respects_its_floor_and_its_ceiling_in_training():
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1),
        scale=DynamicScale(init_scale=4.0, growth_interval=1, min_scale=1.0, max_scale=16.0),
    )
    path = [control.scale]
    for gradient in [1.0] * 4 + [INF] * 6 + [1.0]:
        control_step(control, (p, gradient))
        path.append(control.scale)
    assert path == [4, 8, 16, 16, 16, 8, 4, 2, 1, 1, 1, 2]


def test_hysteresis_lets_the_scale_survive_a_single_overflow():
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1),
        scale=DynamicScale(init_scale=1024.0, growth_interval=3, hysteresis=2),
    )
    path = []
    for flag in [1, 0, 1, 1, 0, 0, 0, 1, 1]:
        control_step(control, (p, INF if flag else 1.0))
        path.append(control.scale)
    assert path == [1024, 1024, 512, 256, 256, 256, 512, 512, 256]


gradient_lists = st.lists(
    st.lists(
        st.one_of(
            st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
            st.sampled_from([INF, -INF, NAN, 0.0]),
        ),
        min_size=3,
        max_size=3,
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(
    script=gradient_lists,
    max_norm=st.sampled_from([None, 0.5, 1e3]),
    fused=st.booleans(),
    hysteresis=st.integers(1, 3),
    interval=st.integers(1, 4),
)
def test_any_script_of_gradients_follows_the_rule_written_out_in_numbers(
    script, max_norm, fused, hysteresis, interval
):
    p, q = parameter(1.0, 1.0), parameter(1.0)
    control = GradientControl(
        torch.optim.SGD([p, q], lr=0.125, fused=fused),
        clip=max_norm,
        scale=DynamicScale(
            init_scale=64.0,
            growth_interval=interval,
            hysteresis=hysteresis,
            min_scale=2.0,
            max_scale=1024.0,
        ),
        give_up_after=None,
    )
    weights, scale, tracker, left = [1.0, 1.0, 1.0], 64.0, 0, hysteresis
    for a, b, c in script:
        outcome = control_step(control, (p, torch.tensor([a, b])), (q, c))
        finite = all(math.isfinite(g) for g in (a, b, c))
        assert outcome.skipped == (not finite)
        assert outcome.scale == scale
        if finite:
            norm = math.sqrt(a * a + b * b + c * c)
            coefficient = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
            weights = [w - 0.125 * coefficient * g for w, g in zip(weights, (a, b, c), strict=True)]
            assert outcome.norm == pytest.approx(norm, rel=1e-6, abs=1e-30)
            assert outcome.clipped == (coefficient < 1.0)
            tracker += 1
            if tracker == interval:
                tracker, left = 0, hysteresis
                scale = scale * 2 if scale * 2 <= 1024.0 else scale
        else:
            assert not outcome.clipped
            tracker, left = 0, left - 1
            scale = max(scale / 2, 2.0) if left <= 0 else scale
        assert control.scale == scale
    largest = max(1.0, *(abs(w) for w in weights))
    # A float32 subtraction a step, each off by at most 6e-8 of the largest value on the way.
    reached = max([abs(g) for row in script for g in row if math.isfinite(g)], default=0.0)
    close = 1e-6 * (largest + reached) * len(script)
    assert [*p.tolist(), q.item()] == pytest.approx(weights, abs=close, rel=1e-6)


def test_a_learning_rate_scheduler_drives_the_controlled_optimizer():
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS["AdamW fused"])
    control = GradientControl(optimizer)
    mine = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    their = torch.optim.lr_scheduler.StepLR(their_optimizer, 3, gamma=0.5)
    for x, y, _ in batches(12):
        control.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, x, y, 1.0))
        control.step()
        mine.step()
        loss_of(theirs, x, y, 1.0).backward()
        their_optimizer.step()
        their.step()
    assert mine.get_last_lr() == their.get_last_lr()
    assert_same(contents(optimizer), contents(their_optimizer))


def test_parameters_are_the_same_objects_after_many_steps():
    (model, optimizer), _ = twins(OPTIMIZERS["Adam"])
    before = [id(p) for p in model.parameters()]
    control = GradientControl(optimizer)
    for batch in batches(5):
        control.zero_grad()
        control.backward(loss_of(model, *batch))
        control.step()
    assert [id(p) for p in parameters(optimizer)] == before
