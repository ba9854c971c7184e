"""Norms on the CPU: free of overflow, and one read of a healthy tensor.

`torch.dot` over a piece is the fastest read torch has. On a 2-core Xeon (AVX-512) it reads 124 M
float32 in pieces of 2^20 in 26 ms, and the norm of normally distributed values is within 1e-6 of
float64's; the worst it does is 5e-5, when all elements are equal and every addition is rounded the
same way. `torch._foreach_norm` takes 53 ms and is off by 3e-3 on the former already, because it
adds 38 M squares in a few running sums. Summing in rows of 1,024 is within 1e-6 always; inside a
step it costs 15 ms more, a tenth of the step, and gradients are not constants.

A finite sum of squares also proves that no element is NaN or Inf, so only a tensor that looks wrong
is read again.
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
_ROW = 1024
# Up to this size one call for all tensors beats one each, and its running sum is good to 1e-6.
_SMALL = 1 << 10


def find_all(tensors: Sequence[Tensor], order: float) -> list[Found]:
    """The norm of each tensor, with its NaN and Inf counted."""
    if order != 2.0:
        return [find(tensor, order) for tensor in tensors]
    # Short cuts for the many tensors of a model that are not large: one call for all the small
    # ones, one `dot` each for the others. Every microsecond here is spent once a tensor.
    found: list[Found | None] = [None] * len(tensors)
    small, flat, squares = [], [], []
    for place, tensor in enumerate(tensors):
        if tensor.dtype is torch.float32 and tensor.is_contiguous():
            size = tensor.numel()
            if size > _SMALL:
                if size <= pieces.READ:
                    vector = tensor.view(-1)
                    flat.append(place)
                    squares.append(torch.dot(vector, vector))
            elif size:
                small.append(place)
    if squares:
        for place, square in zip(flat, torch.stack(squares).tolist(), strict=True):
            if _trusted(square, tensors[place]):
                found[place] = math.sqrt(square), 0, 0
    if small:
        norms = torch.stack(torch._foreach_norm([tensors[place] for place in small], 2.0))
        for place, norm in zip(small, norms.tolist(), strict=True):
            if _trusted(norm * norm, tensors[place]):
                found[place] = norm, 0, 0
    return [
        done if done is not None else find(tensor, order)
        for tensor, done in zip(tensors, found, strict=True)
    ]


def _trusted(square: float, tensor: Tensor) -> bool:
    """Whether a sum of float32 squares shows that all is well, and is exact enough to be used."""
    return tensor.numel() * _TINY_MEAN_SQUARE <= square < math.inf


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
        return [_square(part) for part in parts]
    if order == math.inf:
        return [_largest_or_nan(part) for part in parts]
    return [_norm(part, order) for part in parts]


def _square(part: Tensor) -> float:
    """The sum of squares of one piece."""
    if part.dtype not in (torch.float16, torch.bfloat16):
        part = pieces.in_float(part)
        return float(torch.dot(part, part))
    # Few half-precision values differ from each other, so equal squares are the rule: in rows.
    whole = part.numel() // _ROW * _ROW
    total = 0.0
    for rows in (part[:whole].view(-1, _ROW), part[whole:].view(1, -1)):
        if rows.numel():
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double()
            total += float(torch.dot(norms, norms))
    return total


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
        if _trusted(total, tensor):
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
    return math.nan if math.isnan(low) else max(abs(low), abs(high))  # -0.0 is no magnitude.


def _largest_not_nan(part: Tensor) -> float:
    peak = _largest_or_nan(part)
    if math.isnan(peak):
        return _largest_or_nan(pieces.in_float(part).abs().nan_to_num(nan=0.0, posinf=math.inf))
    return peak
