"""What a tensor becomes when an operation stores it, and its gradient on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradilocks.emulating.rounding import Rounding

__all__ = ["Storage"]


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
        return _stored(values, self._forward, self._backward)

    def store_values(self, values: torch.Tensor) -> torch.Tensor:
        """Rounds the tensor and lets its gradient pass as it is."""
        return _stored(values, self._forward, None)

    def store_gradient(self, values: torch.Tensor) -> torch.Tensor:
        """Leaves the tensor as it is and rounds its gradient."""
        return _stored(values, None, self._backward)


def _stored(
    values: torch.Tensor, forward: Rounding | None, backward: Rounding | None
) -> torch.Tensor:
    if forward is None and backward is None:
        return values
    if not (values.requires_grad and torch.is_grad_enabled()):
        return values if forward is None else forward(values)
    apply: Callable[..., torch.Tensor] = _Stored.apply
    return apply(values, forward, backward)


class _Stored(torch.autograd.Function):
    """Rounds in both directions; to autograd it is the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: torch.Tensor, forward: Rounding | None, backward: Rounding | None
    ) -> torch.Tensor:
        return values.view_as(values) if forward is None else forward(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.backward_rounding = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounding = ctx.backward_rounding
        return _stored(gradients[0], rounding, rounding), None, None
