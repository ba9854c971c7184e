"""The whole step on a GPU: the numbers of torch's scaler, and no wait for the device."""

import copy
import math

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl

pytestmark = pytest.mark.gpu


def trained(drive, *, steps=30, bad=(0, 7)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    inputs = torch.randn(32, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = drive(model, optimizer)
    for number in range(steps):
        step(model(inputs).square().mean() * (math.inf if number in bad else 1.0))
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def with_scaler(scaler_class, clip):
    def drive(model, optimizer):
        scaler = scaler_class()

        def step(loss):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    return drive


def with_control(outcomes):
    def drive(model, optimizer):
        control = GradientControl(optimizer, model=model, clip=0.5)

        def step(loss):
            # The first steps compile kernels and make tables; then nothing may wait.
            torch.cuda.set_sync_debug_mode("error" if len(outcomes) > 3 else "default")
            try:
                control.backward(loss)
                outcomes.append(control.step())
                control.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return step

    return drive


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_control_trains_as_torchs_scaler_does_and_never_waits():
    outcomes = []
    ours = trained(with_control(outcomes))
    theirs = trained(with_scaler(torch.amp.GradScaler, torch.nn.utils.clip_grad_norm_))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert [n for n, outcome in enumerate(outcomes) if outcome.skipped] == [0, 7]
    assert outcomes[7].culprits == ("2.bias", "2.weight", "0.bias", "0.weight")
    assert outcomes[-1].scale == 2.0**14


def test_the_drop_ins_train_as_torchs_do():
    ours = trained(with_scaler(gradilocks.GradScaler, gradilocks.clip_grad_norm_))
    theirs = trained(with_scaler(torch.amp.GradScaler, torch.nn.utils.clip_grad_norm_))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_bfloat16_gradients_are_unscaled_which_torch_refuses():
    model = nn.Linear(64, 8).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = gradilocks.GradScaler()
    scaler.scale(model(torch.ones(4, 64, device="cuda").bfloat16()).float().sum()).backward()
    scaler.unscale_(optimizer)
    assert copy.deepcopy(model.bias.grad).tolist() == [4.0] * 8
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.outcome.skipped


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_control_that_was_resumed_decides_on_the_device():
    param = nn.Parameter(torch.ones(1000, device="cuda"))
    control = GradientControl(torch.optim.AdamW([param], lr=0.1, fused=True))
    control.load_state_dict({**control.state_dict(), "scale": 1024.0})
    for number in range(20):
        torch.cuda._sleep(20_000_000)
        control.backward((param * (math.inf if number % 2 else 1.0)).sum())
        outcome = control.step()
        control.zero_grad()
        assert outcome.skipped == bool(number % 2)
    assert torch.isfinite(param).all()
