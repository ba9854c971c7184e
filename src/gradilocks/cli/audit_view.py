"""What ``gradilocks audit`` shows: an Audit enters, its words and two tables leave."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gradilocks.lab.audit import Audit
from gradilocks.lab.audit.text import FORMAT_COLUMNS, MODULE_COLUMNS, footnotes, heading
from gradilocks.lab.audit.text import format_rows as rows_of_formats
from gradilocks.lab.audit.text import module_rows as rows_of_modules


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
    console.print(_table(FORMAT_COLUMNS, rows_of_formats(audit)))
    modules = rows_of_modules(audit)
    if modules:
        console.print()
        console.print(_table(MODULE_COLUMNS, modules))
        console.print()
    for line in footnotes(audit):
        console.print(Text(line), style="dim", soft_wrap=wrap)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
