"""Parameters on the host, or some of them, beside a scale on a GPU: a skipped step is skipped.

torch's fused optimizers send the flag to the host without a wait, and read whatever was there.
"""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks import GradientControl, GradScaler

pytestmark = pytest.mark.gpu
PLACES = {"on the host": ("cpu", "cpu"), "on both": ("cuda", "cpu")}


def by_scaler(params, optimizer):
    scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=10**6)

    def step(bad):
        scaler.scale(torch.ones((), device="cuda"))
        give(params, scaler.get_scale(), bad)
        scaler.step(optimizer)
        scaler.update(2.0**10)

    return step


def by_control(params, optimizer):
    control = GradientControl(optimizer, scale=2.0**10, clip=1e6)

    def step(bad):
        control.scale_loss(torch.ones((), device="cuda", requires_grad=True))
        give(params, 2.0**10, bad)
        assert control.step().skipped == bad
        control.zero_grad()

    return step


def give(params, scale, bad):
    for param in params:
        param.grad = torch.full_like(param, math.inf if bad else scale)


@pytest.mark.parametrize("way", [by_scaler, by_control])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_a_step_that_is_to_be_skipped_is(way, places, make):
    params = [torch.nn.Parameter(torch.ones(300, device=each)) for each in PLACES[places]]
    step = way(params, make(params, lr=0.01, fused=True))
    for number in range(60):
        before = [param.detach().clone() for param in params]
        torch.cuda._sleep(200_000)  # The flag is not there at once.
        step(number % 3 == 0)
        for param, old in zip(params, before, strict=True):
            assert torch.equal(param, old) == (number % 3 == 0)
            assert torch.isfinite(param).all()
