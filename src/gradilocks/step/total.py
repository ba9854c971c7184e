"""The norm over all tensors from the norm of each, and the one rounding that it gets.

Powers are added in float64 over pieces, tensors and ranks, so the total is the same to some 1e-15
however the elements are spread; rounded once to float32, nearly always to the bit. Limit,
coefficient and record all see that number.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["any_double", "rounded", "total_norm"]

_SMALLEST = float(torch.finfo(torch.float32).tiny)
_LARGEST = float(torch.finfo(torch.float32).max)


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
    dtypes = {tensor.dtype for tensor in tensors}
    return torch.float64 in dtypes or torch.complex128 in dtypes
