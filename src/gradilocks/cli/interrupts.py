"""Ctrl-C held back for as long as it would break something that cannot be taken back."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class HeldInterrupts:
    """Remembers a SIGINT and raises its KeyboardInterrupt on release, or on leaving the block.

    An import of torch takes seconds and does not survive an interrupt: NumPy recurses without end,
    a bare ``except`` goes on as if nothing had been, or the process dies of the signal after all. A
    second SIGINT is not held back.

    Python's own handler is the only one replaced: who ignores SIGINT or handles it otherwise, as a
    shell's background job or an application that calls ``main`` does, keeps doing so.
    """

    def __init__(self) -> None:
        self._holding = False
        self._interrupted = False

    def __enter__(self) -> HeldInterrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._remember)
            except ValueError:  # not the main thread, which alone receives signals
                return self
            self._holding = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if self._interrupted and error is None:
            raise KeyboardInterrupt

    def release(self) -> None:
        """Holds back no longer. May be called again; then it does nothing.

        Raises:
            KeyboardInterrupt: the one that was held back, if there was one.
        """
        self._restore()
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def _restore(self) -> None:
        if self._holding:
            self._holding = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
