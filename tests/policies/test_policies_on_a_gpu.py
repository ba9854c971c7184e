"""Every clip policy on a GPU: the numbers of the CPU, and no wait."""

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
    GradientControl,
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
