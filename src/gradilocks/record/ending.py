"""How a run ends: what closes a recorder that nobody has closed, and what may not be recorded."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Any

from gradilocks.kernels.cuda_graph import capturing
from gradilocks.runfile.words import describe_error

__all__ = ["closed_at_exit", "how_it_ended", "refuse_capture"]

closed_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()
"""Recorders that are open."""


def refuse_capture() -> None:
    """Raises while a CUDA graph is captured: its replays would tell nobody."""
    if capturing():
        raise RuntimeError(
            "a step cannot be recorded while a CUDA graph is captured: a replay would not tell of "
            "itself. Record without the graph, or capture a GradientControl without record=."
        )


def how_it_ended(error: BaseException | None) -> dict[str, Any]:
    """The arguments of `close` for what ended a run."""
    if error is None:
        return {"status": "finished", "exit": 0, "error": None}
    told = describe_error(error)
    if isinstance(error, KeyboardInterrupt):
        return {"status": "interrupted", "exit": 130, "error": told}
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return {"status": "exit" if code else "finished", "exit": code, "error": None}
    return {"status": "error", "exit": 1, "error": told}


@atexit.register
def _close_all() -> None:
    # What ended the process, if it was an exception that nobody caught.
    ended = how_it_ended(getattr(sys, "last_value", None))
    for recorder in list(closed_at_exit):
        recorder.close(**ended)
