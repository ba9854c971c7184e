"""An optimizer whose step raises after the device has settled it: nothing has been decided."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from gradilocks import DynamicScale, GradientControl, kernels, optim
from gradilocks.errors import ScaleMisuse
from tests.control.gradient_scripts import assert_same, contents
from tests.engine.backends import (
    NAN,
    facts,
    gradient_for,
    loss_giving,
    parameter,
    step,
)

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MOVING = DynamicScale(init_scale=64.0, growth_interval=3, hysteresis=2)
MAKERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "unfused": lambda params: torch.optim.AdamW(params, lr=0.01),
    "ours": lambda params: optim.AdamW(params, lr=0.01),
    "our SGD": lambda params: optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
}


class Failing:
    """Lets a method of an optimizer, or its launch, raise as often as it is told to.

    A step raises from a hook: one that is replaced would be no longer the optimizer's own.
    """

    def __init__(self, optimizer, monkeypatch, method="step"):
        self.times = 0
        if method == "step":
            optimizer.register_step_pre_hook(self.fail)
            return
        # Whoever serves the device, Triton or C++.
        where = optimizer.param_groups[0]["params"][0].device.type
        owner = kernels.BACKENDS[where].optimizers if method == "launch" else optimizer
        method = "launch_step" if method == "launch" else method
        real = getattr(owner, method)

        def failing(*args, **kwargs):
            self.fail()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, method, failing)
        if method == "launch_step":  # A step that is taken again has bound its launches.
            bind = owner.bound_step
            monkeypatch.setattr(owner, "bound_step", lambda *args: self.bound(bind(*args)))

    def bound(self, stepping):
        def failing(stream):
            self.fail()
            return stepping(stream)

        return None if stepping is None else failing

    def fail(self, *_):
        if self.times:
            self.times -= 1
            raise RuntimeError("out of memory")


def pairs(params, number, bad=None):
    last = len(params) - 1
    return [
        (param, gradient_for(param, 10 * number + place, bad if place == last else None))
        for place, param in enumerate(params)
    ]


def trained(device, monkeypatch, make, fail_at=(), *, after=None, method="step"):
    """Seven steps, the third and the fourth of which are not finite; some fail at first."""
    params = [parameter(5, device=device), parameter(2, 3, device=device)]
    optimizer = make(params)
    failing = Failing(optimizer, monkeypatch, method)
    control = GradientControl(optimizer, scale=MOVING, clip=100.0)
    told = []
    for number in range(7):
        control.zero_grad()
        bad = NAN if number in (2, 3) else None
        control.backward(loss_giving(*pairs(params, number, bad)))
        if method == "ready":  # A step that is taken again has been made ready.
            control._bound = None
        if number in fail_at:
            before, held = control.state_dict(), contents(optimizer)
            failing.times = 2
            for _ in range(2):
                with pytest.raises(RuntimeError, match="out of memory"):
                    control.step()
                assert control.state_dict() == before
                assert_same(contents(optimizer), held)
            if after is not None:
                after()
        told.append(facts(control.step()))
    return told, control.state_dict(), contents(optimizer)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("fused", "step"),
        ("ours", "step"),
        ("ours", "ready"),
        ("ours", "launch"),
        ("our SGD", "launch"),
    ],
)
def test_a_step_that_failed_is_retried_as_if_nothing_had_happened(
    device, settling, monkeypatch, kind, method
):
    # By the time that ours takes its first step it has made its state, all zeros.
    fail_at = (0, 1, 3, 4) if method != "launch" else (1, 3, 4)
    whole = trained(device, monkeypatch, MAKERS[kind])
    assert_same(trained(device, monkeypatch, MAKERS[kind], fail_at, method=method), whole)


def test_a_failed_step_may_be_retried_with_the_policies_asked(device, settling, monkeypatch):
    def close():
        settling.allowed = False

    failed = trained(device, monkeypatch, MAKERS["fused"], (1,), after=close)
    settling.allowed = True
    assert_same(failed, trained(device, monkeypatch, MAKERS["fused"]))


def test_an_unfused_step_that_failed_is_not_unscaled_twice(device, settling, monkeypatch):
    """It is not called when skipped, so only finite steps can fail; its gradients are true then."""
    failed = trained(device, monkeypatch, MAKERS["unfused"], (0, 5))
    whole = trained(device, monkeypatch, MAKERS["unfused"])
    assert failed[1] == whole[1]
    for one, two in zip(failed[0], whole[0], strict=True):
        for name in ("step", "skipped", "scale", "culprits"):
            assert one[name] == two[name]
    torch.testing.assert_close(failed[2][0], whole[2][0], rtol=1e-6, atol=1e-7)


def test_the_streak_is_put_back_when_a_skipped_step_fails(device, settling, monkeypatch):
    p = parameter(3, device=device)
    optimizer = MAKERS["fused"]([p])
    failing = Failing(optimizer, monkeypatch)
    control = GradientControl(optimizer, give_up_after=3)
    step(control, (p, NAN))
    failing.times = 5
    control.zero_grad()
    control.backward(loss_giving((p, NAN)))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="out of memory"):
            control.step()
    assert control.state_dict()["gradilocks"]["streak"] == 1
    assert control.step().skipped
    assert control.state_dict()["gradilocks"]["streak"] == 2


def test_an_interrupt_is_treated_as_any_failure(device, settling):
    p = parameter(3, device=device)
    optimizer = MAKERS["fused"]([p])
    control = GradientControl(optimizer, scale=MOVING)
    step(control, (p, 1.0))
    before, held = control.state_dict(), contents(optimizer)
    control.zero_grad()
    control.backward(loss_giving((p, NAN)))

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        control.step()
    hook.remove()
    assert control.state_dict() == before
    assert_same(contents(optimizer), held)
    assert control.step().skipped


@pytest.mark.parametrize("on_device", [True, False], ids=["settled", "asked"])
@pytest.mark.parametrize("kind", MAKERS)
def test_of_two_optimizers_the_first_has_stepped_and_the_gradients_are_used_up(
    device, settling, monkeypatch, on_device, kind
):
    settling.allowed = on_device
    p, q = parameter(3, device=device), parameter(4, device=device)
    one, two = MAKERS[kind]([p]), MAKERS[kind]([q])
    failing = Failing(two, monkeypatch)
    control = GradientControl(one, two, scale=MOVING)
    step(control, (p, 1.0), (q, 1.0))
    before, first, second = control.state_dict(), contents(one), contents(two)
    failing.times = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        step(control, (p, 1.0), (q, 1.0))
    assert control.state_dict() == before
    assert_same(contents(two), second)
    assert not torch.equal(p, first[0][0])
    with pytest.raises(ScaleMisuse, match=r"without a backward\(\)"):
        control.step()
    assert not step(control, (p, 1.0), (q, 1.0)).skipped


def test_gradients_of_a_failed_step_are_not_kept_alive(device, settling, monkeypatch):
    p = parameter(3, device=device)
    optimizer = MAKERS["fused"]([p])
    failing = Failing(optimizer, monkeypatch)
    control = GradientControl(optimizer)
    failing.times = 1
    control.backward(loss_giving((p, 1.0)))
    with contextlib.suppress(RuntimeError):
        control.step()
    gradient = weakref.ref(p.grad)
    control.zero_grad()
    gc.collect()
    assert gradient() is None
