"""Findings about skipped steps, and about the loss scale where there is one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from gradilocks.report.formatting import count, listed, percent, power
from gradilocks.report.health import Finding, Severity
from gradilocks.report.nonfinite_findings import (
    likely_culprit,
    named,
    nan_places,
    where_it_arose,
)
from gradilocks.report.tracks import Track, nanmedian

# A dynamic scale starts too high on purpose: at 2^16 it may take sixteen halvings to settle.
SETTLING = 50
# torch's rule tries a doubling every 2,000 steps and loses 0.05 %. Twenty times that is a loss.
FEW = 0.01
# One step in ten lost is a tenth of the bill.
MANY = 0.1
# Below three, one bad batch in a short run would pass for a rate.
COUNTABLE = 3
# From 2^16 it takes 40 halvings to the smallest scale that fp16 can make use of, 2^-24; half of
# them in a row, and no step after them, is no settling any more.
STREAK = 20
# There fp16 has room for gradients of 10^12: what is NaN or Inf then was not made so by the scale.
TINY_SCALE = 2.0**-24
# A spike filter that rejects one batch in twenty takes the tail of the data for spikes.
MANY_REJECTED = 0.05
# No dynamic scale lets a loss grow a hundredfold for one step: that is a batch.
FAR_OUT = 100.0
# Steps on either side of one that show what its loss should be like.
NEAR = 50
# A scale that touches a bound and leaves it again did its work; half of the run is another matter.
STUCK = 0.5
# Six halvings between the first and the last quarter. A dynamic scale moves up and down by a few.
FALLEN = 64.0
# Fewer steps are too few for quarters.
ENOUGH_FOR_QUARTERS = 100


def skipping(track: Track) -> Iterator[Finding]:
    """Counts the steps that non-finite gradients cost, and who made them non-finite."""
    # Those whose loss was bad, or whose scale was no matter, are told of by `loss_not_finite`,
    # `far_out` and `nan_culprits`.
    bad = {*track.lost, *_far_out(track), *nan_places(track)}
    places = [i for i in track.skipped if track.steps[i].reason != "rejected" and i not in bad]
    if not places:
        return
    late = [i for i in places if i >= SETTLING]
    share = len(late) / max(1, len(track.steps) - SETTLING)
    longest = _longest_streak(places)
    unscaled = all(track.scale[i] == 1 for i in places)
    severity: Severity = "note"
    recovered = any(i not in bad for i in _taken_after(track, places[-1]))
    if (longest >= STREAK and not recovered) or (share >= MANY and len(late) >= COUNTABLE):
        severity = "problem"
    elif unscaled or (share >= FEW and len(late) >= COUNTABLE):
        severity = "warning"
    first = track.steps[places[0]].step
    since = f", the first at step {first:,}" if len(places) > 1 else ""
    yield Finding(
        "skipped",
        severity,
        named(f"{count(len(places), 'step')} skipped: NaN or Inf in the gradients", track, places),
        f"{percent(len(places) / len(track.steps))} of all steps changed nothing{since}. "
        f"{where_it_arose(track, places)}"
        + _what_to_do(
            severity,
            longest,
            unscaled=unscaled,
            recovered=recovered,
            scale=track.scale[places[-1]],
        ),
        {"skipped": len(places), "after settling": len(late), "longest streak": longest},
        step=first,
        culprit=likely_culprit(track, places),
    )


def far_out(track: Track) -> Iterator[Finding]:
    """Names the steps that were skipped because their loss was far from the usual."""
    places = _far_out(track)
    if not places:
        return
    steps = [track.steps[i].step for i in places]
    least, usual = min((abs(track.loss[i]) / u, u) for i in places if (u := _usual_loss(track, i)))
    title = f"{count(len(places), 'step')} skipped with a loss far from the usual"
    told = (
        f"At step {listed([f'{step:,}' for step in steps])} the loss was at least {least:,.0f} "
        f"times the usual {usual:.3g}, and the gradients overflowed. "
        f"{where_it_arose(track, places)}"
        f"{'No scale can be right for both: l' if track.scaled else 'L'}ook at the batches there."
    )
    evidence = {"steps": len(places)}
    culprit = likely_culprit(track, places)
    yield Finding(
        "skipped-far-out",
        "warning",
        named(title, track, places),
        told,
        evidence,
        step=steps[0],
        culprit=culprit,
    )


def rejected(track: Track) -> Iterator[Finding]:
    """Counts the steps that a clip policy refused."""
    places = [i for i in track.skipped if track.steps[i].reason == "rejected"]
    if not places:
        return
    share, first = len(places) / len(track.steps), track.steps[places[0]].step
    many = share > MANY_REJECTED and len(places) >= COUNTABLE
    title = f"{count(len(places), 'step')} skipped by the clip policy"
    told = f"It took {percent(share)} of the steps for spikes, the first at step {first:,}."
    told += " So many are no spikes: raise its threshold, or clip instead." if many else ""
    evidence = {"rejected": len(places), "share": share}
    yield Finding("rejected", "warning" if many else "note", title, told, evidence, step=first)


def scaling(track: Track) -> Iterator[Finding]:
    """Judges where the scale went once it had settled."""
    scale = [value for value in track.scale[SETTLING:] if not math.isnan(value)]
    if len(scale) < ENOUGH_FOR_QUARTERS or max(scale) == min(scale) == track.scale[0]:
        return  # No scale, a static one, or too short to tell.
    lowest, highest = _bound(track, "min_scale"), _bound(track, "max_scale")
    stuck_low = sum(value <= max(1.0, lowest or 0.0) for value in scale) / len(scale)
    stuck_high = sum(value > highest / 2 for value in scale) / len(scale) if highest else 0.0
    lost = set(track.lost)
    # Each step with a NaN loss halves the scale too, and for nothing.
    in_vain = sum(place in lost for place in track.skipped) > len(track.skipped) / 2
    if stuck_low >= STUCK:
        bound = power(max(1.0, lowest or 0.0))
        title = f"The scale was {bound} or less for {percent(stuck_low)} of the run"
        told = (
            "It was halved whenever the loss itself was NaN or Inf: mend that, and it recovers."
            if in_vain
            else "Nothing is amplified any more, and still gradients overflow. Something in the "
            "model is too large by itself: lower the learning rate, look at the inputs' size, or "
            "train in bfloat16."
        )
        evidence = {"share": stuck_low, "last scale": scale[-1]}
        yield Finding("scale-stuck-low", "problem", title, told, evidence)
        return
    if stuck_high >= STUCK and highest:
        title = f"The scale was at its upper bound for {percent(stuck_high)} of the run"
        told = (
            f"It may not grow past {power(highest)}. The gradients would bear more; if many "
            "are zero (see the plot of zeros), raise max_scale."
        )
        evidence = {"share": stuck_high, "max_scale": highest}
        yield Finding("scale-stuck-high", "note", title, told, evidence)
    quarter = len(scale) // 4
    before, after = nanmedian(scale[:quarter]), nanmedian(scale[-quarter:])
    if before >= FALLEN * after and not in_vain:
        title = f"The scale fell from {power(before)} to {power(after)}"
        told = (
            "Gradients, or activations on their way, grow as training goes on. If it goes on "
            "falling the small gradients will be rounded to zero: look for a layer whose norm "
            "rises in the heat map."
        )
        evidence = {"first quarter": before, "last quarter": after}
        yield Finding("scale-falling", "warning", title, told, evidence)


def _usual_loss(track: Track, place: int) -> float:
    """The median of the losses of steps that were taken around one; NaN if none is known.

    Around it, not of the whole run: where a loss has fallen to a hundredth, the first ones are far
    from its median, and nothing was wrong with their batches.
    """
    near = range(max(0, place - NEAR), min(len(track.steps), place + NEAR + 1))
    return nanmedian(abs(track.loss[i]) for i in near if not track.steps[i].skipped)


def _far_out(track: Track) -> list[int]:
    """Skipped steps whose loss was finite, and far above what it usually is."""
    return [
        i
        for i in track.skipped
        if track.steps[i].reason != "rejected"
        and abs(track.loss[i]) > FAR_OUT * _usual_loss(track, i) > 0
    ]


def _taken_after(track: Track, place: int) -> Iterator[int]:
    return (i for i in range(place + 1, len(track.steps)) if not track.steps[i].skipped)


def _longest_streak(places: Sequence[int]) -> int:
    """How many of the places, which rise, follow each other without a gap at most."""
    streaks = groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    return max(len(list(streak)) for _, streak in streaks)


def _what_to_do(
    severity: Severity, longest: int, *, unscaled: bool, recovered: bool, scale: float
) -> str:
    """What to try; `scale` is that of the last skipped step, NaN if it is not known."""
    if unscaled:
        return "Look at the inputs, and at what divides or takes a root or a logarithm."
    if longest >= STREAK and recovered:
        return (
            f"{longest:,} of them came in a row until the scale was small enough. Start with a "
            "smaller one, or let HeadroomScale find it without losing steps."
        )
    if longest >= STREAK and scale <= TINY_SCALE:
        return (
            f"{longest:,} of them came in a row, down to a scale of {power(scale)}: a smaller "
            "scale does not cure this."
        )
    if longest >= STREAK:
        last = "" if math.isnan(scale) else f", the last at a scale of {power(scale)}"
        return (
            f"{longest:,} of them came in a row{last}, and no step was taken after them. Whether a "
            "smaller scale cures this is not known."
        )
    if severity == "note":
        return "That is the usual price of a dynamic scale."
    return (
        "HeadroomScale measures instead of overflowing; a longer growth_interval also loses less."
    )


def _bound(track: Track, name: str) -> float | None:
    """A bound of the scale policy, from its text in the header; None if that has none."""
    found = re.search(rf"\b{name}=([-+.\deE]+)", track.scale_policy)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
