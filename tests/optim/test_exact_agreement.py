"""Every setting gives torch's results: as close to float64's as torch's fused kernels come."""

from __future__ import annotations

import pytest
import torch
from twins import (
    close,
    error,
    exactly,
    ours,
    parameters,
    run,
    sizes,
    skip_what_the_interpreter_rounds,
    torchs,
)

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ADAM = [
    {},
    {"weight_decay": 0.0},
    {"amsgrad": True},
    {"maximize": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.3},
    {"eps": 0.1},
    {"eps": 0.0},
    {"betas": (0.0, 0.0), "eps": 1e-3},
    {"betas": (0.0, 0.99)},
    {"betas": (0.5, 0.0), "eps": 1e-3},
    {"betas": (0.99, 0.9999)},
    {"lr": 0.0},
]
SGD = [
    {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    {"momentum": 0.0, "dampening": 0.0},
    {},
    {"dampening": 0.0},
    {"dampening": 0.9},
    {"dampening": 0.0, "nesterov": True},
    {"dampening": 0.0, "nesterov": True, "maximize": True, "weight_decay": 0.0},
    {"maximize": True},
    {"momentum": 0.0, "dampening": 0.5, "maximize": True},
    {"momentum": 0.99},
]
CASES = [
    *(("AdamW", settings) for settings in ADAM),
    *(("Adam", settings) for settings in [*ADAM, {"decoupled_weight_decay": True}]),
    *(("SGD", settings) for settings in SGD),
]
STEPS = 4


def names(case):
    return " ".join(f"{key}={value}" for key, value in case.items()) or "plain"


def check(kind, device, dtype, **settings):
    shapes = sizes()
    mine, theirs = (parameters(shapes, dtype=dtype, device=device) for _ in range(2))
    run(ours(kind, mine, **settings), STEPS)
    run(torchs(kind, theirs, **settings), STEPS)
    exact = exactly(kind, shapes, dtype, STEPS, **settings)
    tiny = torch.finfo(dtype).eps * 1e-3
    assert error(mine, exact) <= 1.05 * error(theirs, exact) + tiny
    moved = max((p - q).abs().max().item() for p, q in zip(mine, parameters(shapes), strict=True)
                if p.numel()) if device == "cpu" else 1.0
    assert moved > 0 or settings.get("lr") == 0.0
    rounding = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-5}
    tolerance = rounding.get(dtype, 1e-12)
    close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda case: case if isinstance(case, str) else names(case))
def test_every_setting_gives_torchs_results(kind, settings, device):
    check(kind, device, torch.float32, **settings)
