"""How the commands speak, and what they do while somebody waits.

What is to be said enters and leaves in characters that the terminal has; a suggested command can be
typed as it is shown; a long wait gets a bar, and Ctrl-C is held back where it would break
something. typer is not imported here: Ctrl-C must be held back before that is.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gradilocks.errors import GradilocksError
from gradilocks.runfile import Run, describe_damage, read_quietly

if TYPE_CHECKING:
    from rich.progress import Progress

SOON = 0.5
"""Seconds after which there is something to wait for."""

Advance = Callable[[int, int | None], None]
"""Told how much is done, and of how much if that is known."""


# --- speaking ------------------------------------------------------------------------------------


# As ECMA-48 numbers them.
_COLOURS = {"red": "1;31", "yellow": "1;33", "green": "32"}


def say(message: str, *, colour: str = "") -> None:
    """Says something on standard error, beside a script that has standard output for itself.

    In colour if that is a terminal, and NO_COLOR is not set.
    """
    # Of the process: the script may have put something else in sys.stderr's place, or closed it.
    # Line and end in one write, also unbuffered: the ranks of torchrun share the stream.
    with suppress(Exception):
        line = f"gradilocks: {message}"
        stream = sys.__stderr__
        if colour and stream is not None and stream.isatty() and not os.environ.get("NO_COLOR"):
            line = f"\x1b[{_COLOURS[colour]}m{line}\x1b[0m"
        print(f"{line}\n", end="", file=stream, flush=True)


def forgive_encoding() -> None:
    """Writes what standard output's encoding lacks as ``\\xfc`` instead of failing on it.

    For commands that show names from a file: a parameter may be called anything.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def printable(text: object) -> str:
    """A name or a command may hold anything, control codes too: each becomes a question mark."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def program() -> str:
    """Returns what to type before a command: ``gradilocks`` if the shell would find this one.

    Otherwise the interpreter that is running, by the shortest name that works from here, and
    ``-m gradilocks``: ``make demo`` does not put its environment on the PATH.
    """
    interpreter = Path(sys.executable)
    found = shutil.which("gradilocks")
    if found is not None and Path(found).parent == interpreter.parent:
        return "gradilocks"
    for name in ("python", "python3"):
        if shutil.which(name) == str(interpreter):
            return f"{name} -m gradilocks"
    try:
        shown = os.path.relpath(interpreter)
    except ValueError:  # another drive
        return f"{interpreter} -m gradilocks"
    return f"{interpreter if shown.startswith(os.pardir) else shown} -m gradilocks"


def open_in_browser(page: Path) -> None:
    """Opens a page, or says that there is no browser."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        raise GradilocksError(f"no browser was found; open {page} yourself.")


# --- a bar where one waits -----------------------------------------------------------------------


@contextmanager
def bar(what: str, *, after: float = SOON) -> Iterator[Advance]:
    """Yields what is told of progress, and shows it on a terminal if it takes so many seconds."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    began = time.monotonic()
    shown: Progress | None = None

    def show(done: int, total: int | None) -> None:
        nonlocal shown
        if shown is None:
            if time.monotonic() - began < after:
                return
            shown = _new_bar(measured=total is not None)
            shown.start()
            shown.add_task(what)
        shown.update(shown.task_ids[0], completed=done, total=total)

    try:
        yield show
    finally:
        if shown is not None:
            shown.stop()


def read_with_bar(path: Path) -> Run:
    """Reads a run file, with a bar if it is long; says which of its lines are damaged."""
    with bar(f"reading {path}") as show:
        run = read_quietly(path, progress=show)
    if run.damaged:
        say(f"{printable(path)}: {printable(describe_damage(run.damaged))}")
    return run


def _new_bar(*, measured: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn() if measured else TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


# --- Ctrl-C --------------------------------------------------------------------------------------


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
