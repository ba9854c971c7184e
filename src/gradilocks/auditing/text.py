"""An Audit enters, plain text of at most 80 columns leaves: the words, then two tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradilocks.auditing.histogram import Shares
from gradilocks.auditing.words import called, percent, scale_text

if TYPE_CHECKING:
    from gradilocks.auditing.findings import Audit

__all__ = ["as_text", "format_rows", "heading", "module_rows"]

_NAME = 34
FORMAT_COLUMNS = ("format", "scale", "lost at 1", "lost", "subnormal", "overflow", "headroom", "")
MODULE_COLUMNS = ("module", "values", "largest", "lost at 1", "lost", "headroom")


def as_text(audit: Audit) -> str:
    """What `print(audit)` shows."""
    words = [textwrap.fill(sentence, 80) for sentence in audit.recommendation.words]
    tables = [_aligned([FORMAT_COLUMNS, *format_rows(audit)])]
    if rows := module_rows(audit):
        tables.append(_aligned([MODULE_COLUMNS, *rows]))
    return "\n\n".join([textwrap.fill(heading(audit), 80), "\n".join(words), *tables])


def heading(audit: Audit) -> str:
    """What was looked at."""
    steps = f"{audit.steps:,} step" + ("s" if audit.steps != 1 else "")
    counts = f"{audit.parameters.values:,} gradients of parameters and "
    counts += f"{audit.activations.values:,} of activations"
    scale = f", loss scale {scale_text(audit.loss_scale)}" if audit.loss_scale != 1.0 else ""
    return f"{steps} in {audit.precision}{scale}: {counts}, other than zero."


def format_rows(audit: Audit) -> list[tuple[str, ...]]:
    """A row a format."""
    return [
        (
            each.format.name,
            scale_text(each.scale),
            percent(each.unscaled.lost),
            percent(each.scaled.lost),
            percent(each.scaled.subnormal),
            percent(each.scaled.overflow),
            _headroom(each.scaled),
            _verdict(each.holds, each.keep),
        )
        for each in audit.formats
    ]


def module_rows(audit: Audit) -> list[tuple[str, ...]]:
    """A row a module, for the format that comes into question first: fp16 if it is there."""
    names = [each.format.name for each in audit.formats]
    if not names:
        return []
    name = "fp16" if "fp16" in names else names[0]
    finding = audit.formats[names.index(name)]
    rows: list[tuple[str, ...]] = []
    for module in audit.modules:
        seen = module.together
        now = audit.shares(name, finding.scale, module=module.name)
        before = audit.shares(name, 1.0, module=module.name)
        rows.append(
            (
                shortened(called(module.name)) + (" *" if module.name in finding.keep else ""),
                f"{seen.values:,}",
                "-" if seen.largest is None else f"{seen.largest:.2g}",
                percent(before.lost),
                percent(now.lost),
                _headroom(now),
            )
        )
    return rows


def shortened(name: str) -> str:
    """A name of at most 34 characters: its end tells more than its start."""
    return name if len(name) <= _NAME else "…" + name[1 - _NAME :]


def _verdict(holds: bool, keep: Sequence[str]) -> str:
    if not holds:
        return "does not hold"
    return f"holds without {len(keep)} *" if keep else "holds"


def _headroom(shares: Shares) -> str:
    return "-" if shares.headroom is None else f"{shares.headroom:.1f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = f"{row[0]:<{widths[0]}}"
        rest = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)
