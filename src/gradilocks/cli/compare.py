"""``gradilocks compare``: run files enter, a table of what differs between them is shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradilocks.cli.interrupts import HeldInterrupts
from gradilocks.cli.options import run_file
from gradilocks.cli.output import forgive_encoding
from gradilocks.cli.progress import read_with_bar
from gradilocks.report import compare as compare_runs


def compare(
    paths: Annotated[list[Path], run_file("RUN.jsonl", help="Two run files or more.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON instead of a table.")
    ] = False,
) -> None:
    """Compare runs: how they ran, and what came of it.

    The first file is the one that the losses of the others are compared with, step by step.

    \b
    Examples:
      gradilocks compare runs/a.jsonl runs/b.jsonl
      gradilocks compare runs/*.jsonl --json > all.json
    """
    if len(paths) < 2:
        raise typer.BadParameter(
            f"expected two run files or more, got one: {paths[0]}.", param_hint="'RUN.jsonl'"
        )
    forgive_encoding()
    comparison = compare_runs([read_with_bar(path) for path in paths])
    if as_json:
        print(json.dumps(comparison.to_plain(), indent=2, allow_nan=False))
        return
    with HeldInterrupts():
        from rich.console import Console

        from gradilocks.cli.compare_view import show
    terminal = sys.stdout.isatty()
    # A pipe has no width: let every cell stand in full.
    width = None if terminal else 40 + 60 * len(paths)
    show(Console(force_terminal=terminal, highlight=False, width=width), comparison)
