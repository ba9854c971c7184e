"""What ``gradilocks demo`` says before and after: a Setup or a summary enters, text leaves.

In a pipe or a file it is plain lines without control codes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradilocks.cli.demo_text import table_rows, verdict_words
from gradilocks.cli.program import program
from gradilocks.demo.arms import Setup
from gradilocks.demo.folder import PAGE, SUMMARY

__all__ = ["conclude", "introduce", "open_console"]

STYLES = {True: "bold green", False: "bold red", None: "bold yellow"}


def open_console(*, quiet: bool) -> Console:
    """Opens standard output: with control codes only if it is a terminal, mute if ``quiet``."""
    return Console(quiet=quiet, force_terminal=sys.stdout.isatty(), highlight=False)


def introduce(console: Console, setup: Setup) -> None:
    """Says what is about to be compared."""
    console.print(Text("The Goldilocks experiment", style="bold"))
    console.print(
        f"A {setup.layers}-layer GPT learns Python's own documentation, on the CPU. fp16 is "
        "emulated: stored in fp16, computed in fp32, as a tensor core does. One micro-batch of "
        f"{setup.micro_batch:,} characters stands for {setup.accumulation:,} equal ones: a global "
        f"batch of {setup.global_batch:,} tokens."
    )
    console.print()


def conclude(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Prints the table, the three verdicts, and where to look next."""
    heads, *rows = table_rows(summary)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    console.print(
        Text(
            "norm: the largest, before clipping; lost: of the gradients entering the last layer, "
            "the share that fp16 rounds to zero at the first step",
            style="dim",
        )
    )
    console.print()
    for verdict in summary["verdicts"]:
        title = Text.assemble(
            (verdict["name"].capitalize(), "bold"),
            ": ",
            (verdict_words(verdict["holds"]), STYLES[verdict["holds"]]),
        )
        console.print(title)
        console.print(Padding(Text(verdict["sentence"]), (0, 0, 0, 2)))
    console.print()
    for what, where in (
        ("the page", str(folder / PAGE)),
        ("the numbers", str(folder / SUMMARY)),
        ("each arm", ", ".join(sorted({f"{run['arm']}.html" for run in summary["runs"]}))),
        ("compare", f"{program()} compare {folder}/*.jsonl"),
    ):
        console.print(f"{what:<11}  {where}", soft_wrap=True, markup=False)
