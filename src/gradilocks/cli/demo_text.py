"""The words and numbers of ``gradilocks demo``: Steps and a Summary enter, strings leave.

The words are ASCII, so that no encoding can fail on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradilocks.demo.values import Settings, Step, Summary, summarize


def describe_step(step: Step, skipped: int) -> str:
    """Says in a few words what a step did, and how many were skipped up to it."""
    return f"loss {step.loss:.3f}  scale {format_scale(step.scale)}  skipped {skipped}"


def table_rows(summary: Summary) -> list[tuple[str, str]]:
    """Returns the rows of the table: a name and what to say about it."""
    settings = summary.settings
    entries = [
        ("steps", f"{summary.steps} in {summary.seconds:.1f} s"),
        ("skipped", str(summary.skipped)),
        ("clipped", str(summary.clipped)),
        (
            "scale",
            f"{format_scale(summary.scale_first)} at the first step, "
            f"{format_scale(summary.scale_last)} at the last",
        ),
        (
            "loss",
            f"{summary.loss_first:.3f} at the first step, {summary.loss_last:.3f} "
            f"{_window(summary)}",
        ),
    ]
    if summary.skipped:
        entries.insert(2, ("culprits", _name_culprits(summary)))
    if summary.underflow is not None:
        lost = f"{summary.underflow.unscaled:.1%} without a scale"
        if settings.scale is not None:
            lost += f", {summary.underflow.scaled:.1%} with {format_scale(summary.scale_first)}"
        entries.append(
            (
                "rounded to 0",
                f"{lost}, of the gradients entering the last layer at the first step",
            )
        )
    return entries


def describe_so_far(settings: Settings, steps: Sequence[Step]) -> str:
    """Says in one line what an interrupted run did."""
    if not steps:
        return "before the first step."
    summary = summarize(settings, steps)
    return (
        f"after {summary.steps} of {settings.steps} steps: {summary.skipped} skipped, "
        f"{summary.clipped} clipped, scale {format_scale(summary.scale_last)}, loss "
        f"{summary.loss_first:.3f} at the first step, {summary.loss_last:.3f} {_window(summary)}."
    )


def format_scale(scale: float) -> str:
    """Writes a power of two as one: ``2^16``; another number in a few digits.

    Example:
        >>> format_scale(65536.0), format_scale(1000.0)
        ('2^16', '1000')
    """
    fraction, exponent = math.frexp(scale)
    if fraction == 0.5 and exponent != 1:
        return f"2^{exponent - 1}"
    return f"{scale:.6g}"


def _window(summary: Summary) -> str:
    if summary.loss_window == 1:
        return "at the last"
    return f"over the last {summary.loss_window}"


def _name_culprits(summary: Summary) -> str:
    most = sorted(summary.culprits.items(), key=lambda entry: -entry[1])
    named = ", ".join(f"{name} ({count} x)" for name, count in most[:3])
    return named if len(most) <= 3 else f"{named} and {len(most) - 3} more"
