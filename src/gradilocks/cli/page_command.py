"""``gradilocks page``: a folder enters; one page over all runs in it, and their reports, leave."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from gradilocks.cli.options import flag
from gradilocks.cli.terminal import bar, forgive_encoding, held_interrupts, open_in_browser, say
from gradilocks.errors import GradilocksError

if TYPE_CHECKING:
    from gradilocks.report import ListedRun


def page(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where to look, and below it. Default: runs.")
    ] = Path("runs"),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PAGE.html",
            help="Where to write the page. Default: index.html in the folder.",
        ),
    ] = None,
    reports: Annotated[
        bool,
        typer.Option(
            "--reports/--no-reports",
            help="Make the report on each run beside it where there is none or the run has gone "
            "on, about 5 MB each. Without, link to those that are there.",
        ),
    ] = True,
    force: Annotated[
        bool, flag("--force", "Overwrite a page of Gradilocks that is about something else.")
    ] = False,
    open_page: Annotated[
        bool, flag("--open", "Open the page in the browser when it is written.")
    ] = False,
) -> None:
    """Make one page over all runs in a folder, with their reports.

    The table can be sorted and searched; it opens offline, as the reports do.

    \b
    Examples:
      gradilocks page
      gradilocks page experiments/june -o june.html --open
    """
    forgive_encoding()
    with held_interrupts():
        from gradilocks.report import list_runs, render_runs, runs_identity, settled, write
    target = output or folder / "index.html"
    settled(target)
    with bar(f"reading the runs in {folder}") as show:
        runs = list_runs(folder, progress=show)
    if not runs:
        raise GradilocksError(
            f"there are no run files in {folder}. `gradilocks run train.py` writes one."
        )
    links = _links(runs, target.absolute().parent, make=reports)
    write(
        target,
        lambda: render_runs(runs, folder=folder, links=links),
        identity=runs_identity(folder),
        force=force,
        what="page over these runs",
    )
    print(f"Page: {target}, over {len(runs):,} run{'' if len(runs) == 1 else 's'}")
    if open_page:
        open_in_browser(target)


def _links(runs: Sequence[ListedRun], home: Path, *, make: bool) -> dict[str, str]:
    """By a run's path: where its report is, seen from the page's folder."""
    links = {}
    with bar("making reports") as show:
        for done, run in enumerate(runs):
            show(done, len(runs))
            report = Path(run.path).with_suffix(".html")
            try:
                there = _is_there(Path(run.path), report, make=make)
            except GradilocksError as error:
                say(f"no report on {run.path}: {error}")
                continue
            if there:
                links[run.path] = quote(
                    os.path.relpath(report.absolute(), home).replace(os.sep, "/")
                )
    return links


def _is_there(path: Path, report: Path, *, make: bool) -> bool:
    """Whether there is a report on a run; one that is missing or older than the run is made."""
    from gradilocks.report import identity_of_headers, is_page_about, render, report_on, write
    from gradilocks.runfile import read_quietly, read_start

    identity = identity_of_headers([read_start(path)])
    there = is_page_about(report, identity)
    if not make or (there and report.stat().st_mtime >= path.stat().st_mtime):
        return there
    reported = report_on(read_quietly(path), path.stem)
    write(report, lambda: render([reported]), identity=identity, force=False)
    return True
