"""Sees to it that no gradient is divided by the scale twice in one iteration."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

from gradilocks.errors import SharedParameter

__all__ = ["UnscaledOnce"]


class UnscaledOnce:
    """The gradients that have been unscaled since the last `update()`."""

    def __init__(self) -> None:
        self._losses = 0
        self._done: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def note_scaled_loss(self) -> None:
        """Another loss has been scaled, so a later backward may make new scaled gradients."""
        self._losses += 1

    def mark(self, params: Iterable[Tensor]) -> None:
        """The gradients of `params` are unscaled now."""
        for param in params:
            grad = param.grad
            if grad is not None:
                self._done[id(param)] = weakref.ref(grad), grad._version, self._losses

    def refuse_twice(self, params: Iterable[Tensor], name: Callable[[Tensor], str]) -> None:
        """Raises if one of them has been unscaled already.

        The same tensor is safe to unscale again only if it has been written to and another loss
        has been scaled since.
        """
        for param in params:
            done, grad = self._done.get(id(param)), param.grad
            if done is None or grad is None:
                continue
            before, version, losses = done
            if before() is grad and (grad._version == version or losses == self._losses):
                raise SharedParameter(
                    f"the gradient of {name(param)} has been unscaled already since the last "
                    "update() and would be divided by the scale twice. Put each parameter into one "
                    "optimizer, and give unscale_() and step() the same optimizer object."
                )
