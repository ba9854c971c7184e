"""The same parameters and gradients for several optimizers, and comparisons."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from gradilocks import optim

SHAPES = [(), (0,), (1,), (2, 260), (512,)]
"""Odd sizes around a chunk of the interpreted kernels, an empty tensor and a scalar."""

KERNEL_CASES = [
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.0, "betas": (0.3, 0.4)}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
]
"""Optimizers that the kernels cover."""
FEW_CASES = [KERNEL_CASES[i] for i in (0, 4, 6)]
"""One for each rule of the kernels."""
TORCH_CASES = [
    ("AdamW", {"amsgrad": True}),
    ("Adam", {"maximize": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    ("SGD", {"lr": 0.05, "maximize": True}),
]
"""Optimizers that torch's own step serves."""


def ids(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [" ".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in cases]


def values(shapes: Any, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]


def parameters(
    shapes: Any = SHAPES, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values(shapes)]


def fill_gradients(params: Any, step: int, *, factor: float = 1.0) -> None:
    """Gives the parameters new gradients, the same for each list of parameters with these shapes."""
    for param, grad in zip(params, values([p.shape for p in params], seed=100 + step), strict=True):
        param.grad = (grad * factor).to(param.device, param.dtype)


def run(optimizer: Any, steps: int, *, first: int = 0) -> None:
    """Takes some steps with the gradients of `fill_gradients`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + steps):
        fill_gradients(params, step)
        optimizer.step()


def pair(
    name: str, options: dict[str, Any], device: str, dtype: torch.dtype = torch.float32, **torch_options: Any
) -> Any:
    """Our optimizer and torch's on equal parameters."""
    own, other = (parameters(dtype=dtype, device=device) for _ in range(2))
    return getattr(optim, name)(own, **options), getattr(torch.optim, name)(other, **options, **torch_options)


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def state_of(optimizer: Any) -> list[dict[str, Tensor]]:
    return [dict(optimizer.state.get(param, {})) for param in params_of(optimizer)]


def snapshot(optimizer: Any) -> Any:
    """A copy of all parameters and all state."""
    return copy.deepcopy(([param.detach() for param in params_of(optimizer)], state_of(optimizer)))


def have_same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(have_same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(have_same_bits, one, other))
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_close(one: Any, other: Any, **tolerance: float) -> None:
    """Compares the parameters of two optimizers."""
    torch.testing.assert_close(params_of(one), params_of(other), **tolerance)


def uses_kernels(optimizer: Any) -> bool:
    """True if the last step was a single pass of the kernels."""
    return optimizer._fused_step is not None
