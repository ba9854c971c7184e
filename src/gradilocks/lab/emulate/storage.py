"""What a tensor becomes when an operation stores it, and its gradient on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradilocks._torch import are_transforms_active, may_be_dual
from gradilocks.lab.emulate.rounding import Rounding

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
    # In a transform, and with dual numbers, a derivative may flow that no flag tells of.
    followed = transformed or may_be_dual()
    if not followed and not (values.requires_grad and torch.is_grad_enabled()):
        return values if forward is None else forward(values)
    apply: Callable[..., torch.Tensor] = (_StoredInTransform if transformed else _Stored).apply
    return apply(values, forward, backward)


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
