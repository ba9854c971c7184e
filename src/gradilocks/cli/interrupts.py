"""Ctrl-C: held back where it would break something, and told with what was done by then."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Raised by a command in place of KeyboardInterrupt, to say what it had done by then."""


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Remembers a SIGINT and raises its KeyboardInterrupt on leaving the block.

    Some imports do not survive an interrupt: a bare ``except`` in a library goes on as if nothing
    had been, or the process dies of the signal after all. A second SIGINT is not held back.

    Python's own handler is the only one replaced: who ignores SIGINT or handles it otherwise, as a
    shell's background job or an application that calls ``main`` does, keeps doing so.
    """
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    holding = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if holding:
        try:
            signal.signal(signal.SIGINT, remember)
        except ValueError:  # not the main thread, which alone receives signals
            holding = False
    try:
        yield
    finally:
        if holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
