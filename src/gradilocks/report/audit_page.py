"""An audit's record → its panel on a report, a page of its own, or one line for a terminal.

The panel shows the recommended format first; a switch shows another. What the switch changes in the
table of modules is in a data block, so that a page carries the numbers and not a table a format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
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
from gradilocks.report.destination import check, identity_of, write
from gradilocks.report.formatting import (
    clean,
    count,
    listed,
    numeral,
    percent,
    power,
    prose,
    raised,
)
from gradilocks.report.page import to_html

UNREADABLE = "The audit in the run file could not be shown:"
COLUMNS = ("lost", "subnormal", "overflow", "headroom")


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
    return to_html(
        "audit.html",
        title=f"{clean(title)} · Gradilocks audit",
        kind="Gradilocks audit",
        heading=clean(title),
        identity=_place(title)["identity"],
        panels=[_panel(audit, key="a0")],
    )


def _place(title: str) -> dict[str, str]:
    """What `destination` must know of a page to tell whether it may take another's place."""
    return {
        "identity": identity_of(f"audit {title}"),
        "what": f"audit of {clean(title)}",
        "option": "--html",
        "way_out": "choose another name, or remove it first",
    }


# --- a panel -------------------------------------------------------------------------------------


def panel(data: Mapping[str, Any], **place: Any) -> dict[str, Any]:
    """The panel of a report; an audit that cannot be read becomes a sentence that says so.

    Args:
        data: as the run file's line holds it.
        place: `key`, which the ids on the page begin with, and if the page is about several runs
            `label` and `colour` of the one that was audited.
    """
    try:
        return {"on_report": True, **place, **_panel(AuditRecord.from_plain(data), **place)}
    except UnreadableAudit as error:
        return {"on_report": True, **place, "unreadable": f"{UNREADABLE} {error.reason}."}


def _panel(audit: AuditRecord, *, key: str, **_: Any) -> dict[str, Any]:
    """What `audit_panel.html` shows: the audit itself, what is made of it, and its pictures."""
    chosen = audit.recommended
    nonfinite = audit.parameters.nonfinite or audit.activations.nonfinite
    good = chosen is not None and chosen.holds and not nonfinite
    modules = module_figure(f"{key}-modules", audit)
    return {
        "key": key,
        "audit": audit,
        "kind": "good" if good else "warning",
        "words": [clean(each) for each in audit.recommendation.words] or [f"{_in_short(audit)}."],
        "tiles": _tiles(audit),
        "first": shown_first(audit).name,
        "kinds": [(f"of {kind}", KINDS[kind]) for kind in kinds_of(audit)],
        "figures": [window_figure(f"{key}-window", audit), *([modules] if modules else [])],
        "modules": [(label_of(module), clean(module.kind)) for module in audit.modules],
        "cells": _cells,
        "by_format": {each.name: _of_format(audit, each) for each in audit.formats},
    }


def _tiles(audit: AuditRecord) -> list[tuple[str, str]]:
    first, said = shown_first(audit), audit.recommendation
    lost, *_, headroom = _numbers(first.scaled)
    values = sum(h.values + h.zeros + h.nonfinite for h in (audit.parameters, audit.activations))
    pairs = [
        ("format", clean(said.format)),
        ("initial scale", power(said.scale)),
        (f"lost in {first.name}", f"{_numbers(first.unscaled)[0]} → {lost}"),
        ("headroom", headroom),
        ("modules to keep", f"{len(said.keep):,} of {len(audit.modules):,}"),
        ("seen", f"{count(audit.steps, 'step')}"),
        ("values", f"{values:,}"),
        ("computed in", clean(audit.precision)),
    ]
    if audit.loss_scale != 1:
        pairs.append(("scale divided out", power(audit.loss_scale)))
    return [(name, value.replace(" %", "\u00a0%")) for name, value in pairs]


def _of_format(audit: AuditRecord, each: FormatFinding) -> dict[str, Any]:
    """What the switch needs of a format: its words, its scale, what to keep, and of every module
    the numbers, to sort by, and how they are written."""
    fates = [module.fates[each.name] for module in audit.modules]
    return {
        "words": raised(prose(clean(each.words))),
        "scale": numeral(power(each.scale)),
        "keep": [i for i, module in enumerate(audit.modules) if module.name in each.keep],
        "rows": [_row(fate) for fate in fates],
        "cells": [_cells(fate) for fate in fates],
    }


def _row(fate: Fate) -> list[float | None]:
    values = [
        None if shares.of_nothing else getattr(shares, column)
        for shares in fate
        for column in COLUMNS
    ]
    return [None if value is None else float(f"{value:.4g}") for value in values]


def _cells(fate: Fate) -> list[str]:
    return [*_numbers(fate.unscaled), *_numbers(fate.scaled)]


def _numbers(shares: Shares) -> list[str]:
    """The four numbers of `COLUMNS`, as they are written."""
    if shares.of_nothing:
        return ["–"] * len(COLUMNS)
    headroom = "–" if shares.headroom is None else f"{shares.headroom:.1f}".replace("-", "−")
    return [*map(percent, (shares.lost, shares.subnormal, shares.overflow)), headroom]
