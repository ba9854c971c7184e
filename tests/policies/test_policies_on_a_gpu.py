"""Every policy on a GPU: the numbers of the CPU, and no wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    GradientControl,
    GradScaler,
    HeadroomScale,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
    optim,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

POLICIES = {
    "ClipPerTensor": ClipPerTensor(0.05),
    "ClipPerGroup": ClipPerGroup({"0.*": 0.05, "2.weight": None}, otherwise=0.1),
    "AdaptiveClip": AdaptiveClip(0.01, exclude=("2.*",)),
    "QuantileClip": QuantileClip(0.5, window=4),
    "ZScoreClip": ZScoreClip(threshold=0.5, warmup=2),
    "AdaGC": AdaGC(warmup=2, warmup_norm=0.1),
    "SkipSpikes": SkipSpikes(sigmas=1.0, at_least=2, window=4),
    "chain": chain(SkipSpikes(at_least=2, window=4), ClipPerTensor(0.1), ClipByNorm(0.1)),
    "chain to value": chain(ZScoreClip(warmup=2), ClipByValue(0.01)),
}
OPTIMIZERS = {
    "ours": lambda params: optim.AdamW(params, lr=1e-2),
    "torch fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


def trained(device, policy, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double().to(device)
    control = GradientControl(make(model.parameters()), model=model, clip=policy)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 16, generator=generator).double().to(device) for _ in range(10)]
    batches[5][0, 0] = float("nan")
    if device == "cuda":
        torch.cuda.synchronize()
    outcomes = []
    try:
        for number, inputs in enumerate(batches):
            if device == "cuda" and number > 2:
                torch.cuda.set_sync_debug_mode("error")
            control.backward(model(inputs).square().mean() * (1.0 + number))
            outcomes.append(control.step())
            control.zero_grad()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    told = [(o.skipped, o.rejected, o.clipped) for o in outcomes]
    return [p.detach().cpu() for p in model.parameters()], told, control.state_dict()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_gpu_goes_as_the_cpu_does_and_never_waits(name, make):
    params, told, state = trained("cuda", POLICIES[name], OPTIMIZERS[make])
    expected, told_there, state_there = trained("cpu", POLICIES[name], OPTIMIZERS["torch fused"])
    assert told == told_there
    assert any(skipped or clipped for skipped, _, clipped in told)
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert state["gradilocks"]["steps"] == state_there["gradilocks"]["steps"]


SCALES = {
    "torch": DynamicScale(init_scale=64.0, growth_interval=3),
    "megatron": DynamicScale.megatron(init_scale=1024.0, growth_interval=3),
    "deepspeed": DynamicScale.deepspeed(init_scale=1024.0, growth_interval=3),
    "fairseq": DynamicScale.fairseq(growth_interval=3, tolerance=0.3),
    "headroom": HeadroomScale(growth_interval=4),
}


def scaled_by_a_control(device, policy, dtype=torch.float32):
    """Scales after each of twelve steps, two of which overflow in a gradient."""
    param = nn.Parameter(torch.ones(300, device=device, dtype=dtype))
    idle = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
    control = GradientControl(torch.optim.AdamW([idle, param], lr=0.0, fused=True), scale=policy)
    factors = [1.0, 1.0, float("inf"), 1.0, 1.0, float("inf")] + [1.0] * 6
    factors = [torch.tensor(factor, device=device) for factor in factors]
    scales = []
    try:
        for number, factor in enumerate(factors):
            if device == "cuda" and number > 1:
                torch.cuda.set_sync_debug_mode("error")
            hidden = (param - param.detach()).float() * factor  # 0, and its gradient the factor.
            loss = torch.where(torch.isnan(hidden), 0.0, hidden).sum()
            if number == 8:
                loss = loss + idle.float().sum()
            control.backward(loss)
            control.step()
            control.zero_grad()
            scales.append(control._engine.state.scale.clone())
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return [float(scale) for scale in scales]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCALES)
def test_a_scale_moves_on_a_gpu_as_on_the_cpu_and_never_waits(name, dtype):
    found = scaled_by_a_control("cuda", SCALES[name], dtype)
    assert found == scaled_by_a_control("cpu", SCALES[name], dtype)
    assert len(set(found)) > 1


def scaled_by_a_scaler(device, scale, clip):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = GradScaler(device, policy=scale, clip=clip, model=model)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 16, generator=generator).double().to(device) for _ in range(10)]
    batches[5][0, 0] = float("nan")
    kept = []
    try:
        for number, inputs in enumerate(batches):
            if device == "cuda" and number > 2:
                torch.cuda.set_sync_debug_mode("error")
            scaler.scale(model(inputs).square().mean() * (1.0 + number)).backward()
            scaler.step(optimizer)
            scaler.update()
            kept.append((scaler.outcome, scaler._scale.clone()))
            optimizer.zero_grad()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    told = [(outcome.skipped, outcome.rejected, float(scale)) for outcome, scale in kept]
    return [p.detach().cpu() for p in model.parameters()], told


@pytest.mark.parametrize("clip", POLICIES)
@pytest.mark.parametrize("scale", ["deepspeed", "headroom"])
def test_a_scaler_with_policies_goes_as_on_the_cpu_and_never_waits(scale, clip):
    params, told = scaled_by_a_scaler("cuda", SCALES[scale], POLICIES[clip])
    expected, told_there = scaled_by_a_scaler("cpu", SCALES[scale], POLICIES[clip])
    assert told == told_there
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def missing_now_and_then(device, policy):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n, device="cpu").double().to(device)) for n in (5, 7, 9)]
    control = GradientControl(torch.optim.SGD(params, lr=0.01, fused=True), scale=None, clip=policy)
    try:
        for number in range(9):
            if device == "cuda" and number > 3:
                torch.cuda.set_sync_debug_mode("error")
            used = [param for k, param in enumerate(params) if k != number % 3]
            control.backward(sum((param * param).sum() for param in used) * (1.0 + number))
            control.step()
            control.zero_grad()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return [param.detach().cpu() for param in params]


@pytest.mark.parametrize(
    "policy", [AdaGC(warmup=2), ClipPerTensor(0.5), ClipPerGroup({0: 0.5}), AdaptiveClip(0.01)]
)
def test_gradients_that_come_and_go_do_not_make_it_wait(policy):
    found, expected = missing_now_and_then("cuda", policy), missing_now_and_then("cpu", policy)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
