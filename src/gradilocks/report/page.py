"""Reports on runs → one HTML page: what stands on it, and in which order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from html import escape

from gradilocks.report.audit_panel import SCRIPTS, STYLES, Panel, panel
from gradilocks.report.document import GENERATOR, document, headed
from gradilocks.report.figures import Section, sections
from gradilocks.report.health import Finding, Health
from gradilocks.report.markup import drawing, numeral, prose, sentence_case, swatch
from gradilocks.report.run_report import Reported, in_short, main_numbers, what_ran
from gradilocks.report.tracks import Track

__all__ = ["identity", "render"]

MARKS = {"problem": "✕", "warning": "!", "note": "i"}
# From here on the digits of a number tell less than its size.
HUGE = 1e9
VERDICTS = {"healthy": "good", "needs a look": "warning", "in trouble": "problem"}


def render(reports: Sequence[Reported]) -> str:
    """Returns the page.

    Args:
        reports: one or more; several are drawn over each other.
    """
    laid_out = sections(reports)
    panels = _panels(reports)
    plots = {f.key: f.plot for section in laid_out for f in section.figures}
    for made in panels:
        plots.update(made.plots)
    title = " and ".join(one.label for one in reports[:2])
    title += f" and {len(reports) - 2} more" if len(reports) > 2 else ""
    audited = {"styles": STYLES, "scripts": SCRIPTS} if panels else {}
    return document(
        title=f"{title} · Gradilocks report",
        marks={"generator": GENERATOR, "gradilocks-runs": identity(reports)},
        header=_header(title, reports),
        main=[
            *_summaries(reports),
            *(_section(section) for section in laid_out),
            *(made.html for made in panels),
            _ran(reports),
        ],
        plots=plots,
        **audited,
    )


def identity(reports: Sequence[Reported]) -> str:
    """Names the runs that a page is about, so that it may be replaced by a newer page on them."""
    headers = [
        [one.run.header.started, list(one.run.header.command), one.run.header.rank]
        for one in reports
    ]
    return hashlib.sha256(json.dumps(headers).encode()).hexdigest()[:16]


def _header(title: str, reports: Sequence[Reported]) -> str:
    kind = "Gradilocks report" if len(reports) == 1 else "Gradilocks report, side by side"
    ran = ""
    if len(reports) == 1:
        command = dict(what_ran(reports[0].run))["command"]
        ran = (
            f'<p class="ran-short"><code>{escape(command)}</code><br>'
            f"{escape(in_short(reports[0].run))}</p>"
        )
    return headed(kind, title, ran)


def _panels(reports: Sequence[Reported]) -> list[Panel]:
    """What an audit found, for each run that carries one."""
    several = len(reports) > 1
    return [
        panel(
            one.run.audit,
            key=f"a{number}",
            heading=f"Audit{f': {swatch(number)}{escape(one.label)}' if several else ''}",
        )
        for number, one in enumerate(reports)
        if one.run.audit is not None
    ]


def _summaries(reports: Sequence[Reported]) -> list[str]:
    if len(reports) == 1:
        one = reports[0]
        return [_verdict(one.health), _tiles(one), _findings(one.health)]
    parts = [_table(reports)]
    for number, one in enumerate(reports):
        parts.append(
            f'<section class="run"><h2>{swatch(number)}{escape(one.label)}</h2>'
            f"{_verdict(one.health)}{_findings(one.health, headed=False)}</section>"
        )
    return parts


def _verdict(health: Health) -> str:
    kind = VERDICTS.get(health.verdict, "note")
    mark = {"good": "✓"}.get(kind) or MARKS[kind]
    return (
        f'<p class="verdict {kind}"><span class="mark" aria-hidden="true">{mark}</span>'
        f"<span><strong>{sentence_case(health.verdict)}.</strong> {escape(health.sentence)}"
        "</span></p>"
    )


def _findings(health: Health, *, headed: bool = True) -> str:
    if not health.findings:
        return ""
    head = "<h2>Findings</h2>" if headed else ""
    items = "\n".join(_finding(finding) for finding in health.findings)
    return f'<section aria-label="Findings" class="findings">{head}<ul>\n{items}\n</ul></section>'


def _finding(finding: Finding) -> str:
    numbers = " · ".join(
        f"{escape(name)} {escape(_shown(value))}" for name, value in finding.evidence.items()
    )
    return (
        f'<li class="{finding.severity}"><span class="mark" aria-hidden="true">'
        f"{MARKS[finding.severity]}</span><div>"
        f'<h3><span class="severity">{sentence_case(finding.severity)}: </span>'
        f"{escape(finding.title)}</h3><p>{prose(finding.sentence)}</p>"
        + (f'<p class="evidence">{numbers}</p>' if numbers else "")
        + "</div></li>"
    )


def _tiles(one: Reported) -> str:
    made = []
    for track in one.tracks:
        head = f"<h2>{escape(sentence_case(track.label))}</h2>" if track.several else ""
        pairs = [pair for pair in main_numbers(one, track) if pair[0] != "verdict"]
        cells = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{numeral(value)}</dd></div>" for name, value in pairs
        )
        made.append(f'{head}<dl class="tiles">{cells}</dl>')
    return "\n".join(made)


def _table(reports: Sequence[Reported]) -> str:
    rows, names = [], [name for name, _ in main_numbers(reports[0], None)]
    for number, one in enumerate(reports):
        shown: list[Track | None] = [*one.tracks] or [None]
        for track in shown:
            pairs = main_numbers(one, track)
            names = max(names, [name for name, _ in pairs], key=len)
            cells = "".join(f"<td>{numeral(value)}</td>" for _, value in pairs)
            which = f", {track.label}" if track is not None and track.several else ""
            label = f"{swatch(number)}{escape(one.label + which)}"
            rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    return (
        '<section><h2>Main numbers</h2><div class="scrolls" tabindex="0" role="region" '
        'aria-label="Main numbers of each run"><table><thead><tr><th scope="col">run</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _section(section: Section) -> str:
    title = f"<h2>{escape(section.title)}</h2>" if section.title else "<h2>Plots</h2>"
    hint = (
        '<p class="hint">Drag across a plot to zoom; all plots of a section follow. Double-click '
        "to see everything again. Point at a line or a cell for its numbers.</p>"
    )
    figures = "\n".join(drawing(figure) for figure in section.figures)
    return f'<section class="plots">{title}{hint}<div class="grid">\n{figures}\n</div></section>'


def _ran(reports: Sequence[Reported]) -> str:
    parts = []
    for number, one in enumerate(reports):
        head = f"<h3>{swatch(number)}{escape(one.label)}</h3>" if len(reports) > 1 else ""
        rows = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{_fact(name, value)}</dd></div>"
            for name, value in what_ran(one.run)
        )
        parts.append(f'{head}<dl class="facts">{rows}</dl>')
    return f'<section class="ran"><h2>What ran</h2>{"".join(parts)}</section>'


def _fact(name: str, value: str) -> str:
    shown = escape(value)
    return f"<code>{shown}</code>" if name in ("command", "run file") else shown


def _shown(value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.4g}" if value % 1 or abs(value) >= HUGE else f"{value:,.0f}"
