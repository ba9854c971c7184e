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


def two_hundred_tensors():
    generator = torch.Generator(device="cuda").manual_seed(3)
    sizes = [1 + 977 * number % 50_000 for number in range(200)]
    return [torch.randn(size, device="cuda", generator=generator) for size in sizes]


@pytest.mark.parametrize("optimizer_class", [gradilocks.optim.AdamW, torch.optim.AdamW])
def test_the_same_gradients_give_the_same_bits_on_every_run(optimizer_class):
    def run():
        params = [nn.Parameter(tensor) for tensor in two_hundred_tensors()]
        control = GradientControl(optimizer_class(params, lr=1e-2, fused=True), clip=1.0)
        norms = []
        for number in range(5):
            control.backward(sum((param * (number + 1)).square().sum() for param in params))
            norms.append(control.step().norm)
            control.zero_grad()
        return norms, params

    norms, params = run()
    for _ in range(3):
        again, others = run()
        assert again == norms
        assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_a_step_needs_a_megabyte_and_64_bytes_a_tensor_whatever_the_model():
    params = [nn.Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(64)]
    params += [nn.Parameter(torch.zeros(10, device="cuda")) for _ in range(1000)]
    control = GradientControl(gradilocks.optim.AdamW(params, lr=1e-3), clip=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    loss = torch.ones((), device="cuda", requires_grad=True)
    for _ in range(3):
        control.scale_loss(loss)
        control.step()
        torch._foreach_mul_([param.grad for param in params], 2.0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    control.scale_loss(loss)
    outcome = control.step()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= (1 << 20) + 64 * len(params)
    assert not outcome.skipped


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("optimizer_class", [gradilocks.optim.AdamW, gradilocks.optim.SGD])
def test_a_gradilocks_optimizer_never_waits_either(optimizer_class):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    inputs = torch.randn(32, 64, device="cuda")
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    control = GradientControl(optimizer, model=model, clip=0.5, give_up_after=10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    outcomes = []
    for number in range(60):
        factor = math.inf if number in (0, 7) else 1.0
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
        try:
            control.backward(model(inputs).square().mean() * factor)
            outcomes.append(control.step())
            control.zero_grad()
            scheduler.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [n for n, outcome in enumerate(outcomes) if outcome.skipped] == [0, 7]
