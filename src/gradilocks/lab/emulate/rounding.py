"""A tensor enters, the nearest values of a number format leave, kept in the tensor's own dtype.

To nearest, ties to even, with subnormals; what is too large becomes inf, or the largest number
where the format has no inf. fp4 is rounded under a scale a block, without which it holds nothing.
What leaves is always a new tensor, never a view of what came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from gradilocks.lab.formats import Format

__all__ = ["BLOCK", "Rounding", "rounding_to"]

Rounding = Callable[[torch.Tensor], torch.Tensor]

BLOCK = 32
"""How many values in a row, along the last dimension, share a scale in fp4."""


def rounding_to(format: Format) -> Rounding | None:
    """The function that rounds float32 tensors to a format; None for fp32, where none is."""
    if format.name == "fp32":
        return None
    if format.name == "tf32":
        return _to_tf32
    if format.name == "fp4 e2m1":
        return _to_fp4_blocks
    dtype = getattr(torch, format.dtype)
    if format.infinite:
        return partial(_cast, dtype)
    return partial(_saturating_cast, dtype, format.largest)


def _cast(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    return values.to(dtype).to(values.dtype)


def _saturating_cast(dtype: torch.dtype, largest: float, values: torch.Tensor) -> torch.Tensor:
    # torch before 2.13 makes NaN of what is too large; the clamp keeps to one rule for all.
    return values.clamp(-largest, largest).to(dtype).to(values.dtype)


def _to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Rounds away the last 13 bits of float32's mantissa; a carry may end in inf."""
    bits = values.view(torch.int32)
    moved = bits >> 13
    moved.bitwise_and_(1).add_(0xFFF).add_(bits).bitwise_and_(~0x1FFF)
    rounded = moved.view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def _to_fp4_blocks(values: torch.Tensor) -> torch.Tensor:
    """Rounds to fp4 times a power of two for every 32 values in a row.

    The power brings the largest of the block to between 4 and 8, of which fp4 holds up to 6. A NaN
    or Inf makes the whole block NaN.
    """
    if not values.numel():
        return values.clone()
    if not values.dim():
        return _to_fp4_block(values[None])[0].clone()
    length = values.shape[-1]
    if length <= BLOCK:
        return _to_fp4_block(values)
    padded = torch.nn.functional.pad(values, (0, -length % BLOCK))
    blocks = padded.view(*values.shape[:-1], -1, BLOCK)
    return _to_fp4_block(blocks).view(padded.shape)[..., :length].clone()


def _to_fp4_block(blocks: torch.Tensor) -> torch.Tensor:
    """The same where the last dimension is one block."""
    largest = blocks.abs().amax(-1, keepdim=True)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # The exponent alone.
    # No less than 2^-126, so that a block of zeros, or of subnormals, has a unit too.
    unit = torch.where(largest.isfinite(), (power / 4).clamp(min=2.0**-126), math.nan)
    return _to_fp4(blocks / unit) * unit


def _to_fp4(values: torch.Tensor) -> torch.Tensor:
    """Rounds to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and their negatives."""
    size = values.abs()
    quantum = torch.full_like(size, 2.0)
    quantum = torch.where(size < 4.0, 1.0, quantum)
    quantum = torch.where(size < 2.0, 0.5, quantum)
    rounded = ((size / quantum).round() * quantum).clamp(max=6.0)  # Halves go to even.
    return torch.where(values.isnan(), values, rounded.copysign(values))
