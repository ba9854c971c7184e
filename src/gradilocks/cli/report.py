"""``gradilocks report``: run files enter, findings are printed, one HTML page is left behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gradilocks.cli.options import run_file
from gradilocks.errors import GradilocksError


def report(
    runs: Annotated[list[Path], run_file("RUN.jsonl", help="One run file, or several.")],
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
        bool,
        typer.Option("--force", help="Overwrite a page of Gradilocks that is about other runs."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the findings as JSON, and write a page only if -o is given."
        ),
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser when it is written.")
    ] = False,
) -> None:
    """Say what happened in a run: findings, and plots on one page.

    The page opens offline and holds everything it needs. Several run files are drawn over each
    other, one colour a run. A page that this command wrote about the same runs is replaced, one
    about other runs if --force is given. Anything else is left alone.

    \b
    Examples:
      gradilocks report runs/a.jsonl
      gradilocks report runs/a.jsonl runs/b.jsonl -o compared.html --open
      gradilocks report runs/a.jsonl --json
    """
    if as_json and open_page and output is None:
        raise typer.BadParameter("--open needs a page: give -o too, or leave --json out.")
    # Here and not above: --help must not wait for rich.
    from gradilocks.cli.report_view import conclude, print_json, progress_bar
    from gradilocks.report import choose, identity, labels, render, report_on, write
    from gradilocks.runfile import read_run

    target = None if as_json and output is None else choose(runs, output)
    with progress_bar() as advance:
        reports = []
        for path, label in zip(runs, labels(runs), strict=True):
            run = read_run(path, progress=partial(advance, f"reading {path.name}"))
            reports.append(report_on(run, label))
        if target is not None:
            advance(f"drawing {target.name}", 0, None)
            write(target, lambda: render(reports), identity=identity(reports), force=force)
    if as_json:
        print_json(reports, target)
    else:
        conclude(reports, target)
    if open_page and target is not None:
        _open(target)


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        raise GradilocksError(f"no browser was found; open {page} yourself.")
