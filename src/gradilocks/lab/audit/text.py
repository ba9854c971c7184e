"""An Audit enters, plain text of at most 80 columns leaves: the words, then two tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradilocks.lab.audit.histogram import Shares
from gradilocks.lab.audit.words import called, listed, percent, scale_text

if TYPE_CHECKING:
    from gradilocks.lab.audit.findings import Audit, FormatFinding
    from gradilocks.lab.audit.modules import ModuleGradients

__all__ = [
    "FORMAT_COLUMNS",
    "MODULE_COLUMNS",
    "as_text",
    "footnotes",
    "format_rows",
    "heading",
    "module_rows",
]

_NAME = 28
_MOST = 24
FORMAT_COLUMNS = (
    "format", "scale", "lost at 1", "lost", "subnormal", "overflow", "headroom", "holds",
)  # fmt: skip
MODULE_COLUMNS = ("module", "values", "largest", "lost at 1", "lost", "headroom")


def as_text(audit: Audit) -> str:
    """What `print(audit)` shows."""
    words = [textwrap.fill(sentence, 80) for sentence in audit.recommendation.words]
    parts = [textwrap.fill(heading(audit), 80), "\n".join(words)]
    parts.append(_aligned([FORMAT_COLUMNS, *format_rows(audit)]))
    if rows := module_rows(audit):
        parts.append(_aligned([MODULE_COLUMNS, *rows]))
    if notes := footnotes(audit):
        parts.append("\n".join(textwrap.fill(note, 80) for note in notes))
    return "\n\n".join(parts)


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
            _cell(each.unscaled.lost),
            _cell(each.scaled.lost),
            _cell(each.scaled.subnormal),
            _cell(each.scaled.overflow),
            _headroom(each.scaled),
            _verdict(each),
        )
        for each in audit.formats
    ]


def module_rows(audit: Audit) -> list[tuple[str, ...]]:
    """A row a module; of many, those that lose most."""
    finding = _shown(audit)
    if finding is None:
        return []
    name = finding.format.name
    rows: list[tuple[str, ...]] = []
    for module in _worst(audit, finding):
        seen = module.together
        now = audit.shares(name, finding.scale, module=module.name)
        before = audit.shares(name, 1.0, module=module.name)
        rows.append(
            (
                _shortened(called(module.name)) + (" *" if module.name in finding.keep else ""),
                f"{seen.values:,}",
                "-" if seen.largest is None else f"{seen.largest:.2g}",
                _cell(before.lost),
                _cell(now.lost),
                _headroom(now),
            )
        )
    return rows


def footnotes(audit: Audit) -> list[str]:
    """What the tables leave out."""
    finding = _shown(audit)
    if finding is None:
        return []
    scale = scale_text(finding.scale)
    notes = [f"The modules are shown in {finding.format.name} at scale {scale}."]
    if len(audit.modules) > _MOST:
        more = len(audit.modules) - _MOST
        notes[0] += f" {more:,} more lose no more than these; JSON has all."
    notes += [
        f"* {each.format.name} holds if {listed(each.keep)} "
        f"stay{'s' if len(each.keep) == 1 else ''} in float32."
        for each in audit.formats
        if each.holds and each.keep
    ]
    return notes


def _shown(audit: Audit) -> FormatFinding | None:
    """The format that comes into question first: fp16 if it is there."""
    for each in audit.formats:
        if each.format.name == "fp16":
            return each
    return audit.formats[0] if audit.formats and audit.modules else None


def _worst(audit: Audit, finding: FormatFinding) -> Sequence[ModuleGradients]:
    def ranked(module: ModuleGradients) -> tuple[bool, float, float]:
        shares = audit.shares(finding.format.name, finding.scale, module=module.name)
        return module.name in finding.keep, shares.lost, -(shares.headroom or 0.0)

    worst = {module.name for module in sorted(audit.modules, key=ranked, reverse=True)[:_MOST]}
    return [module for module in audit.modules if module.name in worst]


def _shortened(name: str) -> str:
    """A name of at most 28 characters: where it begins, and what it is."""
    return name if len(name) <= _NAME else f"{name[:10]}…{name[11 - _NAME :]}"


def _cell(share: float) -> str:
    return percent(share).replace("under ", "<").replace("over ", ">")


def _verdict(each: FormatFinding) -> str:
    if not each.holds:
        return "no"
    return f"without {len(each.keep)} *" if each.keep else "yes"


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
