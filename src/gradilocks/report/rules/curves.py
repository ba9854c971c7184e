"""The norm and the loss over time: spikes, silence, divergence."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from gradilocks.report.tracks import Track, middle
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
# The loss is compared window by window; a median over fewer than this is noise.
WINDOWS = 20
SHORTEST = 5
# The usual noise of a loss inside a window, times this, is no change.
NOISE = 3.0
# Half of what was learned is lost again.
LOST = 0.5


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


def divergence(track: Track) -> Iterator[Finding]:
    """Judges where the loss ended against where it began and how low it had been."""
    known = [(i, value) for i, value in enumerate(track.loss) if not math.isnan(value)]
    if len(known) < WINDOWS * SHORTEST // 2:
        return
    gone = len(track.steps) - 1 - known[-1][0]
    # A loss was known at nearly every step, and at none of the last ones.
    if gone >= SHORTEST and len(known) >= 0.9 * (known[-1][0] + 1):
        step = track.steps[known[-1][0] + 1].step
        yield Finding(
            "loss-not-finite",
            "problem",
            f"The loss is not finite from step {step:,} on",
            f"It was {number(known[-1][1])} just before and has been NaN or Inf for "
            f"{count(gone, 'step')}. Go back to a checkpoint before it; the spikes and culprits "
            "named here show what to look at.",
            {"steps": gone, "last loss": known[-1][1]},
            step=step,
        )
        return
    size = max(SHORTEST, len(known) // WINDOWS)
    windows = [known[i : i + size] for i in range(0, len(known) - size + 1, size)]
    middles = [middle(value for _, value in window) for window in windows]
    start, best, last = middles[0], min(middles), middles[-1]
    noise = median(abs(value - last) for _, value in windows[-1])
    lost = last - best
    if lost <= NOISE * noise or lost <= LOST * (start - best):
        return
    low = windows[middles.index(best)]
    step = track.steps[low[-1][0]].step
    worse = last > start
    yield Finding(
        "loss-diverged",
        "problem" if worse else "warning",
        "The loss diverged" if worse else "The loss rose again",
        f"It began at {number(start)}, was lowest ({number(best)}) around step {step:,}, and ended "
        f"at {number(last)}. Look at what the norm did after that step; a lower learning rate or a "
        "tighter limit are the usual cures.",
        {"first": start, "lowest": best, "last": last},
        step=step,
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
