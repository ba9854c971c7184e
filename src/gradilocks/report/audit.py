"""An audit, as plain data → a page of its own, in the look of a report; or one line for a terminal.

What enters is what `gradilocks audit` found, as in its JSON and in a run file's ``audit`` line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradilocks.errors import GradilocksError
from gradilocks.report.audit_panel import SCRIPTS, STYLES, panel_of
from gradilocks.report.audited import UnreadableAudit, audited
from gradilocks.report.destination import check, write
from gradilocks.report.document import GENERATOR, document, headed
from gradilocks.report.formatting import clean

__all__ = ["audit_page", "check_audit_page", "write_audit_page"]

_WAY_OUT = "choose another name, or remove it first"


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
    write(
        Path(path),
        lambda: page,
        identity=_identity(title),
        force=force,
        what=f"audit of {clean(title)}",
        option="--html",
        way_out=_WAY_OUT,
    )


def check_audit_page(path: Path, *, title: str) -> None:
    """Says beforehand what would keep the page from being written.

    Raises:
        GradilocksError: something else is there, or the place cannot be written.
    """
    check(
        path,
        identity=_identity(title),
        what=f"audit of {clean(title)}",
        option="--html",
        way_out=_WAY_OUT,
    )


def audit_page(audit: Mapping[str, Any], *, title: str) -> str:
    """Returns the page.

    Raises:
        GradilocksError: the data are not an audit's.
    """
    try:
        read = audited(audit)
    except UnreadableAudit as error:
        raise GradilocksError(f"the audit cannot be shown: {error}.") from error
    shown = clean(title)
    made = panel_of(read, key="a0")
    return document(
        title=f"{shown} · Gradilocks audit",
        marks={"generator": GENERATOR, "gradilocks-runs": _identity(title)},
        header=headed("Gradilocks audit", shown),
        main=[made.html],
        plots=made.plots,
        styles=STYLES,
        scripts=SCRIPTS,
    )


def _identity(title: str) -> str:
    named = f"audit {title}".encode("utf-8", "backslashreplace")
    return hashlib.sha256(named).hexdigest()[:16]
