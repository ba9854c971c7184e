"""A Recorder that goes on until the script has ended, whatever else asks it to close."""

from __future__ import annotations

from gradilocks.record import Recorder

__all__ = ["LastingRecorder"]


class LastingRecorder(Recorder):
    """Closed by the end of the session alone, which knows how the script ended.

    A Recorder closes itself when Python begins to leave; threads and `atexit` functions of the
    script may still step an optimizer then.
    """

    def close(self, *, status: str = "finished", exit: int = 0, error: str | None = None) -> None:
        """Not yet."""

    def finish(self, *, status: str, exit: int, error: str | None) -> None:
        """Now."""
        super().close(status=status, exit=exit, error=error)
