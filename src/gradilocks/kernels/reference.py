"""The kernels in plain torch: every device, and the truth that faster kernels are tested against.

On the CPU the host may look at numbers as it likes, since nothing waits there. On other devices
nothing is read back: every number stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import clamp_max_, clamp_min_, mul_, unscale_and_check_
from gradilocks.kernels import norms, pieces
from gradilocks.values import NonFinite, Statistics, wide

__all__ = ["clamp_", "measure", "multiply_", "multiply_and_check_", "multiply_each_"]

# Up to this size torch's AMP kernel multiplies a list of float32 tensors faster than its foreach
# kernel does (0.15 ms to 0.45 ms for 148 tensors of 0.7 M elements in all); above, it is slower.
_SMALL = (1 << 16) - 1
_HALF = (torch.float16, torch.bfloat16)
_DOUBLE = (torch.float64, torch.complex128)
# Said each time, because the user may have set another default dtype or device.
_FLOAT: Any = {"dtype": torch.float32, "device": "cpu"}
_WIDE: Any = {"dtype": torch.float64, "device": "cpu"}


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False) -> Statistics:
    """Reads every tensor and says what is in it.

    Args:
        tensors: dense tensors of any floating dtype on one device; at least one.
        order: the norm's p; any float that `torch.linalg.vector_norm` takes.
        detail: also find the largest magnitude and count the zeros.

    Returns:
        One entry a tensor. The norm is NaN if the tensor holds a NaN; else, with a positive order,
        inf if it holds an Inf. Of finite elements it is finite whatever they and the order are,
        unless the norm itself is more than float64 holds, as an order near 0 can make it.
    """
    if tensors[0].device.type != "cpu":
        return _measure_on_device(tensors, order=order, detail=detail)
    statistics = _statistics(norms.find_all(tensors, order))
    if not detail:
        return statistics
    zeros = [tensor.numel() - int(torch.count_nonzero(tensor)) for tensor in tensors]
    return Statistics(
        statistics.norms,
        statistics.nan,
        statistics.inf,
        largest=torch.tensor([norms.largest(t) for t in tensors], **_WIDE),
        zeros=torch.tensor(zeros, dtype=torch.int64, device="cpu"),
    )


def multiply_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    """Multiplies every tensor in place, in the tensor's own precision; no pass if it is 1.

    Args:
        tensors: dense tensors on one device.
        multiplier: 0-d, on that device.
    """
    if multiplier.device.type != "cpu":
        _multiply_on_device_(tensors, multiplier)
        return
    factor = multiplier.item()
    if factor == 1.0:
        return
    small, large = _by_size(tensors)
    if small:
        _multiply_small_(small, factor)
    half = [tensor for tensor in large if tensor.dtype in _HALF]
    if half:
        mul_(half, _factor(half[0], factor))
    wide_ones = [tensor for tensor in large if tensor.dtype not in _HALF]
    if wide_ones:
        mul_(wide_ones, factor)


def multiply_each_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiplies each tensor in place by its own factor; no pass over one whose factor is 1.

    Args:
        tensors: dense tensors on one device.
        factors: 1-d, on that device, one a tensor.
    """
    if factors.device.type != "cpu":
        for tensor, factor in zip(tensors, factors.unbind(), strict=True):
            _multiply_on_device_([tensor], factor)
        return
    for tensor, factor in zip(tensors, factors.tolist(), strict=True):
        if factor != 1.0:
            tensor.mul_(_factor(tensor, factor))


def multiply_and_check_(tensors: Sequence[Tensor], multiplier: Tensor | None) -> NonFinite:
    """Multiplies every tensor in place and looks at the result while it is still in the cache.

    Args:
        tensors: dense tensors on one device.
        multiplier: 0-d, on that device; None to look without multiplying.

    Returns:
        How many elements of each are NaN and Inf after the multiplication.
    """
    if tensors[0].device.type != "cpu":
        if multiplier is not None:
            _multiply_on_device_(tensors, multiplier)
        nan = torch.stack([torch.isnan(tensor).sum() for tensor in tensors])
        return NonFinite(nan, torch.stack([torch.isinf(tensor).sum() for tensor in tensors]))
    factor = None if multiplier is None else multiplier.item()
    small, _ = _by_size(tensors)
    found: dict[int, tuple[int, int]] = {}
    if small:
        fine = _multiply_small_(small, 1.0 if factor is None else factor)
        found = {id(each): (0, 0) if fine else norms.count_nonfinite(each) for each in small}
    counts = [found.get(id(tensor)) or _multiply_large_(tensor, factor) for tensor in tensors]
    nan, inf = torch.tensor(counts, dtype=torch.int64, device="cpu").unbind(1)
    return NonFinite(nan, inf)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """Bounds the magnitude of every element in place; NaN stays NaN.

    Args:
        tensors: dense tensors on one device.
        bound: 0-d, on that device, not negative.
    """
    if bound.device.type != "cpu":
        for tensor in tensors:
            limit = bound.to(tensor.dtype)
            torch.clamp(tensor, -limit, limit, out=tensor)
        return
    value = bound.item()
    # A bound that the dtype cannot hold bounds nothing in it, and torch would refuse it.
    bounded = [tensor for tensor in tensors if value <= torch.finfo(tensor.dtype).max]
    if bounded:
        clamp_min_(bounded, -value)
        clamp_max_(bounded, value)


def _factor(tensor: Tensor, factor: float) -> float | Tensor:
    """`factor` as torch must get it: a Python number would be rounded to a half dtype first."""
    return torch.tensor(factor, **_FLOAT) if tensor.dtype in _HALF else factor


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    small: list[Tensor] = []
    large: list[Tensor] = []
    for tensor in tensors:
        fits = tensor.dtype is torch.float32 and tensor.numel() <= _SMALL
        (small if fits else large).append(tensor)
    return small, large


def _multiply_small_(tensors: list[Tensor], factor: float) -> bool:
    """Multiplies, and says whether all elements are finite, before and after."""
    flag, by = torch.zeros((), **_FLOAT), torch.tensor(factor, **_FLOAT)
    unscale_and_check_(tensors, flag, by)
    if abs(factor) > 1.0:  # The kernel looks before it multiplies; a product can overflow.
        unscale_and_check_(tensors, flag, torch.ones_like(by))
    return not flag.item()


def _multiply_large_(tensor: Tensor, factor: float | None) -> tuple[int, int]:
    """Multiplies piece by piece and looks at each piece before it leaves the cache."""
    by = None if factor is None or factor == 1.0 else _factor(tensor, factor)
    if by is not None and not pieces.is_dense(tensor):
        tensor.mul_(by)
        by = None
    fine = True
    for piece in pieces.of(tensor, pieces.WRITE):
        if by is not None:
            piece.mul_(by)
        fine = fine and norms.is_finite(piece)
    return (0, 0) if fine else norms.count_nonfinite(tensor)


def _statistics(found: list[norms.Found]) -> Statistics:
    table = torch.tensor(found, **_WIDE)  # Counts are exact in it up to 2^53.
    counts = table[:, 1:].to(torch.int64)
    return Statistics(table[:, 0], counts[:, 0], counts[:, 1])


def _multiply_on_device_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    factor = multiplier.to(torch.float32)
    for tensor in tensors:
        if tensor.dtype in _HALF:  # In float32, as torch would round the factor to half first.
            tensor.copy_(tensor.float() * factor)
        else:
            tensor.mul_(multiplier if tensor.dtype in _DOUBLE else factor)


def _measure_on_device(tensors: Sequence[Tensor], *, order: float, detail: bool) -> Statistics:
    """As the CPU path, in operations that leave every number on the device."""
    dtype = wide(tensors[0].device)
    found, nan, inf, largest, zeros = [], [], [], [], []
    for tensor in tensors:
        nans = torch.isnan(tensor)
        nan.append(nans.sum())
        inf.append(torch.isinf(tensor).sum())
        magnitude = tensor.abs().masked_fill(nans, 0.0) if tensor.numel() else tensor.abs().sum()
        peak = magnitude.amax().to(dtype)
        # What counts most: no power is more than 1 in its units.
        unit = peak if order >= 0.0 else magnitude.amin().to(dtype)
        safe = torch.where((unit > 0) & torch.isfinite(unit), unit, torch.ones_like(unit))
        if order == 0.0:  # Counts, and has no unit.
            safe = torch.ones_like(unit)
        norm = safe * torch.linalg.vector_norm(magnitude.to(dtype) / safe, order)
        found.append(torch.where(nan[-1] > 0, torch.full_like(norm, math.nan), norm))
        if detail:
            largest.append(peak)
            zeros.append(tensor.numel() - torch.count_nonzero(tensor))
    return Statistics(
        torch.stack(found),
        torch.stack(nan),
        torch.stack(inf),
        torch.stack(largest) if detail else None,
        torch.stack(zeros) if detail else None,
    )
