"""One call of torch for each operation that stores in the format, with float32 leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

import gradilocks
from gradilocks.lab.emulate.rounding import Storage

BITS = {torch.float16: 10, torch.bfloat16: 7}
SMALLEST = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}
Call = tuple[Callable[..., Any], list[torch.Tensor]]


def calls(device: str = "cpu") -> dict[str, Call]:
    """Name to function and tensors; every one of them float32, small, from a fixed seed."""
    source = torch.Generator().manual_seed(0)

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(device)

    return {
        "linear": (F.linear, [r(5, 7, 32), r(16, 32), r(16)]),
        "linear without bias": (F.linear, [r(5, 32), r(16, 32)]),
        "matmul": (torch.matmul, [r(3, 8, 32), r(3, 32, 5)]),
        "operator": (lambda a, b: a @ b, [r(8, 32), r(32, 5)]),
        "Tensor.matmul": (lambda a, b: a.matmul(b), [r(8, 32), r(32, 5)]),
        "mm": (torch.mm, [r(8, 32), r(32, 5)]),
        "Tensor.mm": (lambda a, b: a.mm(b), [r(8, 32), r(32, 5)]),
        "bmm": (torch.bmm, [r(3, 8, 32), r(3, 32, 5)]),
        "mv": (torch.mv, [r(8, 32), r(32)]),
        "addmm": (torch.addmm, [r(8, 5), r(8, 32), r(32, 5)]),
        "addmm, beta and alpha": (
            lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
            [r(8, 5), r(8, 32), r(32, 5)],
        ),
        "addmv": (torch.addmv, [r(8), r(8, 32), r(32)]),
        "addbmm": (torch.addbmm, [r(8, 5), r(3, 8, 32), r(3, 32, 5)]),
        "baddbmm": (torch.baddbmm, [r(3, 8, 5), r(3, 8, 32), r(3, 32, 5)]),
        "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [r(3, 8, 32), r(3, 32, 5)]),
        "conv1d": (F.conv1d, [r(2, 4, 16), r(6, 4, 3)]),
        "conv2d": (F.conv2d, [r(2, 4, 8, 8), r(6, 4, 3, 3)]),
        "conv2d, groups and stride": (
            lambda a, b: F.conv2d(a, b, stride=2, padding=1, groups=2),
            [r(2, 4, 8, 8), r(6, 2, 3, 3)],
        ),
        "conv3d": (F.conv3d, [r(2, 3, 5, 5, 5), r(4, 3, 3, 3, 3)]),
        "conv_transpose1d": (F.conv_transpose1d, [r(2, 4, 9), r(4, 6, 3)]),
        "conv_transpose2d": (F.conv_transpose2d, [r(2, 4, 6, 6), r(4, 6, 3, 3)]),
        "conv_transpose3d": (F.conv_transpose3d, [r(2, 3, 4, 4, 4), r(3, 4, 2, 2, 2)]),
    }


def biased_convolutions(device: str = "cpu") -> dict[str, Call]:
    """The convolutions of `calls`, with a bias."""
    source = torch.Generator().manual_seed(3)
    found = {}
    for name, (function, tensors) in calls(device).items():
        if name.startswith("conv") and "groups" not in name:
            inputs, weight = tensors
            channels = weight.shape[1 if "transpose" in name else 0]
            bias = torch.randn(channels, generator=source).to(device)
            found[name] = (function, [inputs, weight, bias])
    return found


@contextmanager
def taken_apart() -> Iterator[None]:
    """Emulation that rounds nothing: what is left is how it takes operations apart."""
    emulation = gradilocks.emulate("fp16")
    emulation._storage = Storage(None, None)
    with emulation:
        yield


def forward_and_backward(
    call: Call, upstream: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result, and the gradients of the tensors for a fixed gradient of the result."""
    function, tensors = call
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    if upstream is None:
        upstream = gradient_for(result)
    gradients = torch.autograd.grad(result, leaves, upstream.to(result.dtype))
    return result.detach(), list(gradients)


def gradient_for(result: torch.Tensor) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randn(result.shape, generator=source).to(result.device)


def places(found, exact, dtype, terms):
    """How many units in the last place two results are apart, at most.

    `terms` are the magnitudes that were added up. In float32 a sum is off by some 2^-24 of them
    each; where they nearly cancel that is more than a unit in the last place of what is left.
    """
    found, exact = found.double(), exact.double()
    size = torch.maximum(found.abs(), exact.abs()).clamp(min=SMALLEST[dtype])
    unit = torch.exp2(size.log2().floor() - BITS[dtype])
    apart = (found - exact).abs() - terms.double() * 2.0**-21
    return (apart / unit).max().item()


def exactly(call, dtype):
    """Result and gradients of the rounded inputs in float64, and the same of their magnitudes."""
    function, tensors = call
    stored = [tensor.to(dtype).double() for tensor in tensors]
    with torch.no_grad():
        upstream = gradient_for(function(*stored)).to(dtype).double()
    exact = forward_and_backward((function, stored), upstream)
    return exact, forward_and_backward((function, [s.abs() for s in stored]), upstream.abs())
