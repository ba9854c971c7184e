"""What travels through a report: a Finding, and the Health that findings add up to; data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

Severity = Literal["problem", "warning", "note"]
"""A problem spoils the training, a warning deserves a look, a note is good to know."""

Verdict = Literal["healthy", "needs a look", "in trouble", "no steps"]

Evidence = Mapping[str, float | int | str]


@dataclass(frozen=True)
class Finding:
    """One thing that a report has to say about a run."""

    rule: str
    """Which rule found it: a heading in docs/reading-a-report.md."""
    severity: Severity
    title: str
    sentence: str
    """What was seen and what to do about it, in plain words."""
    evidence: Evidence = field(default_factory=dict)
    """The numbers behind it."""
    step: int | None = None
    """Where it first happened, if it happened at a step."""
    culprit: str | None = None
    """The parameter or module at fault, if one is."""

    def to_plain(self) -> dict[str, object]:
        """The finding as JSON has it."""
        plain = asdict(self)
        evidence = plain.pop("evidence")
        return {**plain, "evidence": evidence}


@dataclass(frozen=True)
class Health:
    """The verdict on a run, and what it rests on, the gravest first."""

    verdict: Verdict
    sentence: str
    findings: tuple[Finding, ...]
