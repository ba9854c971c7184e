"""``gradilocks ls``: a folder enters, a table of the runs in it is shown, newest first."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradilocks.cli.options import flag
from gradilocks.cli.report_command import VERDICT_STYLES
from gradilocks.cli.terminal import bar, forgive_encoding, held_interrupts, printable, say

if TYPE_CHECKING:
    from gradilocks.report import ListedRun

STATE_STYLES = {"running": "cyan", "killed": "red", "error": "red", "exit": "red"}


def ls(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where to look, and below it. Default: runs.")
    ] = Path("runs"),
    as_json: Annotated[
        bool, flag("--json", "Print everything that is known of each run as JSON.")
    ] = False,
) -> None:
    """List runs, newest first: steps, the loss at the end, verdict.

    The verdict is that of `gradilocks report`. What was found in a file is kept until the file
    changes, so that only new runs are read.

    \b
    Examples:
      gradilocks ls
      gradilocks ls experiments/june --json
    """
    forgive_encoding()
    with held_interrupts():
        from gradilocks.report import list_runs
    with bar(f"reading the runs in {folder}") as show:
        runs = list_runs(folder, progress=show)
    if as_json:
        print(json.dumps([run.to_plain() for run in runs], indent=2))
    elif runs:
        show_table(runs)
    else:
        say(f"there are no run files in {folder}. `gradilocks run train.py` writes one.")


def show_table(runs: list[ListedRun]) -> None:
    """Prints the runs, one a row."""
    with held_interrupts():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(force_terminal=terminal, highlight=False, width=None if terminal else 200)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("started", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("loss, end", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(printable(run.name)),
            moment(run.started),
            f"{run.steps:,}",
            Text(run.loss.rpartition("→")[2].strip() or "-"),
            Text(run.verdict, style=VERDICT_STYLES.get(run.verdict, "")),
            Text(run.state, style=STATE_STYLES.get(run.state, "")),
        )
    console.print(table)


def moment(seconds: float) -> str:
    """A time of day, by the clock of whoever looks."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "not known"
