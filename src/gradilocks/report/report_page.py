"""Reports on one run or several → the page about them: what stands on it, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from gradilocks.report.audit_page import panel
from gradilocks.report.figures import sections
from gradilocks.report.formatting import sentence_case
from gradilocks.report.page import Page, Pairs, Row, RunPart, Table, to_html
from gradilocks.report.run_report import Reported, in_short, main_numbers, what_ran
from gradilocks.report.tracks import Track

__all__ = ["identity", "render", "report_page"]


def render(reports: Sequence[Reported]) -> str:
    """Returns the page on one or more runs; several are drawn over each other."""
    return to_html(report_page(reports))


def report_page(reports: Sequence[Reported]) -> Page:
    """Says what stands on the page on one or more runs."""
    heading = " and ".join(one.label for one in reports[:2])
    heading += f" and {len(reports) - 2} more" if len(reports) > 2 else ""
    several = len(reports) > 1
    first = reports[0]
    colours = [number if several else None for number in range(len(reports))]
    return Page(
        title=f"{heading} · Gradilocks report",
        kind="Gradilocks report, side by side" if several else "Gradilocks report",
        heading=heading,
        identity=identity(reports),
        command="" if several else dict(what_ran(first.run))["command"],
        about="" if several else in_short(first.run),
        numbers=[_main_numbers(reports)] if several else [],
        runs=[
            RunPart(one.label, one.health, colour, tiles=() if several else _tiles(one))
            for one, colour in zip(reports, colours, strict=True)
        ],
        sections=sections(reports),
        panels=[
            panel(
                one.run.audit,
                key=f"a{number}",
                label=one.label if several else "",
                colour=colours[number],
            )
            for number, one in enumerate(reports)
            if one.run.audit is not None
        ],
        facts=[
            (one.label if several else "", colour, what_ran(one.run))
            for one, colour in zip(reports, colours, strict=True)
        ],
    )


def identity(reports: Sequence[Reported]) -> str:
    """Names the runs that a page is about, so that it may be replaced by a newer page on them."""
    headers = [
        [one.run.header.started, list(one.run.header.command), one.run.header.rank]
        for one in reports
    ]
    return hashlib.sha256(json.dumps(headers).encode()).hexdigest()[:16]


def _tiles(one: Reported) -> list[tuple[str, Pairs]]:
    return [
        (
            sentence_case(track.label) if track.several else "",
            [pair for pair in main_numbers(one, track) if pair[0] != "verdict"],
        )
        for track in one.tracks
    ]


def _main_numbers(reports: Sequence[Reported]) -> Table:
    rows, names = [], [name for name, _ in main_numbers(reports[0], None)]
    for number, one in enumerate(reports):
        followed: list[Track | None] = [*one.tracks] or [None]
        for track in followed:
            pairs = main_numbers(one, track)
            names = max(names, [name for name, _ in pairs], key=len)
            which = f", {track.label}" if track is not None and track.several else ""
            rows.append(Row(one.label + which, number, [value for _, value in pairs]))
    return Table("Main numbers", ["run", *names], rows)
