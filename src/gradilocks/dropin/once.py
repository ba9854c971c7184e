"""Sees to it that no gradient is divided by the scale twice in one iteration."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gradilocks._torch import version
from gradilocks.errors import SharedParameter

__all__ = ["UnscaledOnce", "writing_ourselves"]

_alive: weakref.WeakSet[UnscaledOnce] = weakref.WeakSet()
_lock = threading.Lock()


class UnscaledOnce:
    """The gradients that have been unscaled since the last `update()`."""

    def __init__(self) -> None:
        self._losses = 0
        # By the parameter's id. Two dicts, as a tuple a parameter would wake the garbage collector.
        self._grads: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}
        with _lock:
            _alive.add(self)

    def note_scaled(self, outputs: Any) -> None:
        """Losses have been scaled; with more than one, backward may come between two steps."""
        self._losses += 1 if isinstance(outputs, Tensor) else 2

    def mark(self, params: Iterable[Tensor]) -> None:
        """The gradients of `params` are unscaled now."""
        grads = _gradients(params)
        self._grads.update(zip(grads, map(weakref.ref, grads.values()), strict=True))
        self._versions.update(zip(grads, map(version, grads.values()), strict=True))

    def refuse_twice(self, params: Iterable[Tensor], name: Callable[[Tensor], str]) -> None:
        """Raises if one of them has been unscaled already.

        The same tensor may be unscaled again if somebody has written to it since, other than our
        own clip functions, and there was more than one loss to run backward on.
        """
        if not self._grads:
            return
        for param in params:
            done, grad = self._grads.get(id(param)), param.grad
            if done is None or grad is None or done() is not grad:
                continue
            if version(grad) == self._versions[id(param)] or self._losses == 1:
                raise SharedParameter(
                    f"the gradient of {name(param)} has been unscaled already since the last "
                    "update() and would be divided by the scale twice. Put each parameter into one "
                    "optimizer, and give unscale_() and step() the same optimizer object."
                )

    def _follow(self, grads: dict[int, Tensor], versions: Sequence[int]) -> None:
        for param, grad, before in zip(grads, grads.values(), versions, strict=True):
            if self._versions.get(param) == before and self._grads[param]() is grad:
                self._versions[param] = version(grad)


@contextmanager
def writing_ourselves(params: Sequence[Tensor]) -> Iterator[None]:
    """Inside, our own clip writes to the gradients of `params`; that makes no new gradients."""
    with _lock:
        living = [once for once in _alive if once._grads]
    if not living:
        yield
        return
    grads = _gradients(params)
    versions = list(map(version, grads.values()))
    yield
    for once in living:
        once._follow(grads, versions)


def _gradients(params: Iterable[Tensor]) -> dict[int, Tensor]:
    """The gradients that there are, by their parameter's id."""
    return {id(param): grad for param in params if (grad := param.grad) is not None}
