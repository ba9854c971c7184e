"""What ``gradilocks demo`` leaves in its folder: the summary, the page, and each arm's own page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradilocks.cli.demo_progress import State
from gradilocks.demo.arms import MADE_BY, Arm, Setup
from gradilocks.demo.folder import PAGE, page_of, run_of, write_summary
from gradilocks.demo.summary import summarize
from gradilocks.demo.verdicts import judge

__all__ = ["command_line", "write_all"]


def command_line() -> tuple[str, ...]:
    """What was typed, without the way to the program: ``gradilocks demo --full``."""
    given = sys.argv[1:]
    return ("gradilocks", *(given if given[:1] == ["demo"] else ["demo"]))


def write_all(
    folder: Path,
    *,
    arms: Sequence[Arm],
    setup: Setup,
    seeds: Sequence[int],
    state: State,
    command: Sequence[str],
    started: float,
    seconds: float,
) -> dict[str, Any]:
    """Writes the pages and the summary; returns the summary."""
    from gradilocks.report import Drawn, experiment_page, identity, render, report_on, write
    from gradilocks.runfile import read_run

    results = state.results
    drawn, pages, versions = [], {}, {}
    for arm in arms:
        for seed in seeds:
            run = read_run(run_of(folder, arm, seed))
            reported = report_on(run, arm.title)
            drawn.append(Drawn(arm.name, seed, reported))
            if seed == min(seeds):
                page = page_of(folder, arm)
                drawing = partial(render, [reported])
                write(page, drawing, identity=identity([reported]), force=True)
                pages[arm.name] = page.name
                versions = {"torch": str(run.header.versions.get("torch"))}
    summary = summarize(
        arms=arms,
        setup=setup,
        seeds=seeds,
        results=results,
        verdicts=judge(results),
        command=command,
        started=started,
        seconds=seconds,
        versions=versions,
    )
    write(
        folder / PAGE,
        lambda: experiment_page(summary, drawn, pages=pages, generator=MADE_BY),
        identity="",
        force=True,
    )
    write_summary(folder, summary)
    return summary
