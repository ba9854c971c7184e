"""What the commands share: how they read options and run files, and how they speak.

Text from the command line enters and a value leaves, or what was expected and what came; a long
wait gets a bar; a suggested command can be typed as it is shown.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gradilocks.errors import GradilocksError
from gradilocks.runfile import Run, read_run

if TYPE_CHECKING:
    from rich.progress import Progress

# The base of every mistake in a command line. typer gives it no public name: older versions take it
# from click, newer ones carry their own copy.
USAGE_ERROR: type[Exception] = typer.BadParameter.mro()[1]
SOON = 0.5
"""Seconds after which there is something to wait for."""

Advance = Callable[[int, int | None], None]
"""Told how much is done, and of how much if that is known."""


# --- options and arguments -----------------------------------------------------------------------


def whole_number(*, smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """Returns the parser of a whole number, for ``typer.Option(parser=...)``."""
    bounds = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            raise typer.BadParameter(f"expected a whole number {bounds}, got {str(text)!r}.")
        return value

    return parse


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Returns the parser of one of a few words, for ``typer.Option(parser=...)``."""

    def parse(text: str) -> str:
        if text not in words:
            expected = f"{', '.join(words[:-1])} or {words[-1]}"
            raise typer.BadParameter(f"expected {expected}, got {str(text)!r}.")
        return text

    return parse


def run_file(metavar: str, *, help: str) -> Any:
    """Declares an argument that is a run file: one that shells complete as a path."""
    return typer.Argument(
        metavar=metavar, help=help, show_default=False, autocompletion=complete_run_file
    )


def complete_run_file(incomplete: str) -> list[str]:
    """The run files, and the folders on the way to them, that begin so.

    A folder that is the only one is entered at once: shells put a space after a sole answer.
    """
    folder, start = os.path.split(incomplete)
    found = []
    with suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in entries:
            if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
                if entry.is_dir():
                    found.append(os.path.join(folder, entry.name, ""))
                elif entry.name.endswith(".jsonl"):
                    found.append(os.path.join(folder, entry.name))
    if len(found) == 1 and found[0].endswith(os.sep):
        return complete_run_file(found[0]) or found
    return sorted(found)


# --- speaking ------------------------------------------------------------------------------------


def say(message: str) -> None:
    """Says something on standard error, beside a script that has standard output for itself."""
    # Of the process: the script may have put something else in sys.stderr's place, or closed it.
    # Line and end in one write, also unbuffered: the ranks of torchrun share the stream.
    with suppress(Exception):
        print(f"gradilocks: {message}\n", end="", file=sys.__stderr__, flush=True)


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
    """Reads a run file, with a bar if it is long."""
    with bar(f"reading {path}") as show:
        return read_run(path, progress=show)


def _new_bar(*, measured: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn() if measured else TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
