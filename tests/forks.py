"""Forking a process that has run other tests, and processes that fork others when asked to."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

__all__ = ["COMMAND_LINE", "SHORT_END", "fork", "fork_server", "until_the_end", "without_leaks"]

T = TypeVar("T")

COMMAND_LINE = """
import contextlib
import gradilocks.cli.app, gradilocks.report
with contextlib.suppress(ImportError):
    import typer._adapters  # Which it imports when it reads the first command: 0.1 s.
from gradilocks.cli import main
"""
"""For a server's code: all that a command of gradilocks imports before it does anything."""
SHORT_END = """
import atexit, os, sys

ends_with = None

@atexit.register  # The first one to be registered is the last one to run.
def _end():
    if ends_with is not None:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(ends_with)

def run_to_the_end(act):
    global ends_with
    try:
        sys.exit(act())
    except SystemExit as end:
        ends_with = end.code or 0 if isinstance(end.code, int | None) else 1
        raise
    except Exception:
        ends_with = 1
        raise
"""
"""For the beginning of a server's code: a child that calls `run_to_the_end` ends as Python does,
with its exit status, threads joined, what was registered with atexit, and its streams written. Then
it goes, and does not take down one by one the modules that it was forked with: 0.03 s, where
torch's take 0.18. Processes that a test starts afresh, and those of `script_server`, do that.
"""


def fork(*, threads: int | None = 1) -> int:
    """As `os.fork`; the child does not collect what earlier tests have left behind.

    Some of it, such as a process group, waits in its destructor for threads that a fork does not
    have.

    Args:
        threads: how many torch may use in the child, where its pool has gone; None to leave that.
    """
    gc.collect()
    gc.disable()
    try:
        child = os.fork()
        if not child:
            gc.freeze()
            if threads is not None:
                torch.set_num_threads(threads)
    finally:
        gc.enable()
    return child


@contextmanager
def fork_server(
    code: str, *words: str, first: str = "", env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code`, which has imported what takes long and forks for each request.

    Args:
        first: code that comes before.
        code: reads requests from its standard input, a line each, and answers in a line.
        words: its arguments.
        env: its environment; None for this process's own.
    """
    with subprocess.Popen(
        [sys.executable, "-c", first + code, *words],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def until_the_end(context: AbstractContextManager[T]) -> T:
    """What `context` yields, for as long as this process lives: all files of tests share it."""
    made = context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    return made


def without_leaks(said: str) -> str:
    """What a child of such a process printed, without nanobind's report at its end.

    A server freezes what it has imported (`gc.freeze`), so that its children need not look through
    it. They end without having freed it, which nanobind, under Triton, takes for leaks.
    """
    starts = ("nanobind: ", " - leaked ", " - ... skipped ", "See https://nanobind.")
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(starts))
