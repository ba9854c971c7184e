"""``gradilocks report``: run files enter, findings are printed, one HTML page is left behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradilocks.cli.options import flag, latest_runs, run_file
from gradilocks.cli.terminal import bar, open_in_browser, read_with_bar
from gradilocks.errors import GradilocksError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from gradilocks.report import Reported

STYLES = {"problem": "bold red", "warning": "bold yellow", "note": "bold blue"}
VERDICT_STYLES = {"healthy": "bold green", "needs a look": "bold yellow", "in trouble": "bold red"}
WIDEST = 100


def report(
    runs: Annotated[
        list[Path] | None,
        run_file("[RUN.jsonl]...", help="One run file, or several. Default: the latest in runs/."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PAGE.html",
            help="Where to write the page. By default beside the run file, with its name; for "
            "several, report.html beside the first.",
        ),
    ] = None,
    force: Annotated[
        bool, flag("--force", "Overwrite a page of Gradilocks that is about other runs.")
    ] = False,
    as_json: Annotated[
        bool, flag("--json", "Print the findings as JSON, and write a page only if -o is given.")
    ] = False,
    open_page: Annotated[
        bool, flag("--open", "Open the page in the browser when it is written.")
    ] = False,
) -> None:
    """Say what happened in a run: findings, and plots on one page.

    The page opens offline and holds everything it needs. Several run files are drawn over each
    other, one colour a run. A page that this command wrote about the same runs is replaced, one
    about other runs if --force is given. Anything else is left alone.

    \b
    Examples:
      gradilocks report
      gradilocks report runs/a.jsonl
      gradilocks report runs/a.jsonl runs/b.jsonl -o compared.html --open
      gradilocks report runs/a.jsonl --json
    """
    if as_json and open_page and output is None:
        raise typer.BadParameter("--open needs a page: give -o too, or leave --json out.")
    from gradilocks.report import choose, identity, labels, render, report_on, write

    runs = runs or latest_runs()
    target = None if as_json and output is None else choose(runs, output)
    reports = [
        report_on(read_with_bar(path), label)
        for path, label in zip(runs, labels(runs), strict=True)
    ]
    tell = print_json if as_json else conclude
    if target is not None:
        try:
            with bar(f"drawing {target.name}", after=0.0) as show:
                show(0, None)
                write(target, lambda: render(reports), identity=identity(reports), force=force)
        except GradilocksError:
            tell(reports, None)  # Who cannot have the page has asked what happened all the same.
            raise
    tell(reports, target)
    if open_page and target is not None:
        open_in_browser(target)


def conclude(reports: Sequence[Reported], page: Path | None) -> None:
    """Prints the verdict and the findings of each run, then where the page is."""
    from rich.console import Console
    from rich.text import Text

    from gradilocks.report import clean, main_numbers, own_rows, recommendation_as_line

    console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
    width = min(WIDEST, console.width)
    for one in reports:
        verdict = one.health.verdict
        lines = [
            Text.assemble(
                (f"{one.label}: " if len(reports) > 1 else "", "bold"),
                (f"{verdict[:1].upper()}{verdict[1:]}.", VERDICT_STYLES.get(verdict, "bold")),
                f" {one.health.sentence}",
            )
        ]
        for track in one.tracks:
            numbers = [f"{name} {value}" for name, value in main_numbers(one, track)[:-1]]
            lines.append(Text(track.prefix + ", ".join(numbers), style="dim"))
        own = [f"{name} {cells[0]} → {cells[1]}" for name, cells in own_rows(one.run)]
        if own:
            lines.append(Text(", ".join(own), style="dim"))
        if one.run.audit is not None:
            lines.append(Text(recommendation_as_line(one.run.audit)))
        for line in lines:
            _print(console, line, width)
        for finding in one.health.findings:
            title = Text(f"{finding.severity}: ", style=STYLES[finding.severity])
            _print(console, Text(""), width)
            _print(console, title.append(finding.title, style="bold"), width)
            _print(console, Text(finding.sentence), width, indent=2)
        _print(console, Text(""), width)
    if page is not None:
        _print(console, Text(f"Report: {clean(page)}"), None)


def print_json(reports: Sequence[Reported], page: Path | None) -> None:
    """Prints the same as one JSON object."""
    from gradilocks.report import own_numbers, recommendation_as_plain

    found = {
        "page": None if page is None else str(page),
        "runs": [
            {
                "file": str(one.run.path),
                "verdict": one.health.verdict,
                "sentence": one.health.sentence,
                "logged": {name: asdict(own) for name, own in own_numbers(one.run).items()},
                "findings": [finding.to_plain() for finding in one.health.findings],
                "audit": None if one.run.audit is None else recommendation_as_plain(one.run.audit),
            }
            for one in reports
        ],
    }
    print(json.dumps(found, indent=2))


def _print(console: Console, text: Text, width: int | None, *, indent: int = 0) -> None:
    """Prints a text; a character that the terminal's encoding lacks, as its escape."""
    from rich.text import Text

    encoding = console.encoding or "utf-8"
    plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
    if plain != text.plain:
        text = Text(plain)
    lines = [text] if width is None else text.wrap(console, width - indent)
    for line in lines:
        line.rstrip()
        console.print(Text(" " * indent) + line, soft_wrap=True)
