"""Something to do every few seconds → a thread that does it for as long as its object lives.

For a recorder whose training stands still: what it holds should be in the file before somebody
kills the process. The thread is none of `threading`'s, so a script that waits for all threads of
its own does not wait for this one, and the process ends without it. A forked process has none.
"""

from __future__ import annotations

import _thread
import contextlib
import weakref
from collections.abc import Callable

__all__ = ["Timer"]


class Timer:
    """Calls a method again and again, in a thread, until it returns False.

    Args:
        act: a bound method; its object is not kept alive.
        seconds: between two calls.
    """

    def __init__(self, act: Callable[[], bool], seconds: float) -> None:
        self._act = weakref.WeakMethod(act)
        self._seconds = min(seconds, _thread.TIMEOUT_MAX)
        self._stop = _thread.allocate_lock()  # Held by whoever may still be called.
        self._started = False

    def start(self) -> None:
        """Begins, unless it has begun already."""
        if not self._started:
            self._started = True
            self._stop.acquire()
            with contextlib.suppress(RuntimeError):  # No room for a thread: nothing is lost by it.
                _thread.start_new_thread(_run, (self._act, self._seconds, self._stop))

    def end(self) -> None:
        """Lets the thread go, now rather than at its next turn."""
        with contextlib.suppress(RuntimeError):  # It was not running.
            self._stop.release()


def _run(
    act: weakref.WeakMethod[Callable[[], bool]], seconds: float, stop: _thread.LockType
) -> None:
    while not stop.acquire(timeout=seconds):
        method = act()
        if method is None or not method():
            return
        del method
