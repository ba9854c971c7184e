"""The drop-in scaler steps a wrapped optimizer as the one inside it would be stepped.

torch's own hands the scale to the wrapper, which keeps it: the optimizer inside steps with the
scale still in. Here the bare optimizer under torch's scaler is the truth, bit for bit: the scale is
a power of two, so dividing inside the step and multiplying before it are the same numbers.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from gradilocks import ClipByNorm, GradScaler, HeadroomScale, SkipSpikes, clip_grad_norm_
from gradilocks.errors import SharedParameter
from tests.control.optimizer_wrappers import (
    MAKERS,
    WRAPPERS,
    Forwards,
    Imitates,
    SlowWeights,
    TrueGradients,
    state_of,
)

each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
FUSED = [name for name in MAKERS if name != "Adam foreach"]
STEPS = [math.inf, None, None, math.nan, None]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def copies(params):
    return [param.detach().clone() for param in params]


def backward(scaler, params, step, bad=None):
    for param in params:
        param.grad = None
    loss = sum((param * param).sum() for param in params) * (0.1 * (step + 1))
    scaler.scale(loss).backward()
    if bad is not None:
        params[0].grad[1] = bad


def trained(make, wrap, scaler, *, between=None):
    params = [torch.nn.Parameter(torch.tensor([1.0, -2.0])), torch.nn.Parameter(torch.ones(1))]
    inner = make(params)
    optimizer = wrap(inner)
    told = []
    for step, bad in enumerate(STEPS):
        held, state = copies(params), state_of(inner)
        backward(scaler, params, step, bad)
        if between is not None:
            between(scaler, optimizer, params)
        scaler.step(optimizer)
        scaler.update()
        if bad is not None and scaler.is_enabled():
            assert same(copies(params), held)
            if step:  # A first step that is skipped may make state that is empty.
                after = state_of(inner)
                assert after.keys() == state.keys()
                assert all(same(after[k].values(), state[k].values()) for k in state)
        told.append(copies(params))
    return told, scaler.state_dict()


def itself(optimizer):
    return optimizer


@functools.cache
def trained_bare(make, scaler, *, between=None):
    """What every wrapper is held against, trained once."""
    return trained(make, itself, scaler(), between=between)


def ours():
    return GradScaler("cpu")


def torchs():
    return torch.amp.GradScaler("cpu")


@each_maker
@each_wrapper
def test_a_wrapped_optimizer_steps_and_skips_as_the_bare_one_under_torchs(make, wrap):
    got, state = trained(make, wrap, ours())
    expected, theirs = trained_bare(make, ours)
    assert state == theirs
    assert all(same(*pair) for pair in zip(got, expected, strict=True))
    if make is not MAKERS["SGD momentum fused"]:  # torch's first skipped step spoils that one.
        expected, theirs = trained_bare(make, torchs)
        assert state == theirs
        assert all(same(*pair) for pair in zip(got, expected, strict=True))


def unscale(scaler, optimizer, params):
    scaler.unscale_(optimizer)


def unscale_and_clip(scaler, optimizer, params):
    scaler.unscale_(optimizer)
    clip_grad_norm_(params, 0.1)


@each_wrapper
@pytest.mark.parametrize("name", ["SGD fused", "AdamW fused", "our SGD"])
@pytest.mark.parametrize("between", [unscale, unscale_and_clip])
def test_unscaling_and_clipping_by_hand_reach_a_wrapped_optimizer(wrap, name, between):
    got, _ = trained(MAKERS[name], wrap, ours(), between=between)
    expected, _ = trained_bare(MAKERS[name], ours, between=between)
    assert all(same(*pair) for pair in zip(got, expected, strict=True))


SCALERS = {
    "clip": lambda: GradScaler("cpu", clip=0.1),
    "policy": lambda: GradScaler("cpu", policy=HeadroomScale()),
    "both": lambda: GradScaler("cpu", policy=HeadroomScale(), clip=ClipByNorm(0.1)),
}


@each_wrapper
@pytest.mark.parametrize("name", ["SGD momentum fused", "AdamW fused", "our AdamW"])
@pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
def test_policies_of_a_scaler_reach_a_wrapped_optimizer(wrap, name, scaler):
    got, state = trained(MAKERS[name], wrap, scaler())
    expected, theirs = trained_bare(MAKERS[name], scaler)
    assert {k: v for k, v in state.items() if k != "gradilocks"} == {
        k: v for k, v in theirs.items() if k != "gradilocks"
    }
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


@each_wrapper
@pytest.mark.parametrize("name", ["SGD momentum fused", "AdamW fused", "our AdamW"])
def test_a_disabled_scaler_clips_and_rejects_for_a_wrapped_optimizer(wrap, name):
    def run(around):
        spikes = SkipSpikes(window=4, at_least=2)
        scaler = GradScaler("cpu", enabled=False, clip=spikes)
        params = [torch.nn.Parameter(torch.ones(3))]
        optimizer = around(MAKERS[name](params))
        told = []
        for step in range(6):
            params[0].grad = torch.full((3,), 1e6 if step == 4 else 1.0 + 0.1 * step)
            held = copies(params)
            scaler.step(optimizer)
            scaler.update()
            if step == 4:
                assert scaler.outcome.skipped
                assert same(copies(params), held)
            told.append(copies(params))
        return told

    assert all(same(*pair) for pair in zip(run(wrap), run(itself), strict=True))


def test_momentum_that_a_rejected_step_would_have_begun_begins_with_the_next():
    """A fused SGD makes its buffers without filling them, whoever holds the step back."""

    def run(**settings):
        scaler = GradScaler("cpu", enabled=False, clip=SkipSpikes(window=4, at_least=2))
        params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1000))]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, **settings)
        for step in range(6):
            params[0].grad = torch.full((3,), 1.0 + 0.1 * step)
            params[1].grad = None if step < 4 else torch.full((1000,), 1e6 if step == 4 else 0.01)
            held = copies(params)
            scaler.step(optimizer)
            scaler.update()
            assert same(copies(params), held) == (step == 4)
        return copies(params)

    torch.testing.assert_close(run(fused=True), run(fused=False))


@pytest.mark.parametrize("name", FUSED)
def test_a_wrapper_sees_true_gradients_and_is_not_called_to_skip(name):
    def run(around, scaler):
        return trained(MAKERS[name], around, scaler)[0]

    for around in (TrueGradients, SlowWeights):
        scaled = run(around, GradScaler("cpu", init_scale=1024.0))
        barely = run(around, GradScaler("cpu", init_scale=2.0))
        assert all(same(*pair) for pair in zip(scaled, barely, strict=True))


def test_a_wrapped_sgd_moves_by_the_gradient_and_not_by_the_scale():
    p = torch.nn.Parameter(torch.zeros(1))
    wrapper = Forwards(torch.optim.SGD([p], lr=0.001, fused=True))
    scaler = GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(wrapper)
    scaler.update()
    assert p.item() == pytest.approx(-0.001, rel=1e-6)
    p.grad = torch.full((1,), math.nan)
    scaler.step(wrapper)
    assert scaler.outcome.skipped
    assert p.item() == pytest.approx(-0.001, rel=1e-6)


def test_unscaling_the_optimizer_inside_and_stepping_the_wrapper_is_refused_by_name():
    p = torch.nn.Parameter(torch.ones(2))
    inner = MAKERS["AdamW fused"]([p])
    scaler = GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.unscale_(inner)
    with pytest.raises(SharedParameter, match=r"param_groups\[0\]"):
        scaler.step(Imitates(inner))
    assert p.tolist() == [1.0, 1.0]


@each_wrapper
def test_float16_gradients_of_a_wrapped_optimizer_are_refused_with_a_way_out(wrap):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.float().sum()).backward()
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients") as caught:
        scaler.step(wrap(torch.optim.SGD([p], lr=0.1, fused=True)))
    said = str(caught.value)
    assert "use the SGD inside it" in said or "use the class's own step" in said
    assert p.tolist() == [0.0, 0.0]


class FailsOnce(Forwards):
    fails = True

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return self.inner.step(closure)


@pytest.mark.parametrize("name", FUSED)
def test_a_wrapped_step_that_raised_may_be_tried_again(name):
    p = torch.nn.Parameter(torch.ones(2))
    q = torch.nn.Parameter(torch.ones(2))
    scaler, plain = GradScaler("cpu"), MAKERS[name]([q])
    wrapper = FailsOnce(MAKERS[name]([p]))
    scaler.scale((p * p).sum()).backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        scaler.step(wrapper)
    scaler.step(wrapper)
    (q * q).sum().backward()
    plain.step()
    assert torch.equal(p, q)
