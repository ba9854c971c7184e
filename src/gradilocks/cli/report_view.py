"""What ``gradilocks report`` shows: reports enter, text or JSON leaves; a bar while one waits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gradilocks.report import (
    Finding,
    Reported,
    clean,
    main_numbers,
    recommendation_as_line,
    recommendation_as_plain,
)

STYLES = {"problem": "bold red", "warning": "bold yellow", "note": "bold blue"}
VERDICT_STYLES = {"healthy": "bold green", "needs a look": "bold yellow", "in trouble": "bold red"}
WIDEST = 100

Advance = Callable[[str, int, int | None], None]


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yields what to call with (what is done, how much of it, of how much); mute in a pipe."""
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda what, done, size: None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=32),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("")

        def advance(what: str, done: int, size: int | None) -> None:
            progress.update(task, description=what, completed=done, total=size)

        yield advance


def conclude(reports: Sequence[Reported], page: Path | None) -> None:
    """Prints the verdict and the findings of each run, then where the page is."""
    console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
    width = min(WIDEST, console.width)
    for one in reports:
        health = one.health
        line = Text()
        if len(reports) > 1:
            line.append(f"{one.label}: ", style="bold")
        verdict = health.verdict[:1].upper() + health.verdict[1:]
        line.append(f"{verdict}.", style=VERDICT_STYLES.get(health.verdict, "bold"))
        line.append(f" {health.sentence}")
        _print(console, line, width)
        for track in one.tracks:
            numbers = [f"{name} {value}" for name, value in main_numbers(one, track)[:-1]]
            of = f"{track.label}: " if track.several else ""
            _print(console, Text(of + ", ".join(numbers), style="dim"), width)
        if one.run.audit is not None:
            _print(console, Text(recommendation_as_line(one.run.audit)), width)
        for finding in health.findings:
            _print(console, Text(""), width)
            _show(console, finding, width)
        _print(console, Text(""), width)
    if page is not None:
        _print(console, Text(f"Report: {clean(page)}"), None)


def print_json(reports: Sequence[Reported], page: Path | None) -> None:
    """Prints the same as one JSON object."""
    found = {
        "page": None if page is None else str(page),
        "runs": [
            {
                "file": str(one.run.path),
                "verdict": one.health.verdict,
                "sentence": one.health.sentence,
                "findings": [finding.to_plain() for finding in one.health.findings],
                "audit": None if one.run.audit is None else recommendation_as_plain(one.run.audit),
            }
            for one in reports
        ],
    }
    print(json.dumps(found, indent=2))


def _show(console: Console, finding: Finding, width: int) -> None:
    line = Text()
    line.append(f"{finding.severity}: ", style=STYLES[finding.severity])
    line.append(finding.title, style="bold")
    _print(console, line, width)
    _print(console, Text(finding.sentence), width, indent=2)


def _print(console: Console, text: Text, width: int | None, *, indent: int = 0) -> None:
    """Prints a text; a character that the terminal's encoding lacks, as its escape."""
    encoding = console.encoding or "utf-8"
    plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
    if plain != text.plain:
        text = Text(plain)
    lines = [text] if width is None else text.wrap(console, width - indent)
    for line in lines:
        line.rstrip()
        console.print(Text(" " * indent) + line, soft_wrap=True)
