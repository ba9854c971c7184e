"""An audit, as plain data → its panel on a report, and a page of its own.

What enters is what `gradilocks audit` found, as in its JSON and in a run file's ``audit`` line. The
panel shows the recommended format first; a switch shows another. What the switch changes in the
table of modules is in a data block, so that a page carries the numbers and not a table a format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradilocks.errors import GradilocksError
from gradilocks.report.audit_figures import KINDS, kinds_of, module_figure, window_figure
from gradilocks.report.audited import Audit, Fate, Shares, UnreadableAudit, audited
from gradilocks.report.destination import check, write
from gradilocks.report.formatting import clean, count, numeral, percent, power, prose, raised
from gradilocks.report.page import FormatRow, Page, Pairs, Panel, to_html

__all__ = ["audit_page", "check_audit_page", "panel", "write_audit_page"]

COLUMNS = ("lost", "subnormal", "overflow", "headroom")


def write_audit_page(
    path: Path, audit: Mapping[str, Any], *, title: str, force: bool = False
) -> None:
    """Writes one HTML page that opens offline and holds everything it needs.

    Args:
        path: where. An audit page of the same title is replaced.
        audit: what the audit found, as plain data.
        title: what was audited, as in "train.py".
        force: whether to replace another page of Gradilocks' too.

    Raises:
        GradilocksError: the data are not an audit's, something else is there, or the place cannot
            be written.
    """
    page = audit_page(audit, title=title)
    write(Path(path), lambda: page, force=force, **_place(title))


def check_audit_page(path: Path, *, title: str) -> None:
    """Says beforehand what would keep the page from being written.

    Raises:
        GradilocksError: something else is there, or the place cannot be written.
    """
    check(path, **_place(title))


def audit_page(audit: Mapping[str, Any], *, title: str) -> str:
    """Returns the page.

    Raises:
        GradilocksError: the data are not an audit's.
    """
    try:
        made = _panel(audited(audit), key="a0")
    except UnreadableAudit as error:
        raise GradilocksError(f"the audit cannot be shown: {error}.") from error
    return to_html(
        Page(
            title=f"{clean(title)} · Gradilocks audit",
            kind="Gradilocks audit",
            heading=clean(title),
            identity=_place(title)["identity"],
            panels=[made],
        )
    )


def _place(title: str) -> dict[str, str]:
    """What `destination` must know of a page to tell whether it may take another's place."""
    named = f"audit {title}".encode("utf-8", "backslashreplace")
    return {
        "identity": hashlib.sha256(named).hexdigest()[:16],
        "what": f"audit of {clean(title)}",
        "option": "--html",
        "way_out": "choose another name, or remove it first",
    }


def panel(data: Mapping[str, Any], **place: Any) -> Panel:
    """Lays out an audit; one that cannot be read becomes a sentence that says so.

    Args:
        data: as the run file's line holds it.
        place: `key`, `label` and `colour` of the Panel.
    """
    try:
        return _panel(audited(data), on_report=True, **place)
    except UnreadableAudit as error:
        said = f"The audit in the run file could not be shown: {error}."
        return Panel(on_report=True, unreadable=said, **place)


def _panel(audit: Audit, *, key: str, **place: Any) -> Panel:
    modules = module_figure(f"{key}-modules", audit)
    return Panel(
        key,
        **place,
        kind="good" if audit.is_good_news else "warning",
        words=audit.words or (f"{audit.in_short}.",),
        tiles=_tiles(audit),
        first=audit.first.name,
        formats=[
            FormatRow(
                each.name,
                power(each.scale),
                _cells(each.fate),
                each.holds,
                each.keep,
                recommended=each.name == audit.chosen,
            )
            for each in audit.formats
        ],
        kinds=[(f"of {kind}", KINDS[kind]) for kind in kinds_of(audit)],
        figures=[window_figure(f"{key}-window", audit), *([modules] if modules else [])],
        modules=[(module.name or "(the model itself)", module.type) for module in audit.modules],
        by_format=_by_format(audit),
    )


def _tiles(audit: Audit) -> Pairs:
    before, after = audit.first.fate.unscaled, audit.first.fate.scaled
    there = [made for made in (audit.parameters, audit.activations) if made is not None]
    values = sum(made.total + made.zeros + made.nonfinite for made in there)
    pairs = [
        ("format", audit.chosen),
        ("initial scale", power(audit.scale)),
        (f"lost in {audit.first.name}", f"{_numbers(before)[0]} → {_numbers(after)[0]}"),
        ("headroom", _numbers(after)[3]),
        ("modules to keep", f"{len(audit.keep):,} of {len(audit.modules):,}"),
        ("seen", f"{count(audit.steps, 'step')}"),
        ("values", f"{values:,}"),
        ("computed in", audit.precision),
    ]
    if audit.loss_scale != 1:
        pairs.append(("scale divided out", power(audit.loss_scale)))
    return [(name, value.replace(" %", "\u00a0%")) for name, value in pairs]


def _by_format(audit: Audit) -> dict[str, Any]:
    """What the switch needs: by format its words, its scale, what to keep, and of every module
    the numbers, to sort by, and how they are written."""
    return {
        each.name: {
            "words": raised(prose(each.words)),
            "scale": numeral(power(each.scale)),
            "keep": [i for i, module in enumerate(audit.modules) if module.name in each.keep],
            "rows": [_row(module.fates[each.name]) for module in audit.modules],
            "cells": [_cells(module.fates[each.name]) for module in audit.modules],
        }
        for each in audit.formats
    }


def _row(fate: Fate) -> list[float | None]:
    return [
        None if value is None else float(f"{value:.4g}")
        for shares in (fate.unscaled, fate.scaled)
        for value in (getattr(shares, column) for column in COLUMNS)
    ]


def _cells(fate: Fate) -> list[str]:
    return [*_numbers(fate.unscaled), *_numbers(fate.scaled)]


def _numbers(shares: Shares) -> list[str]:
    """The four numbers of `COLUMNS`, as they are written."""
    known = (shares.lost, shares.subnormal, shares.overflow)
    headroom = "–" if shares.headroom is None else f"{shares.headroom:.1f}".replace("-", "−")
    return [*("–" if share is None else percent(share) for share in known), headroom]
