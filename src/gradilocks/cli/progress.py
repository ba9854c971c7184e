"""A bar where one waits: on standard error, on a terminal, and only if it takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING

from gradilocks.runfile import Run, read_run

if TYPE_CHECKING:
    from rich.progress import Progress

SOON = 0.5
"""Seconds after which there is something to wait for."""


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields the function that is told how much is done, and of how much."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    began = time.monotonic()
    shown: Progress | None = None

    def show(done: int, total: int) -> None:
        nonlocal shown
        if shown is None:
            if time.monotonic() - began < SOON:
                return
            shown = _new_bar()
            shown.start()
            shown.add_task(what)
        shown.update(shown.task_ids[0], completed=done, total=total)

    try:
        yield show
    finally:
        if shown is not None:
            shown.stop()


def read_with_bar(path: str | PathLike[str]) -> Run:
    """Reads a run file, with a bar if it is long."""
    with bar(f"reading {path}") as show:
        return read_run(path, progress=show)


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        console=Console(stderr=True),
        transient=True,
    )
