"""Findings about skipped steps, steps that should have been skipped, and the loss scale.

Where NaN or Inf arose is told in words, "likely" at most, and only by steps before which nothing
bad had gone into the weights; where they say nothing, the sentence says that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from gradilocks.report.formatting import clean, count, listed, percent, power
from gradilocks.report.health import Finding, Severity
from gradilocks.report.tracks import ANOTHERS, Track, nanmedian
from gradilocks.runfile import FORWARD_OR_LOSS, Origin, Spoilt

# Of a checkpoint, where a step before the first that is known to be bad may have spoilt it.
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
# A scale that touches a bound and leaves it again did its work; half of the run is another matter.
STUCK = 0.5
# Six halvings between the first and the last quarter. A dynamic scale moves up and down by a few.
FALLEN = 64.0
# Fewer steps are too few for quarters.
ENOUGH_FOR_QUARTERS = 100


def skipping(track: Track) -> Iterator[Finding]:
    """Counts the steps that non-finite gradients cost, and who made them non-finite."""
    # No scale had a part in those whose loss was bad; `loss_not_finite` and `far_out` tell of them.
    bad = {*track.lost, *_far_out(track)}
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
        f"{count(len(places), 'step')} skipped: NaN or Inf in the gradients",
        f"{percent(len(places) / len(track.steps))} of all steps changed nothing{since}. "
        f"{where_it_arose(track, places)}"
        + _what_to_do(severity, longest, unscaled=unscaled, recovered=recovered),
        {"skipped": len(places), "after settling": len(late), "longest streak": longest},
        step=first,
        culprit=likely_culprit(track, places),
    )


def far_out(track: Track) -> Iterator[Finding]:
    """Names the steps that were skipped because their loss was far from the usual."""
    places = _far_out(track)
    if not places:
        return
    usual, steps = _usual_loss(track), [track.steps[i].step for i in places]
    least = min(abs(track.loss[i]) for i in places) / usual
    title = f"{count(len(places), 'step')} skipped with a loss far from the usual"
    told = (
        f"At step {listed([f'{step:,}' for step in steps])} the loss was at least {least:,.0f} "
        f"times the usual {usual:.3g}, and the gradients overflowed. No scale can be right for "
        "both: look at the batches there."
    )
    evidence = {"steps": len(places)}
    yield Finding("skipped-far-out", "warning", title, told, evidence, step=steps[0])


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
        and not track.scale[i] > 1  # Nor is a scale that is not known, which is NaN.
        and i not in lost
    ]
    if not places or any(track.scale[i] < 1 for i in _taken_after(track, places[-1])):
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
        culprit=likely_culprit(track, places),
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
    more = f" So {'was' if len(places) == 2 else 'were'} {len(places) - 1:,} after it."
    if again is None:
        spoilt = Spoilt(step, track.steps[first].loss is not None)
        title = f"The weights are spoilt {spoilt}"
        then = "What follows comes from that and tells nothing new. " if places[1:] else ""
        cure = f"Go back to a checkpoint before step {step:,}{'' if spoilt.surely else SOUND}. "
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
        f"Step {step:,} was taken with NaN or Inf in the gradients.{more if places[1:] else ''} "
        f"{where_it_arose(track, [first])}{then}{cure}"
        "A GradientControl, or a GradScaler, would have skipped it.",
        {"steps": len(places)},
        step=step,
        culprit=likely_culprit(track, [first]),
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


def likely_culprit(track: Track, places: Sequence[int]) -> str | None:
    """The parameter at which it likely arose, if the steps agree on one more often than not."""
    found = track.origins(places)
    names = Counter(origin.name for origin in found if origin.where == "parameter")
    name, times = names.most_common(1)[0] if names else ("", 0)
    return name if 2 * times > len(found) else None


def where_it_arose(track: Track, places: Sequence[int]) -> str:
    """One or two sentences, each with a space behind it; '' for no steps."""
    if not places:
        return ""
    found = track.origins(places)
    if not found:
        whose = "another optimizer's" if track.spoilt[places[0]] == ANOTHERS else "the"
        return (
            f"NaN or Inf had gone into {whose} weights before, so whether this is a new fault is "
            "not known. "
        )
    kinds = Counter(origin.where for origin in found)
    if kinds["forward"] == len(found):
        asked = {place for place in places if not track.spoilt[place]}
        where = "see what the trace found" if asked & track.found else FORWARD_OR_LOSS
        return (
            "The loss itself was NaN or Inf, so the gradients do not tell where that arose: "
            f"{where}. "
        )
    each = " each time" if len(found) > 1 else ""
    if kinds["backward"] == len(found):
        return (
            f"The loss was finite and none of the gradients was{each}: likely it arose before "
            "backward reached these parameters, in the loss or in a layer behind them. "
        )
    if not kinds["parameter"]:
        return "The gradients do not tell where it arose. "
    return _by_name(found)


def by_trace(track: Track, places: Sequence[int]) -> str:
    """What would tell the module, in a sentence; in a traced run, why the trace did not."""
    if not track.found.isdisjoint(places):
        return "What the trace found is told apart."
    if track.traced:
        return (
            "A trace was on, but it begins after the first bad step: to see a fault that comes "
            "once, arm one by hand before that step (docs/finding-the-culprit.md)."
        )
    return (
        "Under a scaler or a GradientControl, which skip the step, `gradilocks run --trace` names "
        "the module if it comes back."
    )


def _by_name(found: Sequence[Origin]) -> str:
    named = [origin for origin in found if origin.where == "parameter"]
    names = Counter(origin.name for origin in named).most_common()
    first, times = names[0]
    rest = len(found) - len(named)
    unclear = f" {count(rest, 'other step')} did not tell." if rest else ""
    if len(names) == 1 and len(named) == 1 and named[0].after:
        return (
            f"Likely it arose in backward at {clean(first)}, or between it and "
            f"{clean(named[0].after)}, the next whose gradient is finite, if layers run in the "
            f"order in which they are defined.{unclear} "
        )
    if len(names) == 1:
        each = " each time" if len(named) > 1 and not rest else ""
        return f"Likely it arose in backward at {clean(first)} or just after it{each}.{unclear} "
    others = listed([name for name, _ in names[1:]])
    return (
        f"Likely it arose in backward at {clean(first)} or just after it ({count(times, 'time')}), "
        f"else at {others}.{unclear} "
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


def _taken_after(track: Track, place: int) -> Iterator[int]:
    return (i for i in range(place + 1, len(track.steps)) if not track.steps[i].skipped)


def _longest_streak(places: Sequence[int]) -> int:
    """How many of the places, which rise, follow each other without a gap at most."""
    streaks = groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    return max(len(list(streak)) for _, streak in streaks)


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


def _bound(track: Track, name: str) -> float | None:
    """A bound of the scale policy, from its text in the header; None if that has none."""
    found = re.search(rf"\b{name}=([-+.\deE]+)", track.scale_policy)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
