"""The device settles by known policies' rules where kernels serve; any other policy is asked."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gradilocks import ClipByNorm, ClipByValue, DynamicScale, GradientControl, StaticScale, kernels
from gradilocks.kernels import reference
from gradilocks.values import ClipLimit
from tests.engine.backends import (
    INF,
    Settling,
    gradient_for,
    parameter,
    serve,
    step,
)

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Tripling(DynamicScale):
    """A subclass may do anything."""

    def advance(self, state, skip):
        state.scale.mul_(torch.where(skip > 0, 1.0, 3.0))


class Halving:
    """A clip policy of somebody's own."""

    order = 2.0
    needs_largest = False

    def limit(self, measurement, scale):
        norm = measurement.norm
        half = torch.full_like(norm, 0.5)
        return ClipLimit(half, half, torch.ones_like(measurement.nonfinite))


@dataclasses.dataclass(frozen=True)
class Loose(ClipByNorm):
    """Says it clips by norm and does not."""

    def limit(self, measurement, scale):
        return ClipByNorm(math.inf).limit(measurement, scale)


UNKNOWN = {
    "a scale of a subclass": {"scale": Tripling(init_scale=4.0)},
    "a clip of one's own": {"scale": 8.0, "clip": Halving()},
    "a clip of a subclass": {"scale": 8.0, "clip": Loose(0.1)},
    "a clip by value": {"scale": 8.0, "clip": ClipByValue(0.25)},
    "the norm of order 3": {"scale": 8.0, "clip": ClipByNorm(1.0, order=3)},
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("options", UNKNOWN.values(), ids=UNKNOWN)
def test_other_policies_are_asked_and_step_as_without_kernels(
    device, settling, monkeypatch, options, fused
):
    def run():
        params = [parameter(7, device=device), parameter(2, 3, device=device)]
        optimizer = torch.optim.SGD(params, lr=0.1, fused=fused)
        control = GradientControl(optimizer, **options)
        told = []
        for number, bad in enumerate([None, INF, None]):
            outcome = step(
                control,
                (params[0], gradient_for(params[0], number, bad)),
                (params[1], gradient_for(params[1], 10 + number)),
            )
            told.append((outcome.skipped, outcome.clipped, outcome.limit, outcome.scale))
        return params, told, control.scale

    served = run()
    monkeypatch.setitem(kernels.BACKENDS, device, reference)
    plain = run()
    assert settling.count == 0
    assert served[1:] == plain[1:]
    torch.testing.assert_close(served[0], plain[0], rtol=1e-6, atol=1e-7)


KNOWN = [
    {},
    {"scale": None},
    {"scale": 8.0, "clip": 1.0},
    {"scale": StaticScale(2.0), "clip": ClipByNorm(1.0, order=1)},
    {"clip": ClipByNorm(1.0, order=math.inf)},
]


@pytest.mark.parametrize("options", KNOWN, ids=str)
def test_the_device_settles_by_the_rules_of_known_policies(device, settling, options):
    p = parameter(3, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), **options)
    step(control, (p, 1.0))
    assert settling.count == 1


@pytest.mark.gpu
def test_without_a_scale_the_device_settles_after_a_backward_of_ones_own(monkeypatch):
    settling = Settling(monkeypatch)
    p = parameter(3, device=serve("cuda", monkeypatch))
    control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=True), scale=None)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        control.step()
    assert settling.count == 2


def test_a_device_that_the_kernels_do_not_serve_settles_nothing(device, settling, monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, device, reference)
    p = parameter(3, device=device)
    step(GradientControl(torch.optim.SGD([p], lr=0.1)), (p, 1.0))
    assert settling.count == 0


@pytest.mark.parametrize("attribute", ["gradients", "hold", "take"])
def test_an_optimizer_may_have_attributes_of_any_name(device, settling, attribute):
    p = parameter(3, device=device)
    optimizer = torch.optim.SGD([p], lr=1.0)
    setattr(optimizer, attribute, ["mine"])
    before = p.detach().clone()
    step(GradientControl(optimizer), (p, 1.0))
    assert torch.equal(p, before - 1.0)
    assert settling.count == 1
