"""A tensor enters, the nearest values of a number format leave, kept in the tensor's own dtype; and
the same for its gradient, on the way back.

To nearest, ties to even, with subnormals; what is too large becomes inf, or the largest number
where the format has no inf. fp4 is rounded under a scale a block, without which it holds nothing.
What a rounding returns is always a new tensor, never a view of what came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from gradilocks._torch import are_transforms_active
from gradilocks.lab.formats import Format

__all__ = ["BLOCK", "Rounding", "Storage", "rounding_to"]


# --- rounding ------------------------------------------------------------------------------------

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


# --- storing -------------------------------------------------------------------------------------


class Storage:
    """The formats of one emulation: one for what flows forward, one for what flows back.

    Args:
        forward: rounds inputs and outputs; None leaves them.
        backward: rounds their gradients; None leaves them.
    """

    def __init__(self, forward: Rounding | None, backward: Rounding | None) -> None:
        self._forward, self._backward = forward, backward

    def store(self, values: torch.Tensor) -> torch.Tensor:
        """Rounds a float32 tensor now, and its gradient in the backward pass."""
        forward = self._forward
        if forward is None and self._backward is not None:
            forward = torch.clone  # A view could not be written into.
        return _stored(values, forward, self._backward)

    def store_values(self, values: torch.Tensor) -> torch.Tensor:
        """Rounds the tensor and lets its gradient pass as it is."""
        return _stored(values, self._forward, None)

    def store_gradient(self, values: torch.Tensor) -> torch.Tensor:
        """Leaves the tensor as it is and rounds its gradient. What leaves is a view of it."""
        return _stored(values, None, self._backward)


def _stored(
    values: torch.Tensor, forward: Rounding | None, backward: Rounding | None
) -> torch.Tensor:
    if forward is None and backward is None:
        return values
    transformed = are_transforms_active()
    with_gradient = values.requires_grad and torch.is_grad_enabled()
    # In a transform, and with dual numbers, a derivative may flow that no flag tells of.
    if not (transformed or with_gradient or _tangent(values) is not None):
        return values if forward is None else forward(values)
    apply: Callable[..., torch.Tensor] = (_StoredInTransform if transformed else _Stored).apply
    return apply(values, forward, backward)


def _tangent(values: torch.Tensor) -> torch.Tensor | None:
    tangent: torch.Tensor | None = forward_ad.unpack_dual(values).tangent  # type: ignore[no-untyped-call]
    return tangent


class _Stored(torch.autograd.Function):
    """Rounds in both directions; to autograd it is the identity."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, forward: Rounding | None, backward: Rounding | None
    ) -> torch.Tensor:
        ctx.roundings = forward, backward
        return _forward(values, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounding = ctx.roundings[1]
        return _stored(gradients[0], rounding, rounding), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        forward = ctx.roundings[0]
        return _stored(tangents[0], forward, None) if forward else tangents[0].view_as(tangents[0])


class _StoredInTransform(torch.autograd.Function):
    """The same in the form that `torch.func` asks for, which takes four times as long to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: torch.Tensor, forward: Rounding | None, backward: Rounding | None
    ) -> torch.Tensor:
        return _forward(values, forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.roundings = inputs[1:]

    backward = _Stored.backward
    jvp = _Stored.jvp


def _forward(values: torch.Tensor, forward: Rounding | None) -> torch.Tensor:
    return values.view_as(values) if forward is None else forward(values)
