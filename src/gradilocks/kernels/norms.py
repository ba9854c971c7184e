"""Norms on the CPU: exact enough, free of overflow, and one read of a healthy tensor.

`torch.dot` over a piece is the fastest read torch has. On a 2-core Xeon (AVX-512) with 124 M
normally distributed float32 in 148 tensors, `dot` in pieces of 2^20 takes 30 ms and is within 5e-7
of the float64 sum of squares; `torch._foreach_norm` takes 51 ms and is off by 5e-3, because it adds
38 M squares in one running float32 sum. A finite sum of squares also proves that no element is NaN
or Inf, so only a tensor that looks wrong is read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradilocks.kernels import pieces

__all__ = ["Found", "combine", "find", "find_all", "largest", "partials"]

Found = tuple[float, int, int]
"""A tensor's norm, how many of its elements are NaN, and how many are Inf."""

# Below this mean square, float32 squares are subnormal or zero and their sum cannot be trusted.
_TINY_MEAN_SQUARE = 1.2e-31
# Up to this size one call for all tensors beats a `dot` each, and its running sum is good to 1e-6.
_SMALL = 1 << 10


def find_all(tensors: Sequence[Tensor], order: float) -> list[Found]:
    """The norm of each tensor, with its NaN and Inf counted."""
    found: list[Found | None] = [None] * len(tensors)
    small = [
        i
        for i, tensor in enumerate(tensors)
        if order == 2.0 and tensor.dtype is torch.float32 and 0 < tensor.numel() <= _SMALL
    ]
    if small:
        norms = torch.stack(torch._foreach_norm([tensors[i] for i in small], 2.0)).tolist()
        for i, norm in zip(small, norms, strict=True):
            found[i] = _conclude(tensors[i], order, [norm * norm])
    return [
        done if done is not None else find(tensor, order)
        for tensor, done in zip(tensors, found, strict=True)
    ]


def find(tensor: Tensor, order: float, parts: list[float] | None = None) -> Found:
    """The norm of one tensor; `parts` are the numbers of its pieces if they are known already."""
    if order <= 0.0:  # Not a norm; torch takes it, so it is taken: whole, without pieces.
        _, nan, inf = _look_again(tensor, math.inf)
        return float(torch.linalg.vector_norm(tensor, order, dtype=_double(tensor))), nan, inf
    if parts is None:
        parts = partials(pieces.of(tensor, pieces.READ), order)
    return _conclude(tensor, order, parts)


def partials(parts: Iterable[Tensor], order: float) -> list[float]:
    """One number a piece: the sum of squares for order 2, the norm for any other."""
    if order == 2.0:
        return [float(torch.dot(part, part)) for part in map(pieces.in_float, parts)]
    if order == math.inf:
        return [_largest_or_nan(part) for part in parts]
    return [_norm(part, order) for part in parts]


def combine(norms: Sequence[float], order: float) -> float:
    """The norm of a vector from the norms of its pieces. NaN comes before inf."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    peak = max(norms, default=0.0)
    if order == math.inf or peak in (0.0, math.inf) or len(norms) == 1:
        return peak
    powers = math.fsum((norm / peak) ** order for norm in norms)
    return peak * float(powers ** (1.0 / order))


def largest(tensor: Tensor) -> float:
    """The largest magnitude, NaN left out; 0 for an empty tensor."""
    return max((_largest_not_nan(p) for p in pieces.of(tensor, pieces.READ)), default=0.0)


def _conclude(tensor: Tensor, order: float, parts: list[float]) -> Found:
    """The tensor's norm from its pieces' numbers; reads the tensor again if they look wrong."""
    if not parts:
        return 0.0, 0, 0
    if order == 2.0:
        total = math.fsum(parts) if len(parts) > 1 else parts[0]
        if math.isfinite(total) and total >= tensor.numel() * _TINY_MEAN_SQUARE:
            return math.sqrt(total), 0, 0
    else:
        total = combine(parts, order)
        if math.isfinite(total) and (order == math.inf or not _powers_vanish(tensor, total, order)):
            return total, 0, 0
    return _look_again(tensor, order)


def _powers_vanish(tensor: Tensor, norm: float, order: float) -> bool:
    """Whether p-th powers of typical elements are too small for float64 to be added up in it."""
    return norm == 0.0 or order * math.log10(norm) < math.log10(tensor.numel()) - 290.0


def _look_again(tensor: Tensor, order: float) -> Found:
    """Counts NaN and Inf; if there are none, the norm again, in float64 and free of overflow."""
    nan = inf = 0
    for part in pieces.of(tensor, pieces.READ):
        nan += int(torch.isnan(part).sum())
        inf += int(torch.isinf(part).sum())
    if nan or inf:
        return (math.nan if nan else math.inf), nan, inf
    peak = largest(tensor)
    if peak == 0.0 or order == math.inf:
        return peak, 0, 0
    rescaled = [
        _norm(pieces.in_float(part).double() / peak, order)
        for part in pieces.of(tensor, pieces.WRITE)
    ]
    return peak * combine(rescaled, order), 0, 0


def _norm(part: Tensor, order: float) -> float:
    """In float64: torch adds p-th powers in one running sum, off by 1e-5 at 70,000 in float32."""
    return float(torch.linalg.vector_norm(part, order, dtype=_double(part)))


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _largest_or_nan(part: Tensor) -> float:
    """`aminmax` is four times faster than an inf-norm on the CPU (46 ms to 204 ms for 124 M)."""
    if part.is_complex():
        part = pieces.in_float(part)
    low, high = (float(bound) for bound in torch.aminmax(part))
    return math.nan if math.isnan(low) else max(-low, high)


def _largest_not_nan(part: Tensor) -> float:
    peak = _largest_or_nan(part)
    if math.isnan(peak):
        return _largest_or_nan(pieces.in_float(part).abs().nan_to_num(nan=0.0, posinf=math.inf))
    return peak
