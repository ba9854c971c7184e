"""The norm over time: spikes and silence."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence

from gradilocks.report.tracks import Track
from gradilocks.report.values import Finding
from gradilocks.report.words import clean, count, listed, number, percent

# Ten times the median of the hundred steps before. Norms of a healthy run vary by two or three.
SPIKE = 10.0
WINDOW = 100
# Norms fall fast at the beginning, and a median of fewer is none.
FIRST = 30
# Spikes so close together are one event.
APART = 20
# How many of them a sentence names.
NAMED = 3
# A norm of exactly zero at half of the steps: nothing is learned there.
SILENT = 0.5
# Fewer steps prove no silence.
SHORTEST = 5


def spikes(track: Track) -> Iterator[Finding]:
    """Names the steps at which the norm shot up, and the tensor that did it."""
    found = _spikes(track.norm)
    if not found:
        return
    unguarded = [i for i, _ in found if not track.clipped[i] and not track.steps[i].skipped]
    worst = sorted(found, key=lambda spike: -spike[1])[:NAMED]
    told = [
        f"step {track.steps[i].step:,} ({number(track.norm[i])}, {number(factor)} times the usual"
        f"{_by(track, i)})"
        for i, factor in sorted(worst)
    ]
    first = min(worst)[0]
    most = track.tensor_of_most(first)
    what = (
        f"{'It was' if len(found) == 1 else 'All were'} clipped or skipped: the weights are safe."
        if not unguarded
        else f"{count(len(unguarded), 'spike')} went into the weights in full: clip the gradients, "
        "or use SkipSpikes."
    )
    yield Finding(
        "spikes",
        "warning" if unguarded else "note",
        f"{count(len(found), 'spike')} of the gradient norm",
        f"{'The largest: ' if len(found) > NAMED else 'At '}{listed(told, most=NAMED)}. {what}",
        {"spikes": len(found), "unguarded": len(unguarded), "largest factor": max(worst)[1]},
        step=track.steps[first].step,
        culprit=most.name if most else None,
    )


def silence(track: Track) -> Iterator[Finding]:
    """Says so if all gradients together were zero at many steps."""
    taken = [value for value in track.norm if not math.isnan(value)]
    zero = sum(value == 0 for value in taken) / max(1, len(taken))
    if len(taken) >= SHORTEST and zero >= SILENT:
        yield Finding(
            "no-gradient",
            "problem",
            f"All gradients were zero at {percent(zero)} of the steps",
            "Nothing can be learned from them. They may have been rounded to zero (use a loss "
            "scale), or the loss does not depend on the parameters.",
            {"share": zero},
        )


def _spikes(norm: Sequence[float]) -> list[tuple[int, float]]:
    """Places of spikes and how many times the usual norm they were, one for each event."""
    found: list[tuple[int, float]] = []
    ordered: list[float] = []
    recent: deque[float] = deque()
    last = -APART
    for place, value in enumerate(norm):
        if math.isnan(value):
            continue
        if len(ordered) >= FIRST:
            usual = ordered[len(ordered) // 2]
            if value > SPIKE * usual > 0:
                factor = value / usual
                if place - last >= APART:
                    found.append((place, factor))
                elif factor > found[-1][1]:
                    found[-1] = (place, factor)
                last = place
        insort(ordered, value)
        recent.append(value)
        if len(recent) > WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
    return found


def _by(track: Track, place: int) -> str:
    most = track.tensor_of_most(place)
    return f", most of it in {clean(most.name)}" if most else ""
