"""An audit, as plain data → its panel: the recommendation, two pictures, two tables; as HTML.

It shows the recommended format first; a switch shows another. What the switch changes in the table
of modules is in a data block, so that a page carries the numbers and not a table a format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gradilocks.report.audit_figures import KINDS, kinds_of, module_figure, window_figure
from gradilocks.report.audited import Audit, Fate, Format, Shares, UnreadableAudit, audited
from gradilocks.report.document import embedded
from gradilocks.report.formatting import count, listed, percent, power
from gradilocks.report.markup import drawing, numeral, prose, raised

__all__ = ["SCRIPTS", "STYLES", "Panel", "panel", "panel_of"]

# The assets of a page with a panel on it.
STYLES = ("page.css", "audit.css")
SCRIPTS = ("page.js", "audit.js")

COLUMNS = ("lost", "subnormal", "overflow", "headroom")
KEPT = '<span class="kept">keep in higher precision</span>'


@dataclass(frozen=True)
class Panel:
    """The HTML, and the plots in it by the id of their place."""

    html: str
    plots: dict[str, Any]


def panel(data: Mapping[str, Any], *, key: str, heading: str) -> Panel:
    """Lays out an audit; one that cannot be read becomes a sentence that says so.

    Args:
        data: as the run file's line holds it.
        key: what the ids on the page begin with.
        heading: as HTML.
    """
    try:
        return panel_of(audited(data), key=key, heading=heading)
    except UnreadableAudit as error:
        said = escape(f"The audit in the run file could not be shown: {error}.")
        return Panel(
            f'<section class="audit"><h2>{heading}</h2><p class="unshown">{said}</p></section>', {}
        )


def panel_of(audit: Audit, *, key: str, heading: str = "") -> Panel:
    """Lays out an audit that has been read."""
    figures = [window_figure(f"{key}-window", audit)]
    modules = module_figure(f"{key}-modules", audit)
    chosen = audit.first
    level = "h3" if heading else "h2"  # On a report, the parts stand below the panel's heading.
    parts = [
        f"<h2>{heading}</h2>" if heading else "",
        _recommendation(audit),
        _tiles(audit),
        f"<{level}>Where the gradients lie</{level}>",
        _switch(f"{key}-format", "Format", _choices(audit)),
        f'<p class="format-words" aria-live="polite">{_said(chosen.words)}</p>',
        f'<div class="plots grid">{drawing(figures[0])}</div>',
    ]
    if modules is not None:
        figures.append(modules)
        kinds = [(f"of {kind}", KINDS[kind], "") for kind in kinds_of(audit)]
        parts.append(_switch(f"{key}-kind", "Gradients", kinds) if len(kinds) > 1 else "")
        parts.append(f'<div class="plots grid">{drawing(modules)}</div>')
    parts.append(_formats(audit, level))
    parts.append(_modules(audit, level))
    parts.append(f'<script type="application/json" class="told">{embedded(_told(audit))}</script>')
    label = escape("Audit of the gradients")
    html = "\n".join(part for part in parts if part)
    return Panel(
        f'<section class="audit" aria-label="{label}">{html}</section>',
        {figure.key: figure.plot for figure in figures},
    )


def _recommendation(audit: Audit) -> str:
    kind, mark = ("good", "✓") if audit.is_good_news else ("warning", "!")
    first, *others = audit.words or (f"{audit.in_short}.",)
    said = " ".join(map(_said, others))
    return (
        f'<p class="verdict {kind}"><span class="mark" aria-hidden="true">{mark}</span>'
        f"<span><strong>{_said(first)}</strong> {said}</span></p>"
    )


def _tiles(audit: Audit) -> str:
    before, after = audit.first.fate.unscaled, audit.first.fate.scaled
    there = [made for made in (audit.parameters, audit.activations) if made is not None]
    values = sum(made.total + made.zeros + made.nonfinite for made in there)
    pairs = [
        ("format", audit.chosen),
        ("initial scale", power(audit.scale)),
        (f"lost in {audit.first.name}", f"{_share(before.lost)} → {_share(after.lost)}"),
        ("headroom", _doublings(after.headroom)),
        ("modules to keep", f"{len(audit.keep):,} of {len(audit.modules):,}"),
        ("seen", f"{count(audit.steps, 'step')}"),
        ("values", f"{values:,}"),
        ("computed in", audit.precision),
    ]
    if audit.loss_scale != 1:
        pairs.append(("scale divided out", power(audit.loss_scale)))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{numeral(_unbroken(value))}</dd></div>"
        for name, value in pairs
    )
    return f'<dl class="tiles">{cells}</dl>'


def _choices(audit: Audit) -> list[tuple[str, str, str]]:
    return [
        (each.name, each.name, "recommended" if each.name == audit.chosen else "")
        for each in audit.formats
    ]


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


def _formats(audit: Audit, level: str) -> str:
    rows = []
    for each in audit.formats:
        chosen = " <small>recommended</small>" if each.name == audit.chosen else ""
        cells = f"<td>{numeral(power(each.scale))}</td>{_cells(_both(each.fate))}"
        answer = "yes" if each.holds else "no"
        holds = f'<td class="group {answer}">{answer}</td>'
        rows.append(
            f'<tr{" class=chosen" if chosen else ""}><th scope="row">{escape(each.name)}{chosen}'
            f'</th>{cells}{holds}<td class="names">'
            f"{_kept(each)}</td></tr>"
        )
    heads = "".join(f'<th scope="col"{group}>{name}</th>' for name, group in _grouped(COLUMNS * 2))
    return (
        f"<{level}>Format by format</{level}>"
        f'<p class="hint">{HOW_COUNTED}</p>'
        '<div class="scrolls" tabindex="0" role="region" aria-label="What each format would hold">'
        '<table class="formats"><thead><tr><th scope="col" rowspan="2">format</th>'
        '<th scope="col" rowspan="2">initial scale</th>'
        '<th scope="colgroup" class="group" colspan="4">at scale 1</th>'
        '<th scope="colgroup" class="group" colspan="4">at its scale</th>'
        '<th scope="col" rowspan="2" class="group">holds</th>'
        '<th scope="col" rowspan="2">keep</th></tr>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _kept(each: Format) -> str:
    """The modules to keep: in a narrow window only how many, the others show some names."""
    if not each.keep:
        return "none"
    names = escape(listed(each.keep))
    return f'<span class="few">{len(each.keep):,}</span><span class="many">{names}</span>'


HOW_COUNTED = (
    "Shares of the values that are finite and not zero. Lost: rounded to zero. Headroom: how many "
    "doublings are left before the largest value overflows; negative if it does."
)


def _modules(audit: Audit, level: str) -> str:
    if not audit.modules:
        return ""
    chosen = audit.first
    kept = set(chosen.keep)
    rows = []
    for module in audit.modules:
        name = module.name or "(the model itself)"
        rows.append(
            f'<tr{" class=keep" if module.name in kept else ""}><th scope="row">{escape(name)} '
            f"<small>{escape(module.type)}</small>{KEPT if module.name in kept else ''}</th>"
            f"{_cells(_both(module.fates[chosen.name]))}</tr>"
        )
    heads = "".join(f'<th scope="col"{group}>{name}</th>' for name, group in _grouped(COLUMNS * 2))
    return (
        f'<{level}>Module by module, in <span class="shown-format">{escape(chosen.name)}</span>'
        f"</{level}>"
        '<div class="scrolls tall" tabindex="0" role="region" aria-label="What becomes of the '
        'gradients of each module"><table class="modules"><thead>'
        '<tr><th scope="col" rowspan="2">module</th>'
        '<th scope="colgroup" class="group" colspan="4">at scale 1</th>'
        '<th scope="colgroup" class="group" colspan="4">at scale <span class="shown-scale">'
        f"{numeral(power(chosen.scale))}</span></th></tr>"
        f"<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _told(audit: Audit) -> dict[str, Any]:
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
    return [
        None if value is None else float(f"{value:.4g}")
        for shares in (fate.unscaled, fate.scaled)
        for value in (getattr(shares, column) for column in COLUMNS)
    ]


def _both(fate: Fate) -> list[str]:
    return [*_numbers(fate.unscaled), *_numbers(fate.scaled)]


def _numbers(shares: Shares) -> list[str]:
    whole = (shares.lost, shares.subnormal, shares.overflow)
    return [*map(_share, whole), _doublings(shares.headroom)]


def _cells(numbers: Sequence[str]) -> str:
    return "".join(f"<td{group}>{escape(cell)}</td>" for cell, group in _grouped(numbers))


def _grouped(cells: Sequence[str]) -> list[tuple[str, str]]:
    """Marks where the numbers at one scale end and those at the next begin."""
    return [(cell, "" if i % len(COLUMNS) else ' class="group"') for i, cell in enumerate(cells)]


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _said(sentence: str) -> str:
    return raised(prose(sentence))


def _unbroken(value: str) -> str:
    return value.replace(" %", "\u00a0%")


def _doublings(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}".replace("-", "−")
