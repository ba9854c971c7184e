"""How a script ends enters, and whatever it was, the run file is closed once and last.

Python runs what was registered with `atexit` in reverse, after it has waited for threads. What is
registered before the script starts therefore comes last: after the script's own farewells.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gradilocks.runfile import describe_error

__all__ = ["Ending", "ProcessEnd", "SignalsHeld"]

# What the signal module is made of: without its translation into enums, a fifth of the price, and
# signals are held back several times a step.
_signal: Any = importlib.import_module("_signal")
_get_handler, _set_handler = _signal.getsignal, _signal.signal
_HELD = (int(signal.SIGINT), int(signal.SIGTERM))
_FATAL = [getattr(signal, n) for n in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, n)]


@dataclass(frozen=True)
class Ending:
    """As `runfile.records.End` has it."""

    status: str
    exit: int
    error: str | None = None
    signal: int | None = None
    """What the process is to die of, if that is how Python would end."""

    @staticmethod
    def of_exit(code: object) -> Ending:
        """Of `sys.exit(code)`."""
        number = 0 if code is None else code if isinstance(code, int) else 1
        number &= 0xFF
        said = str(code) if isinstance(code, str) else None
        return Ending("exit" if number else "finished", number, said)

    @staticmethod
    def of_error(error: BaseException) -> Ending:
        """Of an exception that nobody caught."""
        told = describe_error(error)
        if isinstance(error, KeyboardInterrupt):
            return Ending("interrupted", 128 + signal.SIGINT, told, signal.SIGINT)
        return Ending("error", 1, told)


class ProcessEnd:
    """Calls `conclude` once, as the last thing that this process does.

    Also if it ends by `os._exit`, SIGTERM, SIGHUP or SIGQUIT. Children of a fork conclude nothing.
    """

    def __init__(self, conclude: Callable[[Ending], None]) -> None:
        self._conclude = conclude
        self._pid = os.getpid()
        self._done = self._concluding = False
        self._late: int | None = None  # A signal that came while it concluded.
        self._exit = os._exit
        self.ending = Ending("finished", 0)

    def prepare(self) -> None:
        """Takes its places; call it before the script starts."""
        atexit.register(self._at_exit)
        os._exit = self._leave
        for number in _FATAL:
            with suppress(ValueError, OSError):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._killed)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._restore)

    def cancel(self) -> None:
        """There is nothing to conclude: nothing has run."""
        self._done = True
        self._restore()

    def note(self, ending: Ending) -> None:
        """How the script ended, for when its time comes."""
        self.ending = ending

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self.finish()
        if self.ending.signal is not None:
            _die(self.ending.signal)

    def _leave(self, status: int) -> Any:
        if os.getpid() == self._pid:
            self.ending = Ending.of_exit(status)
            self.finish()
        self._exit(status)

    def _killed(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            if self._concluding:
                # torchrun ends the survivors of a rank that has failed, which are about to end.
                self._late = number
                return
            name = signal.Signals(number).name
            self.ending = Ending("interrupted", 128 + number, name, number)
            self.finish()
        _die(number)

    def finish(self) -> None:
        """Concludes, unless that has been done."""
        if not self._done:
            self._done = self._concluding = True
            try:
                with SignalsHeld():
                    self._conclude(self.ending)
            finally:
                self._concluding = False
                self._restore()
            if self._late is not None:
                _die(self._late)

    def _restore(self) -> None:
        os._exit = self._exit
        for number in _FATAL:
            with suppress(ValueError, OSError):
                if signal.getsignal(number) == self._killed:
                    signal.signal(number, signal.SIG_DFL)


class SignalsHeld:
    """Holds signals back while a line of the run file is on its way, and delivers them after."""

    __slots__ = ("_came", "_handlers")

    def __init__(self) -> None:
        self._handlers: list[tuple[int, Any]] = []
        self._came: list[int] = []

    def __enter__(self) -> SignalsHeld:
        if threading.get_ident() == threading.main_thread().ident:
            remember = self._remember
            for number in _HELD:
                handler = _get_handler(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    _set_handler(number, remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers:
            _set_handler(number, handler)
        if self._came:
            handlers = dict(self._handlers)
            for number in self._came:
                handlers[number](number, sys._getframe())

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)


def _die(number: int) -> None:
    """Dies of a signal as if nobody had handled it, so that the shell sees it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
