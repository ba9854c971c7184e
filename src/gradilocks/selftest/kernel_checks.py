"""The kernels on this rank's device, every operation and dtype, beside plain arithmetic.

Plain torch is compared with float64, and Triton's and the C++ kernels, where they run, with plain
torch.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.kernels import reference
from gradilocks.selftest.check_result import Found
from gradilocks.selftest.world import World

__all__ = ["KERNEL_CHECKS"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ORDERS = (2.0, 1.0, math.inf)
SIZES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 33), (127,), (1025,))
LARGE = (70_001,)
"""More than one chunk of the kernels."""


def _plain(world: World) -> Found:
    """Plain torch beside arithmetic in float64."""
    return _compared(world, cast("kernels.Backend", reference), _Exact())


def _triton(world: World) -> Found:
    """Triton's kernels beside plain torch."""
    found = Found()
    kind = world.device.type
    if kind == "cpu":
        backend: Any = importlib.import_module("gradilocks.kernels.triton_backend")
    else:
        backend = kernels.BACKENDS[kind]
        if not backend.BY_ADDRESS:
            found.problem(f"Triton is installed, and its kernels do not serve {kind}: ")
            found.problems[-1] += kernels.describe()[kind]
            return found
    return _compared(world, backend, cast("kernels.Backend", reference))


def _native(world: World) -> Found:
    """The CPU's kernels in C++ beside plain torch."""
    backend: Any = importlib.import_module("gradilocks.kernels.native_backend")
    return _compared(world, backend, cast("kernels.Backend", reference))


class _Exact:
    """The operations of a back end, one tensor after another, in float64."""

    def measure(self, tensors: Sequence[Tensor], *, order: float, detail: bool = True) -> Any:
        from gradilocks.values import Statistics

        wide = [tensor.double().flatten() for tensor in tensors]
        # A norm of nothing is 0, and torch has none of order inf.
        norms = [
            torch.linalg.vector_norm(each, order) if each.numel() else each.new_zeros(())
            for each in wide
        ]
        largest = [each.abs().max() if each.numel() else each.new_zeros(()) for each in wide]
        return Statistics(
            norms=torch.stack(norms),
            nan=torch.stack([each.isnan().sum() for each in wide]).double(),
            inf=torch.stack([each.isinf().sum() for each in wide]).double(),
            largest=torch.stack(largest),
            zeros=torch.stack([(each == 0).sum() for each in wide]).double(),
        )

    def multiply_(self, tensors: Sequence[Tensor], multiplier: Tensor) -> None:
        for tensor in tensors:
            tensor.copy_(tensor.double() * multiplier.double())

    def multiply_each_(self, tensors: Sequence[Tensor], factors: Tensor) -> None:
        for tensor, factor in zip(tensors, factors, strict=True):
            tensor.copy_(tensor.double() * factor.double())

    def multiply_and_check_(self, tensors: Sequence[Tensor], multiplier: Tensor | None) -> Any:
        if multiplier is not None:
            self.multiply_(tensors, multiplier)
        bad = any(not bool(tensor.isfinite().all()) for tensor in tensors)
        return torch.tensor(float(bad)), None

    def clamp_(self, tensors: Sequence[Tensor], bound: Tensor) -> None:
        for tensor in tensors:
            tensor.copy_(tensor.double().clamp(-bound.double(), bound.double()))


def _compared(world: World, backend: Any, truth: Any) -> Found:
    """Every operation on every dtype, on finite numbers and on others."""
    found = Found()
    device = world.device
    half, third = (torch.tensor(number, device=device) for number in (0.5, 0.3))

    def each(by: Any, some: list[Tensor]) -> None:
        by.multiply_each_(some, torch.linspace(0.25, 2.0, len(some), device=device))

    changes: dict[str, Callable[[Any, list[Tensor]], Any]] = {
        "multiply_": lambda by, some: by.multiply_(some, third),
        "multiply_and_check_": lambda by, some: by.multiply_and_check_(some, half)[0],
        "multiply_each_": each,
        "clamp_": lambda by, some: by.clamp_(some, half),
    }
    for dtype in DTYPES:
        if dtype is torch.bfloat16 and _interpreted():
            continue  # The interpreter cuts bfloat16 off instead of rounding.
        for bad in (False, True):
            what = f"{str(dtype).removeprefix('torch.')}{', not finite' if bad else ''}"
            _check_measured(_tensors(dtype, device, bad), backend, truth, found, what)
            for name, change in changes.items():
                mine, right = _tensors(dtype, device, bad), _tensors(dtype, device, bad)
                flags = change(backend, mine), change(truth, right)
                _check_changed(mine, right, flags, found, f"{name}, {what}")
    return found


def _tensors(dtype: torch.dtype, device: torch.device, bad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = SIZES if _interpreted() else (*SIZES, LARGE)  # The interpreter takes its time.
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    made[3][0, :7] = 0.0
    made[4][5] = torch.finfo(dtype).smallest_normal
    if bad:
        made[3][1, 4] = math.nan
        made[4][-1] = math.inf
        made[5][0] = -math.inf
    return [each.to(dtype).to(device) for each in made]


def _check_measured(
    tensors: list[Tensor], backend: Any, truth: Any, found: Found, what: str
) -> None:
    for order in ORDERS:
        mine = backend.measure(tensors, order=order, detail=True)
        right = truth.measure(tensors, order=order, detail=True)
        fine = torch.isfinite(right.norms).cpu()
        if not torch.equal(fine, torch.isfinite(mine.norms).cpu()):
            found.problem(f"measure, p = {order:g}, {what}: norms are finite in other places")
        for name in ("norms", "largest", "zeros", "nan", "inf"):
            ours, theirs = (getattr(each, name).double().cpu() for each in (mine, right))
            if name in ("norms", "largest"):  # Of what is not finite they say no more than that.
                ours, theirs = ours[fine], theirs[fine]
            if not torch.allclose(ours, theirs, rtol=1e-6, atol=0.0):
                found.problem(f"measure, p = {order:g}, {what}: {name} are off")


def _check_changed(
    mine: list[Tensor], right: list[Tensor], flags: tuple[Any, Any], found: Found, what: str
) -> None:
    if flags[0] is not None and float(flags[0]) != float(flags[1]):
        found.problem(f"{what}: the flag is {float(flags[0])}, not {float(flags[1])}")
    for ours, theirs in zip(mine, right, strict=True):
        one, other = ours.double(), theirs.double()
        limits = torch.finfo(ours.dtype)
        least = limits.smallest_normal * limits.eps  # What a subnormal is rounded by.
        if not torch.allclose(one, other, rtol=limits.eps, atol=least, equal_nan=True):
            found.problem(f"{what}: a tensor of {tuple(ours.shape)} is off")
            return


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _no_triton(device: str) -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device == "cpu" and not _interpreted():
        return "Triton's kernels need a GPU, or TRITON_INTERPRET=1"
    return ""


def _no_native(device: str) -> str:
    if device != "cpu":
        return "the C++ kernels are the CPU's"
    served = kernels.describe()["cpu"]
    return "" if served.startswith("fused") else served


KERNEL_CHECKS: dict[str, tuple[Callable[[World], Found], Callable[[str], str]]] = {
    "plain torch": (_plain, lambda device: ""),
    "Triton": (_triton, _no_triton),
    "C++": (_native, _no_native),
}
"""What runs it, and why it is not run on a kind of device, by name."""
