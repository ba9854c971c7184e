"""Steps that were skipped, and steps that should have been."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gradilocks.report.origins import by_trace, likely, where_it_arose
from gradilocks.report.tracks import Track
from gradilocks.report.values import Finding, Severity
from gradilocks.report.words import count, listed, percent

SOUND = " whose weights are finite"
# A dynamic scale starts too high on purpose: at 2^16 it may take sixteen halvings to settle.
SETTLING = 50
# torch's rule tries a doubling every 2,000 steps and loses 0.05 %. Twenty times that is a loss.
FEW = 0.01
# One step in ten lost is a tenth of the bill.
MANY = 0.1
# Below three, one bad batch in a short run would pass for a rate.
COUNTABLE = 3
# From 2^16 it takes 40 halvings to the smallest scale that fp16 can make use of, 2^-24; half of
# them in a row, and the scale is not what is wrong.
STREAK = 20
# A spike filter that rejects one batch in twenty takes the tail of the data for spikes.
MANY_REJECTED = 0.05
# No dynamic scale lets a loss grow a hundredfold for one step: that is a batch.
FAR_OUT = 100.0


def skipping(track: Track) -> Iterator[Finding]:
    """Counts the steps that non-finite gradients cost, and who made them non-finite."""
    # No scale had a part in those whose loss was bad; `losses.py` and `far_out` tell of them.
    bad = {*track.lost, *_far_out(track)}
    places = [i for i in track.skipped if track.steps[i].reason != "rejected" and i not in bad]
    if not places:
        return
    late = [i for i in places if i >= SETTLING]
    share = len(late) / max(1, len(track.steps) - SETTLING)
    longest = _longest_streak(places)
    unscaled = all(track.scale[i] == 1 for i in places)
    severity: Severity = "note"
    recovered = any(i not in bad and not track.steps[i].skipped for i in _after(places, track))
    if (longest >= STREAK and not recovered) or (share >= MANY and len(late) >= COUNTABLE):
        severity = "problem"
    elif unscaled or (share >= FEW and len(late) >= COUNTABLE):
        severity = "warning"
    first = places[0]
    yield Finding(
        "skipped",
        severity,
        f"{count(len(places), 'step')} skipped: NaN or Inf in the gradients",
        f"{percent(len(places) / len(track.steps))} of all steps changed nothing"
        + (f", the first at step {track.steps[first].step:,}" if len(places) > 1 else "")
        + f". {where_it_arose(track, places)}"
        + _what_to_do(severity, longest, unscaled=unscaled, recovered=recovered),
        {"skipped": len(places), "after settling": len(late), "longest streak": longest},
        step=track.steps[first].step,
        culprit=likely(track, places),
    )


def far_out(track: Track) -> Iterator[Finding]:
    """Names the steps that were skipped because their loss was far from the usual."""
    places = _far_out(track)
    if not places:
        return
    usual, steps = _usual_loss(track), [track.steps[i].step for i in places]
    least = min(abs(track.loss[i]) for i in places) / usual
    yield Finding(
        "skipped-far-out",
        "warning",
        f"{count(len(places), 'step')} skipped with a loss far from the usual",
        f"At step {listed([f'{step:,}' for step in steps])} the loss was at least {least:,.0f} "
        f"times the usual {usual:.3g}, and the gradients overflowed. No scale can be right for "
        "both: look at the batches there.",
        {"steps": len(places)},
        step=steps[0],
    )


def nan_culprits(track: Track) -> Iterator[Finding]:
    """Tells of skipped steps with NaN at a scale that cannot be the cause."""
    # A scaled overflow often turns into NaN on its way back (Inf - Inf in a softmax). At a scale
    # of 1 or less there is no such excuse.
    lost = set(track.lost)  # A loss that was NaN itself explains them.
    places = [
        i
        for i in track.nonfinite
        if track.steps[i].nan > 0
        and track.steps[i].skipped  # `taken_though_nonfinite` tells of the others.
        and not _amplified(track.scale[i])
        and i not in lost
    ]
    settled = _after(places, track) if places else ()
    if not places or any(not track.steps[i].skipped and track.scale[i] < 1 for i in settled):
        return  # None, or a scale smaller still has cured it.
    step = track.steps[places[0]].step
    yield Finding(
        "nan",
        "problem",
        f"NaN in the gradients of {count(len(places), 'step')}",
        f"First at step {step:,}, where the scale was {track.scale[places[0]]:g}: it is not what "
        f"made them. {where_it_arose(track, places)}Look for a division by zero, the logarithm or "
        f"root of 0, bad inputs, or a learning rate that blew up the weights. "
        f"{by_trace(track, places)}",
        {"steps": len(places)},
        step=step,
        culprit=likely(track, places),
    )


def taken_though_nonfinite(track: Track) -> Iterator[Finding]:
    """Says so if NaN or Inf reached the weights, and what the first such step itself showed."""
    places = track.taken
    if not places:
        return
    first = places[0]
    step = track.steps[first].step
    bad = {*track.nonfinite, *track.lost}
    again = next((i for i in range(first + 1, len(track.steps)) if i not in bad), None)
    more = (
        f" So {'was' if len(places) == 2 else 'were'} {len(places) - 1:,} after it."
        if places[1:]
        else ""
    )
    if again is None:
        # Where its loss was not finite, a step before it may have put NaN into the weights.
        latest, sound = (
            ("", "") if track.steps[first].loss is not None else (" at the latest", SOUND)
        )
        title = f"The weights are spoilt since step {step:,}{latest}"
        then = "What follows comes from that and tells nothing new. " if places[1:] else ""
        cure = f"Go back to a checkpoint before step {step:,}{sound}. "
    else:
        title = f"{count(len(places), 'step')} taken with NaN or Inf in the gradients"
        then = (
            f"At step {track.steps[again].step:,} all gradients were finite again: the script "
            "mended them, weights were loaded anew, or those that are spoilt were not used there. "
        )
        cure = f"Look at the weights before you trust any that were saved after step {step:,}. "
    yield Finding(
        "taken-though-nonfinite",
        "problem",
        title,
        f"Step {step:,} was taken with NaN or Inf in the gradients.{more} "
        f"{where_it_arose(track, [first])}{then}{cure}"
        "A GradientControl, or a GradScaler, would have skipped it.",
        {"steps": len(places)},
        step=step,
        culprit=likely(track, [first]),
    )


def rejected(track: Track) -> Iterator[Finding]:
    """Counts the steps that a clip policy refused."""
    places = [i for i in track.skipped if track.steps[i].reason == "rejected"]
    if not places:
        return
    share = len(places) / len(track.steps)
    many = share > MANY_REJECTED and len(places) >= COUNTABLE
    yield Finding(
        "rejected",
        "warning" if many else "note",
        f"{count(len(places), 'step')} skipped by the clip policy",
        f"It took {percent(share)} of the steps for spikes, the first at step "
        f"{track.steps[places[0]].step:,}."
        + (" So many are no spikes: raise its threshold, or clip instead." if many else ""),
        {"rejected": len(places), "share": share},
        step=track.steps[places[0]].step,
    )


def _usual_loss(track: Track) -> float:
    """The median of the losses of steps that were taken; NaN if none is known."""
    taken = [abs(track.loss[i]) for i, step in enumerate(track.steps) if not step.skipped]
    known = sorted(loss for loss in taken if math.isfinite(loss))
    return known[len(known) // 2] if known else math.nan


def _far_out(track: Track) -> list[int]:
    """Skipped steps whose loss was finite, and far above what it usually is."""
    usual = _usual_loss(track)
    if not usual > 0:
        return []
    return [
        i
        for i in track.skipped
        if track.steps[i].reason != "rejected" and abs(track.loss[i]) > FAR_OUT * usual
    ]


def _after(places: Sequence[int], track: Track) -> range:
    return range(places[-1] + 1, len(track.steps))


def _amplified(scale: float) -> bool:
    return not math.isnan(scale) and scale > 1


def _longest_streak(places: Sequence[int]) -> int:
    longest = streak = 0
    before = -2
    for place in places:
        streak = streak + 1 if place == before + 1 else 1
        before = place
        longest = max(longest, streak)
    return longest


def _what_to_do(severity: Severity, longest: int, *, unscaled: bool, recovered: bool) -> str:
    if unscaled:
        return (
            "There was no loss scale to overflow: look at the inputs, and at what divides or takes "
            "a root or a logarithm."
        )
    if longest >= STREAK and recovered:
        return (
            f"{longest:,} of them came in a row until the scale was small enough. Start with a "
            "smaller one, or let HeadroomScale find it without losing steps."
        )
    if longest >= STREAK:
        return (
            f"{longest:,} of them came in a row, enough to halve any scale to nothing: a smaller "
            "scale does not cure this."
        )
    if severity == "note":
        return "That is the usual price of a dynamic scale."
    return (
        "HeadroomScale measures instead of overflowing; a longer growth_interval also loses less."
    )
