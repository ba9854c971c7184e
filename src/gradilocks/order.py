"""The order of calls: scaled loss, backward, perhaps unscale_, step, cleared gradients, again.

Gradients carry the scale from backward to step and lose it there. Whoever mixes the two kinds
trains on numbers that are wrong by a factor of the scale, and nothing else would ever say so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from gradilocks.errors import ScaleMisuse

__all__ = ["CallOrder"]


class CallOrder:
    """Knows what the gradients are at the moment, and refuses a call that does not fit."""

    def __init__(self) -> None:
        self.scaled = False
        """Whether a loss has been scaled since the last step."""
        self.handed_out = False
        """Whether a scaled loss was handed out, so that its backward may come at any time."""
        self.unscaled = False
        """Whether `unscale_` has made the gradients true already."""
        self._stepped_on: tuple[weakref.ref[Tensor], int] | None = None

    def check_backward(self, params: Iterable[Tensor]) -> None:
        """Before gradients are added to whatever is there."""
        if self.scaled and not self.unscaled:
            return
        there = next((p.grad for p in params if p.grad is not None), None)
        if there is None:
            self.unscaled = False
        elif self.unscaled:
            raise ScaleMisuse(
                "backward() after unscale_() would add scaled gradients to unscaled ones. Call "
                "control.step() first, or clear the gradients with control.zero_grad()."
            )
        elif self._stepped_on is not None:
            tensor, version = self._stepped_on
            if tensor() is there and there._version == version and not _cleared_unseen(there):
                raise ScaleMisuse(
                    "the gradients of the last step are still there, and backward() would add "
                    "scaled gradients to them. Clear them with control.zero_grad() after every "
                    "control.step()."
                )

    def check_scaled(self, caller: str) -> None:
        """Before gradients are divided by the scale."""
        if not self.scaled:
            raise ScaleMisuse(
                f"{caller} without a backward() since the last step: these gradients do not carry "
                f"the scale that {caller} would divide by. Call control.backward(loss), or "
                f"control.scale_loss(loss).backward(), before control.{caller}."
            )

    def check_unscale(self) -> None:
        """Before `unscale_`."""
        if self.unscaled:
            raise ScaleMisuse(
                "unscale_() has already been called since the last step(): the gradients are "
                "unscaled, and doing it twice would shrink them by the scale again."
            )
        self.check_scaled("unscale_()")

    def note_step(self, params: Iterable[Tensor]) -> None:
        """The gradients have been used up; they should be cleared next."""
        self.scaled = self.handed_out = self.unscaled = False
        grad = next((p.grad for p in params if p.grad is not None), None)
        self._stepped_on = None if grad is None else (weakref.ref(grad), grad._version)

    def note_cleared(self) -> None:
        """The gradients are gone. A loss that was handed out may still bring new ones."""
        self.scaled = self.handed_out
        self.unscaled = False
        self._stepped_on = None

    def forget(self) -> None:
        """Another run's state has been loaded, or an evaluation has been used up."""
        self.scaled = self.handed_out = self.unscaled = False
        self._stepped_on = None


def _cleared_unseen(grad: Tensor) -> bool:
    """Whether `grad` was zeroed through `.data`, which its version counter does not see.

    Asked on the CPU alone, where asking is free.
    """
    return grad.device.type == "cpu" and not bool(grad.count_nonzero())
