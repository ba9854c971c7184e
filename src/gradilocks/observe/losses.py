"""Losses on which backward was called enter; the loss of the step that follows leaves.

Between two steps every loss counts, so that micro-batches add up, also those that are run backward
inside the step, by its closure. Not those whose gradients were cleared. Two optimizers that step
after one backward share it; a backward after a step begins anew.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["Losses"]


class Losses:
    """What was run backward since the last step, unscaled, on its device."""

    def __init__(self) -> None:
        self._pot: Tensor | None = None
        self._used = False
        self._unscaled: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note_scaled(self, before: Any, after: Any) -> None:
        """A loss was multiplied by the scale: `after` will be run backward in place of `before`."""
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            if before is not after and before.numel() == 1:
                value = before.detach().clone()
                if len(self._unscaled) > 64:
                    self._unscaled = {k: v for k, v in self._unscaled.items() if v[0]() is not None}
                self._unscaled[id(after)] = weakref.ref(after), value
        elif isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
            for one, other in zip(before, after, strict=False):
                self.note_scaled(one, other)

    def note_backward(self, tensors: Any, gradients: Any) -> None:
        """`torch.autograd.backward(tensors, gradients)` is about to run."""
        if isinstance(tensors, Tensor):
            tensors = (tensors,)
        if not isinstance(tensors, (list, tuple)) or _any_given(gradients):
            return
        if self._used:
            self._pot, self._used = None, False
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1 and not tensor.is_meta:
                known = self._unscaled.pop(id(tensor), None)
                if known is not None and known[0]() is tensor:
                    self._add(known[1])
                else:
                    self._add(tensor.detach().clone())

    def _add(self, loss: Tensor) -> None:
        """Adds up at once: a script may run backward for ever and never step."""
        loss = loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
        if self._pot is not None:
            loss = self._pot + loss.to(self._pot.device, non_blocking=True)
        self._pot = loss

    @property
    def waiting(self) -> bool:
        """Whether there are losses that no step has taken yet."""
        return self._pot is not None and not self._used

    def start(self) -> None:
        """Forgets what came before: its gradients are gone, or somebody else tells of them."""
        self._pot, self._used = None, False

    def end(self) -> None:
        """A step is over: what was run backward in it is no part of the next one."""
        self._used = True

    def take(self) -> Tensor | None:
        """The loss of a step that is about to be taken; None if nobody knows."""
        self._used = True
        total = self._pot
        if total is None:
            return None
        return total.real if total.is_complex() else total


def _any_given(gradients: Any) -> bool:
    if isinstance(gradients, (list, tuple)):
        return any(gradient is not None for gradient in gradients)
    return gradients is not None
