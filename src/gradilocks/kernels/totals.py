"""The norm over all tensors from the norm of each, and the one rounding that it gets.

Powers are added in float64 over pieces, tensors and ranks, so the total is the same to some 1e-15
however the elements are spread; rounded once to float32, nearly always to the bit. Limit,
coefficient and record all see that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gradilocks.values import Measurement, Statistics

__all__ = ["DOUBLE", "any_double", "rounded", "summarize", "total_norm"]

DOUBLE = frozenset((torch.float64, torch.complex128))
_SMALLEST = float(torch.finfo(torch.float32).tiny)
_LARGEST = float(torch.finfo(torch.float32).max)


def summarize(statistics: Statistics, *, order: float, double: bool) -> Measurement:
    """The Measurement of tensors whose statistics are known; `double` if one is float64."""
    norms = statistics.norms
    if order == 2.0 and not double and norms.dtype is torch.float64:
        # The square of a float32 norm is far from the ends of float64, so the sum needs no care,
        # and it is finite just when every element is. 8 small operations instead of 20.
        norm = rounded(torch.linalg.vector_norm(norms))
        nonfinite = torch.logical_not(norm < math.inf).to(torch.float32)
    else:
        norm = rounded(total_norm(norms, order), double=double)
        nonfinite = ((statistics.nan + statistics.inf).sum() > 0).to(torch.float32)
    return Measurement(
        order=order, tensors=statistics, norm=norm, nonfinite=nonfinite, double=double
    )


def total_norm(norms: Tensor, order: float) -> Tensor:
    """The norm of all tensors as if they were one vector, never overflowing on the way.

    Of order 0 it is, as torch has it, the count of tensors whose own count is not 0.
    """
    if norms.numel() == 0:
        return norms.new_zeros(())
    if order == 0.0:
        total: Tensor = torch.linalg.vector_norm(norms, order)
        return total
    # The norm that counts most: in its units no power is more than 1.
    unit = norms.amax() if order > 0.0 else norms.amin()
    usable = (unit > 0) & torch.isfinite(unit)
    safe = torch.where(usable, unit, torch.ones_like(unit))
    return torch.where(usable, safe * torch.linalg.vector_norm(norms / safe, order), unit)


def rounded(norm: Tensor, *, double: bool = False) -> Tensor:
    """A total rounded to float32, in its own dtype.

    Beyond the normal numbers of float32 it stays as it is: a norm of 1e39 can still be clipped.

    Args:
        norm: 0-d, of all tensors and all ranks.
        double: whether a gradient is float64; then the norm is, too, as torch's clip has it.
    """
    if double or norm.dtype is not torch.float64:
        return norm
    fits = (norm >= _SMALLEST) & (norm <= _LARGEST)
    return torch.where(fits, norm.to(torch.float32).to(torch.float64), norm)


def any_double(tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` is float64."""
    return not DOUBLE.isdisjoint({tensor.dtype for tensor in tensors})
