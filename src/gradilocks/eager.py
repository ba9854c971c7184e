"""For what torch.compile must leave alone.

The control and the drop-ins look at versions, addresses and weak references, which a traced graph
does not have. Called from compiled code they end the graph before them and run as they are written.
Tracing, auditing and emulating must see every call of a model, which compiled code hides.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

from gradilocks._torch import DYNAMO, uncompiled
from gradilocks.errors import GradilocksError

__all__ = ["UNCOMPILED", "eager", "users_line"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def eager(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Runs `function` as it is written, also when compiled code calls it."""
    return uncompiled(function)  # type: ignore[no-any-return]


def users_line() -> int:
    """The `stacklevel` with which a warning points at the user's own line, however far up it is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("gradilocks", "torch"):
            break
        level, frame = level + 1, frame.f_back
    return level


class _Uncompiled:
    """While it is entered, by anybody, compiled functions run as they were written.

    torch has one stance for the whole process. So the first to enter sets it and the last to leave
    puts back what was there, in whatever order they leave.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._stance: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if DYNAMO in sys.modules and self._stance is None:
                self._stance = _force_eager()
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


UNCOMPILED = _Uncompiled()


def _force_eager() -> AbstractContextManager[Any]:
    refusal = GradilocksError(
        "a compiled function has entered what must see every call in it, as gradilocks.emulate "
        "must. Enter it around the call of the function."
    )
    if torch.compiler.is_compiling():  # So that the compiler does not look further.
        raise refusal
    try:
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise refusal from error
    stance.__enter__()
    return stance
