"""Every clip policy under a GradientControl does what the formulas do in float64, step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradilocks
from control.given_gradients import PATHS, take_step, use_path
from gradilocks import AdaGC, ClipByNorm, GradientControl, SkipSpikes, StaticScale, chain
from policies.drive import Driver
from policies.test_clip_laws import POLICIES

SHAPES = [(3, 4), (5,), (2, 3, 2), ()]
SIZES = [1.0, 0.8, 1.3, math.nan, 0.9, 40.0, math.inf, 1.1, 1e-6, 0.0, 1.2]
"""Magnitude of the gradients at each step; one element is NaN or Inf where the number is."""


def gradients(step: int) -> list[torch.Tensor]:
    """The unscaled gradients of one step, in float32."""
    generator = torch.Generator().manual_seed(step)
    size = SIZES[step]
    grads = [torch.randn(shape, generator=generator) * (size if math.isfinite(size) else 1.0) for shape in SHAPES]
    if not math.isfinite(size):
        grads[1][2] = size
    if step == 4:
        grads[2].zero_()  # A layer without a gradient in this step.
    return grads


class Recording(torch.optim.Optimizer):
    """An optimizer that keeps the gradients it is given and changes nothing."""

    def __init__(self, params):
        super().__init__(params, {})
        self.grads = None

    def step(self, closure=None):
        self.grads = [
            torch.zeros_like(param) if param.grad is None else param.grad.clone()
            for group in self.param_groups
            for param in group["params"]
        ]


def applied(name, params):
    """An optimizer, and a function that returns the gradients it applied in the latest step; None if none."""
    if name == "multiplied in place":
        optimizer = Recording(params)
        return optimizer, lambda: optimizer.grads
    maker = gradilocks.optim.SGD if name == "gradilocks.optim" else torch.optim.SGD
    optimizer = maker(params, lr=1.0, fused=True) if name == "torch fused" else maker(params, lr=1.0)

    def read():
        # Parameters start every step at zero and the learning rate is 1.
        return [-param.detach() for param in params]

    return optimizer, read


def check(name, optimizer_name, device):
    """Trains under a control; compares with the formulas over the same weights."""
    torch.manual_seed(1)
    # The optimizer that changes nothing has weights of any size, on which policies per row depend.
    is_kept = optimizer_name == "multiplied in place"
    weights = [torch.randn(shape) * is_kept for shape in SHAPES]
    params = [nn.Parameter(weight.to(device)) for weight in weights]
    optimizer, read = applied(optimizer_name, params)
    control = GradientControl(
        optimizer, model={"layer": nn.ParameterList(params)}, scale=StaticScale(1024.0), clip=POLICIES[name]
    )
    driver = Driver(POLICIES[name], weights=[weight.double() for weight in weights])
    for step in range(len(SIZES)):
        grads = gradients(step)
        with torch.no_grad():
            for param in () if is_kept else params:
                param.zero_()
        pairs = [(p, g) for i, (p, g) in enumerate(zip(params, grads, strict=True)) if (step, i) != (4, 2)]
        outcome = take_step(control, *pairs)
        expected = driver.step(*grads)
        assert (outcome.skipped, outcome.rejected) == (expected.skipped, expected.rejected), step
        if not expected.skipped:
            if expected.norm:  # A limit of zero clips gradients of zero, too.
                assert outcome.clipped == expected.clipped, step
            for found, wanted in zip(read(), expected.gradients, strict=True):
                torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-6, atol=0.0)
        if math.isfinite(expected.norm):
            assert outcome.norm == pytest.approx(expected.norm, rel=1e-6)
            assert outcome.limit == pytest.approx(expected.bound, rel=1e-6)


@pytest.mark.parametrize("optimizer_name", ["multiplied in place", "torch fused", "gradilocks.optim"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_control_clips_as_the_formulas_do_in_float64(name, optimizer_name):
    check(name, optimizer_name, "cpu")


ONE_OF_EACH = ("ClipByNorm 1", "ClipByNorm p=3", "ClipByValue 0.5", "ClipPerGroup", "AdaptiveClip", "AdaGC")
"""One policy for each kind of norms."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("optimizer_name", ["multiplied in place", "gradilocks.optim"])
@pytest.mark.parametrize("name", [*ONE_OF_EACH, "chain of parts", "own policy without a base class"])
def test_a_control_clips_as_the_formulas_do_on_every_device_path(name, optimizer_name, path, monkeypatch):
    check(name, optimizer_name, use_path(path, monkeypatch))


def test_a_rejected_step_changes_neither_parameters_nor_scale_nor_the_memory_of_other_policies():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    clip = chain(SkipSpikes(max_norm=10.0), AdaGC(warmup=1), ClipByNorm(1.0))
    control = GradientControl(optimizer, scale=256.0, clip=clip)

    def step(size):
        control.backward((weight * size).sum())
        outcome = control.step()
        control.zero_grad()
        return outcome

    step(1.0)
    before, state = weight.detach().clone(), control.state_dict()
    momentum = optimizer.state[weight]["momentum_buffer"].clone()
    outcome = step(100.0)
    assert outcome.rejected
    assert outcome.skipped
    assert outcome.limit == pytest.approx(10.0)
    assert outcome.culprits == ()
    assert torch.equal(weight, before)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)
    after = control.state_dict()
    assert after["scale"] == state["scale"]
    assert str(after["gradilocks"]["clip"]) == str(state["gradilocks"]["clip"])
