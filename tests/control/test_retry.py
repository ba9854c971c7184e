"""A step that is interrupted before, or fails after, the gradients were made true."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, kernels
from gradilocks.step import update


class Interrupted(Exception):
    pass


def prepared(make, **settings):
    param = nn.Parameter(torch.zeros(3))
    control = GradientControl(make([param]), scale=65536.0, **settings)
    control.backward(param.sum())
    return param, control


def plain(params):
    return torch.optim.SGD(params, lr=1.0)


def interrupt(monkeypatch, owner, name):
    def raising(*args, **kwargs):
        raise Interrupted

    monkeypatch.setattr(owner, name, raising)


@pytest.mark.parametrize("where", ["asking", "multiplying", "stepping"])
def test_a_retry_divides_by_the_scale_once(monkeypatch, where):
    param, control = prepared(plain)
    with monkeypatch.context() as patch:
        if where == "asking":
            interrupt(patch, torch.Tensor, "item")
        elif where == "multiplying":
            interrupt(patch, kernels.BACKENDS["cpu"], "multiply_")
        else:
            interrupt(patch, control._optimizers[0], "step")
        with pytest.raises(Interrupted):
            control.step()
    outcome = control.step()
    assert outcome.norm == pytest.approx(3.0**0.5)
    assert param.tolist() == [-1.0] * 3
    assert outcome.step == 1


def test_a_fused_optimizer_whose_gradients_had_to_be_multiplied_is_retried_rightly(monkeypatch):
    """A norm so large that 1 / multiplier is more than float32 holds: they are clipped in place."""
    param, control = prepared(lambda p: torch.optim.SGD(p, lr=1.0, fused=True), clip=1e-30)
    param.grad.fill_(1e38)
    assert update.takes_decision(control._optimizers[0])
    with monkeypatch.context() as patch:
        interrupt(patch, control._optimizers[0], "step")
        with pytest.raises(Interrupted):
            control.step()
    control.step()
    assert param.norm().item() == pytest.approx(1e-30, rel=1e-3)
