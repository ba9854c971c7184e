"""An audit's record → its panel on a report, a page of its own, or one line for a terminal.

The panel has the recommendation, two pictures and two tables. It shows the recommended format
first; a switch shows another. What the switch changes in the table of modules is in a data block,
so that a page carries the numbers and not a table a format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from gradilocks.lab import AuditRecord, Fate, FormatFinding, Shares, UnreadableAudit
from gradilocks.report.audit_figures import (
    KINDS,
    kinds_of,
    label_of,
    module_figure,
    shown_first,
    window_figure,
)
from gradilocks.report.document import GENERATOR, document, embedded, headed
from gradilocks.report.markup import drawing, numeral, prose, raised
from gradilocks.report.output import check, write
from gradilocks.report.words import clean, count, listed, percent, power

__all__ = [
    "SCRIPTS",
    "STYLES",
    "Panel",
    "audit_page",
    "check_audit_page",
    "panel",
    "recommendation_as_line",
    "recommendation_as_plain",
    "write_audit_page",
]

# The assets of a page with a panel on it.
STYLES = ("page.css", "audit.css")
SCRIPTS = ("page.js", "audit.js")

UNREADABLE = "The audit in the run file could not be shown:"
COLUMNS = ("lost", "subnormal", "overflow", "headroom")
KEPT = '<span class="kept">keep in higher precision</span>'
HOW_COUNTED = (
    "Shares of the values that are finite and not zero. Lost: rounded to zero. Headroom: how many "
    "doublings are left before the largest value overflows; negative if it does."
)


@dataclass(frozen=True)
class Panel:
    """The HTML, and the plots in it by the id of their place."""

    html: str
    plots: dict[str, Any]


# --- on a terminal -------------------------------------------------------------------------------


def recommendation_as_line(data: Mapping[str, Any]) -> str:
    """What the audit of a run file recommends, or that it cannot be read, in a line."""
    try:
        return f"Audit: {_in_short(AuditRecord.from_plain(data))}."
    except UnreadableAudit as error:
        return f"{UNREADABLE} {error.reason}."


def recommendation_as_plain(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the audit of a run file recommends, for JSON; None if it cannot be read."""
    try:
        said = AuditRecord.from_plain(data).recommendation
    except UnreadableAudit:
        return None
    texts = {name: [clean(text) for text in getattr(said, name)] for name in ("keep", "words")}
    return {**asdict(said), **texts}


def _in_short(audit: AuditRecord) -> str:
    said = audit.recommendation
    kept = f", with {listed(said.keep)} in higher precision" if said.keep else ""
    at = "without a loss scale" if said.scale == 1 else f"at scale {power(said.scale)}"
    return f"{clean(said.format)} {at}{kept}"


# --- a page --------------------------------------------------------------------------------------


def write_audit_page(path: Path, audit: AuditRecord, *, title: str, force: bool = False) -> None:
    """Writes one HTML page that opens offline and holds everything it needs.

    Args:
        path: where. An audit page of the same title is replaced.
        audit: what the audit found.
        title: what was audited, as in "train.py".
        force: whether to replace another page of Gradilocks' too.

    Raises:
        GradilocksError: something else is there, or the place cannot be written.
    """
    page = audit_page(audit, title=title)
    write(path, lambda: page, force=force, **_place(title))


def check_audit_page(path: Path, *, title: str) -> None:
    """Says beforehand what would keep the page from being written.

    Raises:
        GradilocksError: something else is there, or the place cannot be written.
    """
    check(path, **_place(title))


def audit_page(audit: AuditRecord, *, title: str) -> str:
    """Returns the page."""
    made = panel(audit, key="a0")
    return document(
        title=f"{clean(title)} · Gradilocks audit",
        marks={"generator": GENERATOR, "gradilocks-runs": _place(title)["identity"]},
        header=headed("Gradilocks audit", clean(title)),
        main=[made.html],
        plots=made.plots,
        styles=STYLES,
        scripts=SCRIPTS,
    )


def _place(title: str) -> dict[str, str]:
    """What `output` must know of a page to tell whether it may take another's place."""
    named = f"audit {title}".encode("utf-8", "backslashreplace")
    return {
        "identity": hashlib.sha256(named).hexdigest()[:16],
        "what": f"audit of {clean(title)}",
        "option": "--html",
        "way_out": "choose another name, or remove it first",
    }


# --- a panel -------------------------------------------------------------------------------------


def panel(audit: AuditRecord | Mapping[str, Any], *, key: str, heading: str = "") -> Panel:
    """Lays out an audit; one of a run file that cannot be read becomes a sentence that says so.

    Args:
        audit: or as the run file's line holds it.
        key: what the ids on the page begin with.
        heading: as HTML; none on a page of its own.
    """
    if not isinstance(audit, AuditRecord):
        try:
            audit = AuditRecord.from_plain(audit)
        except UnreadableAudit as error:
            said = escape(f"{UNREADABLE} {error.reason}.")
            html = f'<h2>{heading}</h2><p class="unshown">{said}</p>'
            return Panel(f'<section class="audit">{html}</section>', {})
    figures = [window_figure(f"{key}-window", audit)]
    modules = module_figure(f"{key}-modules", audit)
    level = "h3" if heading else "h2"  # On a report, the parts stand below the panel's heading.
    parts = [
        f"<h2>{heading}</h2>" if heading else "",
        _recommendation(audit),
        _tiles(audit),
        f"<{level}>Where the gradients lie</{level}>",
        _switch(
            f"{key}-format",
            "Format",
            [
                (each.name, each.name, "recommended" if each is audit.recommended else "")
                for each in audit.formats
            ],
        ),
        f'<p class="format-words" aria-live="polite">{_said(shown_first(audit).words)}</p>',
        f'<div class="plots grid">{drawing(figures[0])}</div>',
    ]
    if modules is not None:
        figures.append(modules)
        kinds = [(f"of {kind}", KINDS[kind], "") for kind in kinds_of(audit)]
        parts.append(_switch(f"{key}-kind", "Gradients", kinds) if len(kinds) > 1 else "")
        parts.append(f'<div class="plots grid">{drawing(modules)}</div>')
    parts.append(_formats(audit, level))
    parts.append(_modules(audit, level))
    data = embedded(_by_format(audit))
    parts.append(f'<script type="application/json" class="told">{data}</script>')
    html = "\n".join(part for part in parts if part)
    return Panel(
        f'<section class="audit" aria-label="Audit of the gradients">{html}</section>',
        {figure.key: figure.plot for figure in figures},
    )


def _recommendation(audit: AuditRecord) -> str:
    chosen = audit.recommended
    nonfinite = audit.parameters.nonfinite or audit.activations.nonfinite
    good = chosen is not None and chosen.holds and not nonfinite
    kind, mark = ("good", "✓") if good else ("warning", "!")
    first, *others = audit.recommendation.words or (f"{_in_short(audit)}.",)
    said = " ".join(map(_said, others))
    return (
        f'<p class="verdict {kind}"><span class="mark" aria-hidden="true">{mark}</span>'
        f"<span><strong>{_said(first)}</strong> {said}</span></p>"
    )


def _tiles(audit: AuditRecord) -> str:
    first = shown_first(audit)
    lost, *_, headroom = _numbers(first.scaled)
    values = sum(h.values + h.zeros + h.nonfinite for h in (audit.parameters, audit.activations))
    pairs = [
        ("format", clean(audit.recommendation.format)),
        ("initial scale", power(audit.recommendation.scale)),
        (f"lost in {first.name}", f"{_numbers(first.unscaled)[0]} → {lost}"),
        ("headroom", headroom),
        ("modules to keep", f"{len(audit.recommendation.keep):,} of {len(audit.modules):,}"),
        ("seen", f"{count(audit.steps, 'step')}"),
        ("values", f"{values:,}"),
        ("computed in", clean(audit.precision)),
    ]
    if audit.loss_scale != 1:
        pairs.append(("scale divided out", power(audit.loss_scale)))
    cells = ""
    for name, value in pairs:
        unbroken = value.replace(" %", "\u00a0%")
        cells += f"<div><dt>{escape(name)}</dt><dd>{numeral(unbroken)}</dd></div>"
    return f'<dl class="tiles">{cells}</dl>'


def _switch(name: str, legend: str, choices: Sequence[tuple[str, str, str]]) -> str:
    """A row of radio buttons; without a script they could do nothing, and stay hidden."""
    first = next((value for value, _, remark in choices if remark), choices[0][0])
    labels = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"'
        f"{' checked' if value == first else ''}><span>{escape(words)}"
        f"{f' <small>{escape(remark)}</small>' if remark else ''}</span></label>"
        for value, words, remark in choices
    )
    return f'<fieldset class="switch" hidden><legend>{legend}</legend>{labels}</fieldset>'


def _formats(audit: AuditRecord, level: str) -> str:
    rows = []
    for each in audit.formats:
        chosen = " <small>recommended</small>" if each is audit.recommended else ""
        answer = "yes" if each.holds else "no"
        rows.append(
            f'<tr{" class=chosen" if chosen else ""}><th scope="row">{escape(each.name)}{chosen}'
            f"</th><td>{numeral(power(each.scale))}</td>{_cells(each.fate)}"
            f'<td class="group {answer}">{answer}</td><td class="names">{_kept(each)}</td></tr>'
        )
    before = '<th scope="col" rowspan="2">format</th><th scope="col" rowspan="2">initial scale</th>'
    after = '<th scope="col" rowspan="2" class="group">holds</th>'
    after += '<th scope="col" rowspan="2">keep</th>'
    table = _table("formats", before, "its scale", after, rows)
    return (
        f'<{level}>Format by format</{level}><p class="hint">{HOW_COUNTED}</p>'
        '<div class="scrolls" tabindex="0" role="region" aria-label="What each format would hold">'
        f"{table}</div>"
    )


def _kept(each: FormatFinding) -> str:
    """The modules to keep: in a narrow window only how many, the others show some names."""
    if not each.keep:
        return "none"
    names = escape(listed(each.keep))
    return f'<span class="few">{len(each.keep):,}</span><span class="many">{names}</span>'


def _modules(audit: AuditRecord, level: str) -> str:
    if not audit.modules:
        return ""
    first = shown_first(audit)
    rows = []
    for module in audit.modules:
        kept = module.name in first.keep
        rows.append(
            f'<tr{" class=keep" if kept else ""}><th scope="row">{escape(label_of(module))} '
            f"<small>{escape(clean(module.kind))}</small>{KEPT if kept else ''}</th>"
            f"{_cells(module.fates[first.name])}</tr>"
        )
    scale = f'scale <span class="shown-scale">{numeral(power(first.scale))}</span>'
    table = _table("modules", '<th scope="col" rowspan="2">module</th>', scale, "", rows)
    return (
        f'<{level}>Module by module, in <span class="shown-format">{escape(first.name)}</span>'
        f'</{level}><div class="scrolls tall" tabindex="0" role="region" aria-label="What becomes '
        f'of the gradients of each module">{table}</div>'
    )


def _table(name: str, before: str, at: str, after: str, rows: Sequence[str]) -> str:
    """Columns for the shares at scale 1 and at another scale, between others."""
    heads = "".join(
        f'<th scope="col"{_group(place)}>{column}</th>' for place, column in enumerate(COLUMNS * 2)
    )
    return (
        f'<table class="{name}"><thead><tr>{before}'
        '<th scope="colgroup" class="group" colspan="4">at scale 1</th>'
        f'<th scope="colgroup" class="group" colspan="4">at {at}</th>{after}</tr>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _by_format(audit: AuditRecord) -> dict[str, Any]:
    """What the switch needs: by format its words, its scale, what to keep, and of every module
    the numbers, to sort by, and how they are written."""
    return {
        each.name: {
            "words": _said(each.words),
            "scale": numeral(power(each.scale)),
            "keep": [i for i, module in enumerate(audit.modules) if module.name in set(each.keep)],
            "rows": [_row(module.fates[each.name]) for module in audit.modules],
            "cells": [_both(module.fates[each.name]) for module in audit.modules],
        }
        for each in audit.formats
    }


def _row(fate: Fate) -> list[float | None]:
    values = [
        None if shares.of_nothing else getattr(shares, column)
        for shares in fate
        for column in COLUMNS
    ]
    return [None if value is None else float(f"{value:.4g}") for value in values]


def _both(fate: Fate) -> list[str]:
    return [*_numbers(fate.unscaled), *_numbers(fate.scaled)]


def _numbers(shares: Shares) -> list[str]:
    if shares.of_nothing:
        return ["–"] * len(COLUMNS)
    headroom = "–" if shares.headroom is None else f"{shares.headroom:.1f}".replace("-", "−")
    return [*map(percent, (shares.lost, shares.subnormal, shares.overflow)), headroom]


def _cells(fate: Fate) -> str:
    return "".join(
        f"<td{_group(place)}>{escape(cell)}</td>" for place, cell in enumerate(_both(fate))
    )


def _group(place: int) -> str:
    """Marks where the numbers at one scale end and those at the next begin."""
    return "" if place % len(COLUMNS) else ' class="group"'


def _said(sentence: str) -> str:
    return raised(prose(clean(sentence)))
