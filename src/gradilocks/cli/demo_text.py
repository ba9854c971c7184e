"""The words and numbers of ``gradilocks demo``: values enter, strings leave.

The words are ASCII, so that no encoding can fail on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradilocks.demo.values import Step
from gradilocks.report import number, power

__all__ = ["clock", "describe_step", "loss_words", "table_rows", "verdict_words"]

Plain = Mapping[str, Any]


def describe_step(step: Step, *, clipped: int, skipped: int) -> str:
    """Says in a few words what a step did, and how many were clipped and skipped up to it."""
    return (
        f"loss {loss_words(step.loss)}  scale {power(step.scale)}  clipped {clipped}  "
        f"skipped {skipped}"
    )


def loss_words(loss: float | None, digits: int = 3) -> str:
    """A loss in a few digits.

    Example:
        >>> loss_words(2.31524), loss_words(3908.2), loss_words(None)
        ('2.315', '3908', 'NaN')
    """
    if loss is None or math.isnan(loss):
        return "NaN"
    return f"{loss:.{digits}f}" if abs(loss) < 1000 else f"{loss:.4g}"


def clock(seconds: float) -> str:
    """A time as a clock has it.

    Example:
        >>> clock(5.4), clock(75)
        ('0:05', '1:15')
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def table_rows(summary: Plain) -> list[tuple[str, ...]]:
    """Returns the rows of the closing table: the heads first, then an arm each."""
    several = len(summary["seeds"]) > 1
    heads = ("arm", "start", "final loss", "skipped", "clipped", "norm", "lost")
    rows: list[tuple[str, ...]] = [heads]
    for arm in summary["arms"]:
        runs = [run for run in summary["runs"] if run["arm"] == arm["name"]]
        if not runs:
            continue
        rows.append(
            (
                arm["title"],
                _mean(runs, "first_loss", loss_words),
                _final(arm["final_loss"], several=several),
                _range(runs, "skipped"),
                _range(runs, "clipped"),
                _mean(runs, "norm_largest", number),
                _mean(runs, "lost", lambda share: f"{share:.1%}", nothing="-"),
            )
        )
    return rows


def verdict_words(holds: bool | None) -> str:
    """Whether a claim holds, in a few words."""
    return {True: "holds", False: "DOES NOT HOLD", None: "not judged"}[holds]


def _final(spread: Plain, *, several: bool) -> str:
    if spread["mean"] is None:
        lost = spread["seeds"] - spread["finite"]
        return f"NaN ({lost} of {spread['seeds']})" if several else "NaN"
    if not several or spread["deviation"] is None:
        return loss_words(spread["mean"], 4)
    return f"{loss_words(spread['mean'], 4)} +- {spread['deviation']:.4f}"


def _mean(runs: Sequence[Plain], name: str, words: Any, nothing: str = "NaN") -> str:
    known = [run[name] for run in runs if run[name] is not None]
    return str(words(sum(known) / len(known))) if known else nothing


def _range(runs: Sequence[Plain], name: str) -> str:
    least, most = min(run[name] for run in runs), max(run[name] for run in runs)
    return f"{least}" if least == most else f"{least} to {most}"
