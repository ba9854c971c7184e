"""The order of calls: scaled loss, backward, perhaps unscale_, step, cleared gradients, again.

Gradients carry the scale from backward to step and lose it there. Whoever mixes the two kinds
trains on numbers that are wrong by a factor of the scale, and nothing else would ever say so.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradilocks._torch import version
from gradilocks.errors import ScaleMisuse

__all__ = ["CallOrder", "refuse_scaled"]


class CallOrder:
    """Knows what the gradients are at the moment, and refuses a call that does not fit."""

    def __init__(self, parameters: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._parameters = parameters
        with _lock:
            _alive.add(self)
        self.scaled = False
        """Whether a loss has been scaled since the last step."""
        self.handed_out = False
        """Whether a scaled loss was handed out, so that its backward may come at any time."""
        self.unscaled = False
        """Whether `unscale_` has made the gradients true already."""
        self._stepped_on: tuple[weakref.ref[Tensor], int] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_stepped_on": None}  # Weak references do not travel.

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        with _lock:
            _alive.add(self)

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
            tensor, seen = self._stepped_on
            if tensor() is there and version(there) == seen and not _cleared_unseen(there):
                raise ScaleMisuse(
                    "the gradients of the last step are still there, and backward() would add "
                    "scaled gradients to them. Clear them with control.zero_grad() after every "
                    "control.step()."
                )

    def check_scaled(self, caller: str) -> None:
        """Before gradients are divided by the scale."""
        if not self.scaled:
            raise ScaleMisuse(
                f"{caller} without a backward() since the last step or zero_grad(): these "
                f"gradients do not carry the scale that {caller} would divide by. Call "
                f"control.backward(loss), or control.scale_loss(loss).backward(), before "
                f"control.{caller}, or inside the closure."
            )

    def check_unscale(self) -> None:
        """Before `unscale_`."""
        if self.unscaled:
            raise ScaleMisuse(
                "unscale_() has already been called since the last step(): the gradients are "
                "unscaled, and doing it twice would shrink them by the scale again."
            )
        self.check_scaled("unscale_()")

    def note_unscaled(self) -> None:
        """The gradients have been made true in place."""
        self.unscaled = True

    def note_step(self, params: Iterable[Tensor]) -> None:
        """The gradients have been used up; they should be cleared next."""
        self.scaled = self.handed_out = self.unscaled = False
        grad = next((p.grad for p in params if p.grad is not None), None)
        self._stepped_on = None if grad is None else (weakref.ref(grad), version(grad))

    def note_cleared(self) -> None:
        """The gradients are gone. A loss that was handed out may still bring new ones."""
        self.scaled = self.handed_out
        self.unscaled = False
        self._stepped_on = None

    def dropped(self, params: Iterable[Tensor]) -> bool:
        """Whether the gradients of the losses so far are gone, though nobody said so.

        As after `model.zero_grad()`. Of a loss that was handed out, its backward may be to come.
        """
        return not self.handed_out and all(param.grad is None for param in params)

    def carries_scale(self, params: Iterable[Tensor]) -> bool:
        """Whether one of these parameters has a gradient that is scaled at the moment."""
        if not self.scaled or self.unscaled:
            return False
        mine = {id(param) for param in self._parameters()}
        return any(id(param) in mine for param in params)


_alive: weakref.WeakSet[CallOrder] = weakref.WeakSet()
_lock = threading.Lock()


def refuse_scaled(params: Sequence[Tensor]) -> None:
    """Raises if a clip function is about to take scaled gradients for true ones."""
    with _lock:
        orders = list(_alive)
    if any(order.carries_scale(params) for order in orders):
        raise ScaleMisuse(
            "these gradients still carry the scale of a GradientControl and would be clipped by "
            "that much too far. Use GradientControl(..., clip=1.0), or call control.unscale_() "
            "first."
        )


def _cleared_unseen(grad: Tensor) -> bool:
    """Whether `grad` was zeroed through `.data`, which its version counter does not see.

    Asked on the CPU alone, where asking is free.
    """
    if grad.device.type != "cpu" or grad.layout is not torch.strided:
        return False
    return not bool(grad.count_nonzero())
