"""The short way with a wrapped optimizer: multiplied in place, and stepped if the host says so."""

from __future__ import annotations

import pytest
import torch

from gradilocks import GradientControl
from tests.control.gradient_scripts import assert_same
from tests.control.optimizer_wrappers import MAKERS, WRAPPERS, state_of
from tests.control.short_way import DEVICES, NAN, Ways, gradient_for, parameter, serve, step

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KINDS = ["forwards step too", "imitates", "derived in disguise"]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    return serve(request.param, monkeypatch)


def trained(make, wrap, ways, device, **settings):
    params = [parameter(5, device=device), parameter(2, 3, device=device)]
    inner = make(params)
    control = GradientControl(wrap(inner), **settings)
    for number, bad in enumerate([NAN, None, NAN, None]):
        held = [p.detach().clone() for p in params], state_of(inner)
        pairs = [
            (param, gradient_for(param, 10 * number + place, bad))
            for place, param in enumerate(params)
        ]
        assert step(control, *pairs).skipped == (bad is not None)
        if bad is not None:
            assert_same([p.detach().clone() for p in params], held[0])
            if number:
                assert_same(state_of(inner), held[1])
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["SGD momentum fused", "AdamW fused", "our AdamW", "our SGD"])
def test_a_wrapped_optimizer_goes_the_short_way_as_the_bare_one(
    device, monkeypatch, name, kind, clip
):
    ways = Ways(monkeypatch)
    expected = trained(MAKERS[name], lambda inner: inner, ways, device, clip=clip)
    assert ways.short == 4
    got = trained(MAKERS[name], WRAPPERS[kind], ways, device, clip=clip)
    assert ways.short == 8
    # The kernels of ours unscale in float32 as they step, in place it is rounded once before.
    torch.testing.assert_close(got, expected, rtol=5e-6, atol=1e-6)
