"""``gradilocks page``: a folder enters; one page over all runs in it, and their reports, leave."""

from __future__ import annotations

import hashlib
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
            "on. They share one copy of plotly.js, in the folder. Without, link to those that are "
            "there.",
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

    The table can be sorted and searched; it opens offline, as the reports do. Those draw their
    plots by one file in the folder; `gradilocks report` makes one that can be sent to somebody.

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
    plotly = None
    if reports:
        try:
            plotly = _shared(folder)
        except GradilocksError as error:  # Those that are there are linked all the same.
            say(f"no reports are made: {error}")
    links = _links(runs, target.absolute().parent, plotly=plotly)
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


def _shared(folder: Path) -> Path:
    """The copy of plotly.js that reports share, written if it is not there."""
    from gradilocks.report import plotly_script, written_whole

    script = plotly_script()
    place = folder / f"plotly-{hashlib.sha256(script.encode()).hexdigest()[:8]}.js"
    if not place.is_file():
        with written_whole(place, given=place) as unfinished:
            unfinished.write_text(script, encoding="utf-8")
    return place


def _links(runs: Sequence[ListedRun], home: Path, *, plotly: Path | None) -> dict[str, str]:
    """By a run's path: where its report is, seen from the page's folder.

    Args:
        runs: of the page.
        home: the page's folder.
        plotly: what reports draw by; None if none is to be made.
    """
    links = {}
    with bar("making reports") as show:
        for done, run in enumerate(runs):
            show(done, len(runs))
            report = Path(run.path).with_suffix(".html")
            try:
                there = _is_there(Path(run.path), report, plotly=plotly)
            except GradilocksError as error:
                say(f"no report on {run.path}: {error}")
                continue
            if there:
                links[run.path] = _link(report, home)
    return links


def _link(file: Path, home: Path) -> str:
    return quote(os.path.relpath(file.absolute(), home).replace(os.sep, "/"))


def _is_there(path: Path, report: Path, *, plotly: Path | None) -> bool:
    """Whether there is a report on a run; one that is missing or older than the run is made."""
    from gradilocks.report import identity_of_headers, is_page_about, render, report_on, write
    from gradilocks.runfile import read_quietly, read_start

    identity = identity_of_headers([read_start(path)])
    there = is_page_about(report, identity)
    if plotly is None or (there and report.stat().st_mtime >= path.stat().st_mtime):
        return there
    reported = report_on(read_quietly(path), path.stem)
    src = _link(plotly, report.absolute().parent)
    write(report, lambda: render([reported], plotly=src), identity=identity, force=False)
    return True
