"""``gradilocks build``: the C++ library is built ahead of its first use, for an image say."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from gradilocks.cli.options import flag
from gradilocks.cli.terminal import Interrupted, forgive_encoding, held_interrupts, printable, say


def build(
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Where to put it, for all users. Default: the cache of whoever runs this.",
        ),
    ] = None,
    portable: Annotated[
        bool,
        flag("--portable", "Make it for every x86-64 with AVX2, or every aarch64, not this CPU."),
    ] = False,
    again: Annotated[bool, flag("--again", "Build it also if it is there.")] = False,
    check: Annotated[
        bool, flag("--check", "Build nothing; say whether it is there, and exit with 1 if not.")
    ] = False,
) -> None:
    """Build the C++ library now, ahead of the first training step.

    It walks over tensors and computes on the CPU; until it is there, Python does. Needs a C++
    compiler and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev), and 15 s.

    \b
    Examples:
      gradilocks build
      gradilocks build --check
      gradilocks build --portable --cache /opt/gradilocks
    """
    forgive_encoding()
    with held_interrupts():
        from gradilocks.kernels import build_native, find_native
    folder = "" if cache is None else os.path.abspath(cache.expanduser())
    if check:
        there, told = find_native(folder)
        print(printable(f"The C++ library is {'there' if there else 'not there'}: {told}."))
        raise typer.Exit(0 if there else 1)
    done: list[str] = []

    def report(text: str) -> None:
        done.append(text)
        say(printable(text))

    try:
        entry = build_native(folder, for_any_machine=portable, again=again, report=report)
    except KeyboardInterrupt as interrupt:
        raise Interrupted("before the library was built; the cache is as it was.") from interrupt
    how = f"built in {entry.seconds} s" if done else f"there already, built {entry.built}"
    print(printable(f"The C++ library is {how} by {entry.compiler}: {entry.path}"))
    if folder and folder != os.environ.get("GRADILOCKS_NATIVE_CACHE"):
        print(printable(f"Where it is to serve: GRADILOCKS_NATIVE_CACHE={shlex.quote(folder)}"))
