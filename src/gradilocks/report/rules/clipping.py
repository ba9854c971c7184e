"""How often the gradients were clipped: nearly always, or never."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradilocks.report.tracks import Track, middle
from gradilocks.report.values import Finding
from gradilocks.report.words import count, number, percent

# Fewer steps say nothing about a rate.
ENOUGH = 50
# Norms are large while training begins: the first tenth does not count.
WARMING_UP = 0.1
# Large models are often clipped in half of their steps, on purpose. At nine in ten the limit, not
# the gradient, sets the length of nearly every step.
NEARLY_ALWAYS = 0.9
# A limit that was never reached in so many steps guards against nothing seen so far.
NEVER_IN = 200
# So far above the limit, a usual norm says that the limit was set for another model.
FAR_ABOVE = 10.0


def clipping(track: Track) -> Iterator[Finding]:
    """Judges the share of clipped steps among those that were taken under a limit."""
    skipped = set(track.skipped)
    limited = [
        i for i, limit in enumerate(track.limit) if not math.isnan(limit) and i not in skipped
    ]
    if len(limited) < ENOUGH:
        return
    late = [i for i in limited if i >= len(track.steps) * WARMING_UP]
    share = sum(track.clipped[i] for i in late) / max(1, len(late))
    typical, limit = middle(track.norm[i] for i in late), middle(track.limit[i] for i in late)
    if share >= NEARLY_ALWAYS:
        yield Finding(
            "clipped-nearly-always",
            "warning" if typical > FAR_ABOVE * limit else "note",
            f"{percent(share)} of the steps were clipped",
            f"The norm is usually {number(typical)}, the limit {number(limit)}: the limit sets the "
            "length of nearly every step, so it works as a second learning rate. Raise it to where "
            "only outliers reach it, or keep it if that is what you want.",
            {"share": share, "median norm": typical, "limit": limit},
        )
    elif not any(track.clipped[i] for i in limited) and len(limited) >= NEVER_IN:
        largest = max((track.norm[i] for i in limited), default=math.nan, key=_or_zero)
        if math.isnan(largest) or len({track.limit[i] for i in limited}) > 1:
            return  # A limit that adapts is right to keep its distance.
        yield Finding(
            "never-clipped",
            "note",
            "The limit was never reached",
            f"In {count(len(limited), 'step')} the largest norm was {number(largest)}, the limit "
            f"{number(limit)}. It guards against spikes only; nothing is wrong with that.",
            {"largest norm": largest, "limit": limit},
        )


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
