"""Ends a script from within one of its steps, by an exception that `except Exception` lets pass."""

from __future__ import annotations

import os
import threading

__all__ = ["Stopped", "Stopper"]

_PATIENCE = 3


class Stopped(SystemExit):
    """Raised out of a step to end the script."""


class Stopper:
    """Ends the script whenever it is called, with one exit status.

    A bare `except` in a loop takes every exception: after a few of them the process is left at
    once, as by `os._exit`.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self.calls = 0
        """How often it was called."""

    def __call__(self) -> None:
        self.calls += 1
        if self.calls > _PATIENCE:
            os._exit(self._status)
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(self._status)  # The only one that a thread ends with in silence.
        raise Stopped(self._status)
