"""The norm over all tensors from the norm of each."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["total_norm"]


def total_norm(norms: Tensor, order: float) -> Tensor:
    """The norm of all tensors as if they were one vector, never overflowing on the way."""
    if norms.numel() == 0:
        return norms.new_zeros(())
    if order <= 0.0:
        total: Tensor = torch.linalg.vector_norm(norms, order)
        return total
    largest = norms.amax()
    usable = (largest > 0) & torch.isfinite(largest)
    safe = torch.where(usable, largest, torch.ones_like(largest))
    return torch.where(usable, safe * torch.linalg.vector_norm(norms / safe, order), largest)
