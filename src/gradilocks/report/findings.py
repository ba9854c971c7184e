"""A Run → its Health: a verdict, and findings in plain sentences, the gravest first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradilocks.report.rules.clipping import clipping
from gradilocks.report.rules.curves import silence, spikes
from gradilocks.report.rules.ending import ending, traced
from gradilocks.report.rules.losses import divergence, not_finite
from gradilocks.report.rules.scaling import scaling
from gradilocks.report.rules.skipping import (
    far_out,
    nan_culprits,
    rejected,
    skipping,
    taken_though_nonfinite,
)
from gradilocks.report.rules.tensors import dominating, gradientless, moving, vanishing
from gradilocks.report.tracks import Track, tracks
from gradilocks.report.values import Finding, Health, Verdict
from gradilocks.report.words import count
from gradilocks.runfile import Run

__all__ = ["examine"]

# Rates over fewer steps than this mean little, and the verdict says so.
FEW_STEPS = 20
ORDER = {"problem": 0, "warning": 1, "note": 2}
STEP_RULES = (
    taken_though_nonfinite,
    nan_culprits,
    not_finite,
    divergence,
    silence,
    skipping,
    far_out,
    rejected,
    spikes,
    vanishing,
    dominating,
    moving,
    clipping,
    gradientless,
)


def examine(run: Run, followed: Sequence[Track] | None = None) -> Health:
    """Judges a run.

    Args:
        run: as `gradilocks.read_run` returns it.
        followed: its tracks, if they have been made already.

    Returns:
        The verdict and its findings.

    Raises:
        BadRunFile: a step holds something else than numbers.
    """
    followed = tracks(run) if followed is None else followed
    found = [*ending(run), *traced(run)]
    for track in followed:
        for finding in _of_track(run, track):
            found.append(
                replace(finding, title=f"{track.label}: {finding.title}")
                if track.several
                else finding
            )
    found.sort(key=lambda finding: ORDER[finding.severity])
    return Health(*_verdict(run, found, followed), tuple(found))


def _of_track(run: Run, track: Track) -> Iterator[Finding]:
    for rule in STEP_RULES:
        yield from rule(track)
    yield from scaling(run, track)


def _verdict(run: Run, found: Sequence[Finding], followed: Sequence[Track]) -> tuple[Verdict, str]:
    if not run.steps:
        return "no steps", "The run file has a header but no steps: nothing was recorded yet."
    problems = sum(finding.severity == "problem" for finding in found)
    warnings = sum(finding.severity == "warning" for finding in found)
    seen = count(len(run.steps), "step")
    if problems:
        more = f" and {count(warnings, 'warning')}" if warnings else ""
        ended = "".join(
            f"It ended in NaN or Inf: {f'{track.label}: ' if track.several else ''}{track.ending}. "
            for track in followed
            if track.ending is not None
        )
        return "in trouble", f"{ended}{count(problems, 'problem')}{more} in {seen}."
    if warnings:
        return "needs a look", f"{count(warnings, 'warning')} in {seen}, no problem."
    if len(run.steps) < FEW_STEPS:
        return "healthy", f"Nothing wrong in {seen}, but so few prove little."
    return "healthy", f"Nothing wrong in {seen}."
