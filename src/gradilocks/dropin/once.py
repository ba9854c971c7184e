"""Sees to it that no gradient is divided by the scale twice in one iteration."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from gradilocks.errors import SharedParameter

__all__ = ["UnscaledOnce", "note_clipped"]

_alive: weakref.WeakSet[UnscaledOnce] = weakref.WeakSet()
_lock = threading.Lock()


class UnscaledOnce:
    """The gradients that have been unscaled since the last `update()`."""

    def __init__(self) -> None:
        self._losses = 0
        self._done: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        with _lock:
            _alive.add(self)

    def note_scaled(self, outputs: Any) -> None:
        """Losses have been scaled; with more than one, backward may come between two steps."""
        self._losses += 1 if isinstance(outputs, Tensor) else 2

    def mark(self, params: Iterable[Tensor]) -> None:
        """The gradients of `params` are unscaled now."""
        for param in params:
            grad = param.grad
            if grad is not None:
                self._done[id(param)] = weakref.ref(grad), grad._version

    def refuse_twice(self, params: Iterable[Tensor], name: Callable[[Tensor], str]) -> None:
        """Raises if one of them has been unscaled already.

        The same tensor may be unscaled again if somebody has written to it since, other than our
        own clip functions, and there was more than one loss to run backward on.
        """
        for param in params:
            done, grad = self._done.get(id(param)), param.grad
            if done is None or grad is None:
                continue
            before, version = done
            if before() is grad and (grad._version == version or self._losses == 1):
                raise SharedParameter(
                    f"the gradient of {name(param)} has been unscaled already since the last "
                    "update() and would be divided by the scale twice. Put each parameter into one "
                    "optimizer, and give unscale_() and step() the same optimizer object."
                )

    def _follow(self, params: Sequence[Tensor], versions: Sequence[int]) -> None:
        for param, version in zip(params, versions, strict=True):
            done, grad = self._done.get(id(param)), param.grad
            if done is not None and grad is not None and done == (weakref.ref(grad), version):
                self._done[id(param)] = done[0], grad._version


def note_clipped(params: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Our own clip has written to these gradients, whose versions were `versions` before."""
    with _lock:
        living = list(_alive)
    for once in living:
        once._follow(params, versions)
