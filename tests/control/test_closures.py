"""`step(closure)`: optimizers such as LBFGS that evaluate the loss themselves."""

from __future__ import annotations

import pytest
import torch

from control.given_gradients import INF, NAN, assert_same, contents, loss_giving, parameter, take_step
from gradilocks import ClipByNorm, DynamicScale, GradientControl
from gradilocks.errors import NeverFinite, NonFiniteGradient, ScaleMisuse


def rosenbrock(p):
    return (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2


def closure_for(control, make_loss):
    def closure():
        control.zero_grad()
        loss = make_loss()
        control.backward(loss)
        return loss

    return closure


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("scale", [None, 1024.0, "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lbfgs_is_lbfgs_bit_for_bit(search, scale, dtype):
    p, q = parameter(-1.2, 1.0, dtype=dtype), parameter(-1.2, 1.0, dtype=dtype)
    options = {"lr": 0.5, "max_iter": 5, "line_search_fn": search}
    mine, plain = torch.optim.LBFGS([p], **options), torch.optim.LBFGS([q], **options)
    control = GradientControl(mine, scale=scale)

    def plain_closure():
        plain.zero_grad()
        loss = rosenbrock(q)
        loss.backward()
        return loss

    for step in range(6):
        outcome = control.step(closure_for(control, lambda: rosenbrock(p)))
        plain.step(plain_closure)
        assert (outcome.step, outcome.skipped) == (step + 1, False)
    assert_same(contents(mine), contents(plain))


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_one_nonfinite_evaluation_undoes_the_whole_step(at, bad):
    p = parameter(-1.2, 1.0)
    optimizer = torch.optim.LBFGS([p], lr=0.5, max_iter=6)
    control = GradientControl(optimizer, scale=DynamicScale(init_scale=64.0))
    control.step(closure_for(control, lambda: rosenbrock(p)))
    before, calls = contents(optimizer), []

    def make_loss():
        calls.append(1)
        return rosenbrock(p) if len(calls) != at else loss_giving((p, bad))

    outcome = control.step(closure_for(control, make_loss))
    assert len(calls) == at
    assert outcome.skipped
    assert control.scale == 32.0
    assert_same(contents(optimizer), before)
    assert not control.step(closure_for(control, lambda: rosenbrock(p))).skipped


def test_a_skipped_evaluation_counts_towards_giving_up_and_raises_if_asked():
    p = parameter(1.0)
    control = GradientControl(torch.optim.LBFGS([p]), give_up_after=2)
    bad = closure_for(control, lambda: loss_giving((p, NAN)))
    control.step(bad)
    with pytest.raises(NeverFinite):
        control.step(bad)
    control = GradientControl(torch.optim.LBFGS([p]), on_nonfinite="raise")
    with pytest.raises(NonFiniteGradient):
        control.step(closure_for(control, lambda: loss_giving((p, NAN))))
    assert p.item() == 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizer_sees_unscaled_clipped_gradients(fused):
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=1.0, fused=fused), clip=ClipByNorm(1.0))
    outcome = control.step(closure_for(control, lambda: loss_giving((p, torch.tensor([3.0, 4.0])))))
    assert outcome.clipped
    assert p.tolist() == pytest.approx([-0.6, -0.8])
    assert p.grad.tolist() == pytest.approx([0.6, 0.8])


def test_mistakes_in_closures_raise_and_change_nothing():
    p = parameter(1.0, 2.0)
    optimizer = torch.optim.LBFGS([p], lr=0.1, max_iter=3)
    control = GradientControl(optimizer)
    control.step(closure_for(control, lambda: p.square().sum()))
    before = contents(optimizer)

    def plain_backward():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    def nothing_returned():
        control.zero_grad()
        control.backward(p.square().sum())

    def not_cleared():
        loss = p.square().sum()
        control.backward(loss)
        return loss

    def fails():
        raise KeyError("data")

    for closure, error, words in (
        (plain_backward, ScaleMisuse, "without a scaled loss"),
        (nothing_returned, TypeError, "must return the loss"),
        (not_cleared, ScaleMisuse, r"zero_grad\(\)"),
        (fails, KeyError, "data"),
    ):
        with pytest.raises(error, match=words):
            control.step(closure)
        assert_same(contents(optimizer), before)
    assert not control.step(closure_for(control, lambda: p.square().sum())).skipped


def test_a_closure_needs_one_optimizer_that_calls_it():
    p, q = parameter(1.0), parameter(1.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1))
    with pytest.raises(ValueError, match=r"one optimizer; this one has 2"):
        control.step(lambda: p.sum())

    class Ignores(torch.optim.SGD):
        def step(self, closure=None):
            return None

    control = GradientControl(Ignores([p], lr=0.1))
    with pytest.raises(ScaleMisuse, match=r"Ignores\.step did not call the closure"):
        control.step(lambda: p.sum())
    q.grad = None
    control = GradientControl(torch.optim.SGD([q], lr=0.1))
    assert not take_step(control, (q, 1.0)).skipped
