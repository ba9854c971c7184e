"""Losses with given gradients, device paths, and comparison of optimizers bit for bit.

`loss_giving((p, g))` is a loss whose gradient with respect to `p` is exactly `g` times whatever the loss was multiplied
by, so that "an overflow in step 7" is one line of a test.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradilocks
from gradilocks import GradientControl, Outcome, kernels
from gradilocks.kernels import reference

INF, NAN = math.inf, math.nan

PATHS = [
    "torch",
    "C",
    # The interpreter computes with NumPy, which warns of arithmetic with Inf and NaN.
    pytest.param("Triton", marks=pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")),
    pytest.param("CUDA", marks=pytest.mark.gpu),
]
"""Plain torch, the C extension, the Triton kernels interpreted on the CPU, and compiled."""


def use_path(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects the kernels that serve the control; returns the device."""
    if name == "CUDA":
        return "cuda"
    if name == "torch":
        monkeypatch.setitem(kernels.BACKENDS, "cpu", reference)
    elif name == "C":
        reason = "the C extension is not compiled"
        cpu = pytest.importorskip("gradilocks.kernels.cpu", reason=reason, exc_type=ImportError)
        monkeypatch.setitem(kernels.BACKENDS, "cpu", cpu)
    else:
        if torch.cuda.is_available():
            pytest.skip("with a GPU, Triton compiles its kernels and cannot process CPU tensors")
        pytest.importorskip("triton", reason="Triton is not installed")
        from gradilocks.kernels import cuda

        monkeypatch.setitem(kernels.BACKENDS, "cpu", cuda)
    return "cpu"


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, value, *params):
        ctx.gradients = gradients
        return torch.full((), value, device=params[0].device)

    @staticmethod
    def backward(ctx, grad_output):
        return None, None, *(_times(gradient, grad_output) for gradient in ctx.gradients)


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """In float32 for half precision, then rounded: what a float16 backward pass would store."""
    if gradient.dtype in (torch.float16, torch.bfloat16):
        return (gradient.float() * factor).to(gradient.dtype)
    return gradient * factor.to(gradient.dtype)


def loss_giving(*pairs: tuple[Tensor, Any], value: float = 0.0) -> Tensor:
    """A 0-d loss of `value` that gives each parameter the gradient beside it."""
    gradients = [g.to(p) if isinstance(g, Tensor) else torch.full_like(p.detach(), g) for p, g in pairs]
    return _Given.apply(gradients, value, *(p for p, _ in pairs))


def parameter(*values: float, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Parameter:
    """A 1-d parameter with these elements."""
    return nn.Parameter(torch.tensor(values, dtype=dtype, device=device))


def take_step(control: GradientControl, *pairs: tuple[Tensor, Any], value: float = 0.0) -> Outcome:
    """One iteration of a training loop on given gradients."""
    control.zero_grad()
    control.backward(loss_giving(*pairs, value=value))
    return control.step()


def params_of(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def contents(optimizer: Any) -> tuple[list[Tensor], dict[int, Any]]:
    """A copy of everything that a step may change: parameters, and the state of each by position."""
    params = params_of(optimizer)
    position = {id(p): i for i, p in enumerate(params)}
    state = {position[id(p)]: copy.deepcopy(dict(entry)) for p, entry in optimizer.state.items()}
    return [p.detach().clone() for p in params], state


def gradients(optimizer: Any) -> list[Tensor | None]:
    """A copy of the gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in params_of(optimizer)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors hold the same bits: NaN equals NaN, 0.0 does not equal -0.0."""
    if one.layout is not torch.strided:
        one, other = one.coalesce(), other.coalesce()
        return torch.equal(one.indices(), other.indices()) and same_bits(one.values(), other.values())
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def assert_same(one: Any, other: Any, where: str = "contents") -> None:
    """Compares nested lists, dicts, tensors and numbers bit for bit."""
    assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, Tensor):
        assert same_bits(one, other), f"{where}: {one} and {other}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"{where}: keys {list(one)} and {list(other)}"
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert one == other or (one != one and other != other), f"{where}: {one} and {other}"


def small_model(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def batches(count: int, overflows: Iterable[int] = (), seed: int = 5):
    """Inputs, targets, and a factor of the loss that is so large in `overflows` that the scaled loss is Inf."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        x, y = torch.randn(12, 7, generator=generator), torch.randn(12, 3, generator=generator)
        yield x, y, 1e36 if step in overflows else 1.0


def loss_of(model: nn.Module, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    return nn.functional.mse_loss(model(x), y) * factor


OPTIMIZERS = {
    "Adam": lambda ps: optim.Adam(ps, lr=0.01),
    "Adam fused": lambda ps: optim.Adam(ps, lr=0.01, fused=True),
    "Adam amsgrad fused": lambda ps: optim.Adam(ps, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.01),
    "AdamW fused": lambda ps: optim.AdamW(ps, lr=0.01, fused=True),
    "AdamW fused maximize": lambda ps: optim.AdamW(ps, lr=0.01, fused=True, maximize=True),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1),
    "SGD fused": lambda ps: optim.SGD(ps, lr=0.1, fused=True),
    "SGD momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
    "SGD momentum fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "SGD nesterov fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD dampening": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD dampening fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1, fused=True),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1),
    "Adagrad fused": lambda ps: optim.Adagrad(ps, lr=0.1, lr_decay=0.01, fused=True),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.9),
    "Adadelta": lambda ps: optim.Adadelta(ps),
    "Adafactor": lambda ps: optim.Adafactor(ps),
    "Adamax": lambda ps: optim.Adamax(ps, lr=0.01),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.1),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: optim.RAdam(ps, lr=0.01),
    "Rprop": lambda ps: optim.Rprop(ps, lr=0.01),
}
"""torch's optimizers."""

OWN_OPTIMIZERS = {
    "own AdamW": lambda ps: gradilocks.optim.AdamW(ps, lr=0.01),
    "own Adam": lambda ps: gradilocks.optim.Adam(ps, lr=0.01, weight_decay=0.1),
    "own SGD": lambda ps: gradilocks.optim.SGD(ps, lr=0.1, momentum=0.9),
    "own Adam amsgrad": lambda ps: gradilocks.optim.Adam(ps, lr=0.01, amsgrad=True),
}
"""gradilocks.optim; the last one runs torch's step."""

MAKERS = {name: (OPTIMIZERS | OWN_OPTIMIZERS)[name] for name in ("SGD momentum", "AdamW fused", "own AdamW")}
"""One for each way to step: gradients multiplied in place, a fused step of torch, a pass of our kernels."""


@contextlib.contextmanager
def nan_in_new_memory():
    """Fills uninitialized memory with NaN, so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
