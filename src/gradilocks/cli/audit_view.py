"""What ``gradilocks audit`` shows: an Audit enters, its words and two tables leave."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gradilocks.lab.audit import Audit, footnotes, heading, tables


def show(audit: Audit, name: str) -> None:
    """Prints it to standard output."""
    console = Console(file=sys.__stdout__, highlight=False)
    wrap = not console.is_terminal
    console.print(Text(f"{name}: {heading(audit)}"), style="dim", soft_wrap=wrap)
    console.print()
    for number, sentence in enumerate(audit.recommendation.words):
        style = "bold" if number == 0 else ""
        console.print(Text(sentence, style=style), soft_wrap=wrap)
    console.print()
    formats, *modules = map(_table, tables(audit))
    console.print(formats)
    for table in modules:
        console.print()
        console.print(table)
        console.print()
    for line in footnotes(audit):
        console.print(Text(line), style="dim", soft_wrap=wrap)


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for place, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    return table
