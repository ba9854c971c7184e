"""Reports on one run or several → the page about them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gradilocks.report.audit_page import panel
from gradilocks.report.destination import identity_of
from gradilocks.report.figures import sections
from gradilocks.report.page import to_html
from gradilocks.report.run_report import (
    OWN_HEADS,
    Reported,
    in_short,
    main_numbers,
    own_rows,
    what_ran,
)
from gradilocks.report.tracks import Track
from gradilocks.runfile import Header

Row = tuple[str, int, list[str]]
"""Of a table: a name, its colour and its cells."""

# What of the main numbers stands with the time and memory of runs side by side.
OF_TIME = ("lasted", "steps/s")


def render(reports: Sequence[Reported], *, plotly: str = "") -> str:
    """Returns the page on one or more runs; several are drawn over each other.

    Args:
        reports: on the runs.
        plotly: where a copy of plotly.js is, seen from the page; "" to have it in the page.
    """
    heading = " and ".join(one.label for one in reports[:2])
    heading += f" and {len(reports) - 2} more" if len(reports) > 2 else ""
    several = len(reports) > 1
    whole_run = reports[0].resources
    return to_html(
        "report.html",
        title=f"{heading} · Gradilocks report",
        kind="Gradilocks report, side by side" if several else "Gradilocks report",
        heading=heading,
        identity=identity(reports),
        plotly=plotly,
        about="" if several else in_short(reports[0].run),
        reports=reports,
        several=several,
        numbers=_main_numbers(reports),
        main_numbers=main_numbers,
        times=_times(reports),
        whole_run=[] if whole_run is None else whole_run.numbers(),
        what_ran=what_ran,
        own=_own_table(reports),
        sections=sections(reports),
        panels=[
            panel(
                one.run.audit,
                key=f"a{number}",
                label=one.label if several else "",
                colour=number if several else None,
            )
            for number, one in enumerate(reports)
            if one.run.audit is not None
        ],
    )


def identity(reports: Sequence[Reported]) -> str:
    """Names the runs that a page is about, so that it may be replaced by a newer page on them."""
    return identity_of_headers([one.run.header for one in reports])


def identity_of_headers(headers: Sequence[Header]) -> str:
    """The same, by what stands at the beginning of the run files."""
    named = [[each.started, list(each.command), each.rank] for each in headers]
    return identity_of(json.dumps(named))


def _own_table(reports: Sequence[Reported]) -> list[tuple[str, int | None, list[str]]]:
    """The heads and the rows of a table of the users' own numbers; empty if there are none."""
    several = len(reports) > 1
    rows: list[tuple[str, int | None, list[str]]] = [
        (f"{one.label}, {name}" if several else name, nth if several else None, cells)
        for nth, one in enumerate(reports)
        for name, cells in own_rows(one.run)
    ]
    return [("number", None, OWN_HEADS), *rows] if rows else []


def _times(reports: Sequence[Reported]) -> list[Row]:
    """The rows of a table of time and memory: the heads, then a run each."""
    numbers = []
    for one in reports:
        found = one.resources
        main = [] if found is None else main_numbers(one, found.track)
        of_time = [(name, value) for name, value in main if name in OF_TIME]
        numbers.append(dict([*of_time, *(found.numbers() if found else ())]))
    heads = list(dict.fromkeys(name for pairs in numbers for name in pairs))
    rows = [
        (one.label, number, [pairs.get(head, "–") for head in heads])
        for number, (one, pairs) in enumerate(zip(reports, numbers, strict=True))
    ]
    return [("run", 0, heads), *rows]


def _main_numbers(reports: Sequence[Reported]) -> list[Row]:
    """The rows of a table: the heads, then for every optimizer of every run its numbers."""
    rows = []
    heads: list[str] = []
    for number, one in enumerate(reports):
        followed: list[Track | None] = [*one.tracks] or [None]
        for track in followed:
            pairs = [pair for pair in main_numbers(one, track) if pair[0] not in OF_TIME]
            heads = max(heads, [name for name, _ in pairs], key=len)
            which = f", {track.label}" if track is not None and track.several else ""
            rows.append((one.label + which, number, [value for _, value in pairs]))
    return [("run", 0, heads), *rows]
