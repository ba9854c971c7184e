"""For functions that torch.compile must leave alone.

The control and the drop-ins look at versions, addresses and weak references, which a traced graph
does not have. Called from compiled code they end the graph before them and run as they are written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

__all__ = ["eager", "users_line"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def eager(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Runs `function` as it is written, also when compiled code calls it."""
    return _disable_dynamo(function)


def users_line() -> int:
    """The `stacklevel` with which a warning points at the user's own line, however far up it is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("gradilocks", "torch"):
            break
        level, frame = level + 1, frame.f_back
    return level
