"""The kernels in plain torch: every device, and the truth that faster kernels are tested against.

On the CPU a gradient is read in pieces, and `torch.dot` over a piece is the fastest read torch has.
2-core Xeon (AVX-512), 124 M fp32 elements in 148 tensors: `dot` in pieces of 2^20 takes 30 ms and is
within 5e-7 of the float64 sum of squares; `torch._foreach_norm` takes 51 ms and is off by 5e-3,
because it adds 38 M squares in one running float32 sum. A finite sum of squares also proves that no
element is NaN or Inf, so a healthy gradient is read once and only a suspicious one is read again.

On other devices nothing is read back: every number stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradilocks.kernels import pieces
from gradilocks.values import Statistics, wide

__all__ = ["clamp_", "measure", "multiply_", "multiply_and_measure_"]

# Below this mean square, float32 squares are subnormal or zero and their sum cannot be trusted.
_TINY_MEAN_SQUARE = 1.2e-31


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False) -> Statistics:
    """Reads every tensor and says what is in it.

    Args:
        tensors: dense tensors of any floating dtype on one device.
        order: the norm's p; any float that `torch.linalg.vector_norm` takes.
        detail: also find the largest magnitude and count the zeros.

    Returns:
        One entry a tensor. The norm is NaN if the tensor holds a NaN, else inf if it holds an Inf;
        it is finite whenever the elements are.
    """
    device = tensors[0].device
    if device.type != "cpu":
        return _measure_on_device(tensors, order=order, detail=detail)
    found = [_measure_one(tensor, order) for tensor in tensors]
    largest = zeros = None
    if detail:
        largest = torch.tensor([_largest(t) for t in tensors], dtype=torch.float64)
        zeros = torch.tensor(
            [t.numel() - int(torch.count_nonzero(t)) for t in tensors], dtype=torch.int64
        )
    return _statistics(found, largest=largest, zeros=zeros)


def multiply_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    """Multiplies every tensor in place, in the tensor's own precision.

    Args:
        tensors: dense tensors on one device.
        multiplier: 0-d, on that device.
    """
    if multiplier.device.type == "cpu":
        factor = multiplier.item()
        if factor != 1.0:
            torch._foreach_mul_(list(tensors), factor)
        return
    torch._foreach_mul_(list(tensors), multiplier.to(torch.float32))


def multiply_and_measure_(
    tensors: Sequence[Tensor], multiplier: Tensor, *, order: float = 2.0
) -> Statistics:
    """Multiplies every tensor in place and measures the result while it is still in the cache.

    Args:
        tensors: dense tensors on one device.
        multiplier: 0-d, on that device.
        order: the norm's p.

    Returns:
        As `measure` of the tensors after the multiplication.
    """
    if multiplier.device.type != "cpu":
        torch._foreach_mul_(list(tensors), multiplier.to(torch.float32))
        return measure(tensors, order=order)
    factor = multiplier.item()
    if factor == 1.0:
        return measure(tensors, order=order)
    return _statistics([_multiply_one_(tensor, factor, order) for tensor in tensors])


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """Bounds the magnitude of every element in place; NaN stays NaN.

    Args:
        tensors: dense tensors on one device.
        bound: 0-d, on that device, not negative.
    """
    if bound.device.type == "cpu":
        value = bound.item()
        if value != math.inf:
            torch._foreach_clamp_min_(list(tensors), -value)
            torch._foreach_clamp_max_(list(tensors), value)
        return
    for tensor in tensors:
        limit = bound.to(tensor.dtype)
        torch.clamp(tensor, -limit, limit, out=tensor)


_Found = tuple[float, int, int]  # norm, how many NaN, how many Inf


def _statistics(
    found: list[_Found], *, largest: Tensor | None = None, zeros: Tensor | None = None
) -> Statistics:
    norms, nan, inf = zip(*found, strict=True)
    return Statistics(
        torch.tensor(norms, dtype=torch.float64),
        torch.tensor(nan, dtype=torch.int64),
        torch.tensor(inf, dtype=torch.int64),
        largest,
        zeros,
    )


def _measure_one(tensor: Tensor, order: float) -> _Found:
    if order <= 0.0:  # Not a norm; torch takes it, so it is taken: whole, without pieces.
        _, nan, inf = _look_again(tensor, math.inf)
        return float(torch.linalg.vector_norm(tensor, order, dtype=_double(tensor))), nan, inf
    return _conclude(tensor, order, _partials(pieces.of(tensor, pieces.READ), order))


def _multiply_one_(tensor: Tensor, factor: float, order: float) -> _Found:
    """Multiplies piece by piece and measures each piece before it leaves the cache."""

    def multiplied() -> Iterator[Tensor]:
        for piece in pieces.of(tensor, pieces.WRITE):
            yield piece.mul_(factor)

    if pieces.is_dense(tensor):
        return _conclude(tensor, order, _partials(multiplied(), order))
    tensor.mul_(factor)
    return _measure_one(tensor, order)


def _partials(parts: Iterator[Tensor], order: float) -> list[float]:
    """One number a piece: the sum of squares for order 2, the norm for any other."""
    if order == 2.0:
        sums = [torch.dot(part, part) for part in map(pieces.in_float, parts)]
        return [float(s) for s in sums]
    if order == math.inf:
        return [_largest_propagating(part) for part in parts]
    return [_norm(part, order) for part in parts]


def _norm(part: Tensor, order: float) -> float:
    """In float64: torch adds p-th powers in one running sum, off by 1e-5 at 70,000 in float32."""
    return float(torch.linalg.vector_norm(part, order, dtype=_double(part)))


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _conclude(tensor: Tensor, order: float, partials: list[float]) -> _Found:
    """The tensor's norm from its pieces' numbers; reads the tensor again if they look wrong."""
    if tensor.numel() == 0:
        return 0.0, 0, 0
    if order == 2.0:
        total = math.fsum(partials) if len(partials) > 1 else partials[0]
        if math.isfinite(total) and total >= tensor.numel() * _TINY_MEAN_SQUARE:
            return math.sqrt(total), 0, 0
    else:
        total = combine(partials, order)
        if math.isfinite(total):
            return total, 0, 0
    return _look_again(tensor, order)


def _look_again(tensor: Tensor, order: float) -> _Found:
    """Counts NaN and Inf; if there are none, the norm again, in float64 and free of overflow."""
    nan = inf = 0
    largest = 0.0
    for part in pieces.of(tensor, pieces.READ):
        nan += int(torch.isnan(part).sum())
        inf += int(torch.isinf(part).sum())
        largest = max(largest, _largest_ignoring_nan(part))
    if nan:
        return math.nan, nan, inf
    if inf:
        return math.inf, nan, inf
    if largest == 0.0 or order == math.inf:
        return largest, 0, 0
    rescaled = [
        _norm(pieces.in_float(part).double() / largest, order)
        for part in pieces.of(tensor, pieces.WRITE)
    ]
    return largest * combine(rescaled, order), 0, 0


def combine(norms: Sequence[float], order: float) -> float:
    """The norm of norms: of a vector of which the pieces' norms are given. NaN before inf."""
    if any(math.isnan(n) for n in norms):
        return math.nan
    largest = max(norms, default=0.0)
    if order == math.inf or largest == math.inf:
        return largest
    if largest == 0.0 or len(norms) == 1:
        return largest
    powers = math.fsum((norm / largest) ** order for norm in norms)
    return largest * float(powers ** (1.0 / order))


def _largest(tensor: Tensor) -> float:
    return max((_largest_ignoring_nan(p) for p in pieces.of(tensor, pieces.READ)), default=0.0)


def _largest_propagating(part: Tensor) -> float:
    """`aminmax` is four times faster than an inf-norm on the CPU (46 ms to 204 ms for 124 M)."""
    if part.is_complex():
        part = part.abs()
    low, high = torch.aminmax(part)
    return max(abs(float(low)), abs(float(high))) if not math.isnan(float(low)) else math.nan


def _largest_ignoring_nan(part: Tensor) -> float:
    largest = _largest_propagating(part)
    if math.isnan(largest):
        largest = _largest_propagating(part.abs().nan_to_num(nan=0.0, posinf=math.inf))
    return largest


def _measure_on_device(tensors: Sequence[Tensor], *, order: float, detail: bool) -> Statistics:
    """As the CPU path, in operations that leave every number on the device."""
    dtype = wide(tensors[0].device)
    norms, nan, inf, largest, zeros = [], [], [], [], []
    for tensor in tensors:
        nans, infs = torch.isnan(tensor), torch.isinf(tensor)
        nan.append(nans.sum())
        inf.append(infs.sum())
        magnitude = tensor.abs().masked_fill(nans, 0.0) if tensor.numel() else tensor.abs().sum()
        peak = magnitude.amax().to(dtype)
        safe = torch.where((peak > 0) & torch.isfinite(peak), peak, torch.ones_like(peak))
        norm = safe * torch.linalg.vector_norm(magnitude.to(dtype) / safe, order)
        norms.append(torch.where(nan[-1] > 0, torch.full_like(norm, math.nan), norm))
        if detail:
            largest.append(peak)
            zeros.append(tensor.numel() - torch.count_nonzero(tensor))
    return Statistics(
        torch.stack(norms),
        torch.stack(nan),
        torch.stack(inf),
        torch.stack(largest) if detail else None,
        torch.stack(zeros) if detail else None,
    )
