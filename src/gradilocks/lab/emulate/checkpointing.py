"""Activation checkpointing: what is computed again in the backward pass is emulated again.

torch carries autocast over to the second computation, and knows nothing of ours. So, while an
emulation is on, the two functions that ``torch.utils.checkpoint.checkpoint`` hands its work to take
the emulation along with the function that is to be called again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from gradilocks._torch import CHECKPOINT_GENERATOR, COMPOSABLE_CHECKPOINT

__all__ = ["Carrying"]

Again = Callable[[], AbstractContextManager[Any] | None]
"""Called at the first computation: which context the second one needs, if any."""


class Carrying:
    """Puts itself between ``checkpoint`` and its work while it is entered, by any thread.

    Args:
        again: says which context the second computation needs.
    """

    def __init__(self, again: Again) -> None:
        self._again = again
        self._lock = threading.Lock()
        self._entered = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered > 1:
                return
            for module in filter(None, (torch_checkpoint, sys.modules.get(COMPOSABLE_CHECKPOINT))):
                for name, stand_in in _STAND_INS.items():
                    if (original := getattr(module, name, None)) is not None:
                        self._replaced.append((module, name, original))
                        setattr(module, name, stand_in(original, self._carried))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                for module, name, original in self._replaced:
                    setattr(module, name, original)
                self._replaced = []

    def _carried(self, function: Callable[..., Any]) -> Callable[..., Any]:
        context = self._again()
        if context is None:
            return function

        def carried(*args: Any, **kwargs: Any) -> Any:
            with context:
                return function(*args, **kwargs)

        return carried


class _Calling:
    def __init__(self, inner: Any, carried: Callable[[Any], Any]) -> None:
        self._inner, self._carried = inner, carried

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self._inner(self._carried(function), *args, **kwargs)


class _Applying:
    def __init__(self, inner: Any, carried: Callable[[Any], Any]) -> None:
        self._inner, self._carried = inner, carried

    def apply(self, function: Any, *args: Any) -> Any:
        return self._inner.apply(self._carried(function), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_STAND_INS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    CHECKPOINT_GENERATOR: _Calling,
    "CheckpointFunction": _Applying,
}
