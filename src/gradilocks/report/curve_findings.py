"""Findings about the curves of a run: loss, gradient norm, and the limit that it is clipped at."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from gradilocks.report.formatting import clean, count, listed, number, percent
from gradilocks.report.health import Finding, Severity
from gradilocks.report.skip_findings import SOUND, by_trace, where_it_arose
from gradilocks.report.tracks import Track, nanmedian
from gradilocks.runfile import on_ranks

# The loss is compared window by window; a median over fewer than this is noise.
WINDOWS = 20
SHORTEST = 5
# The usual noise of a loss inside a window, times this, is no change.
NOISE = 3.0
# Half of what was learned is lost again.
LOST = 0.5
# A loss may rise in health: its targets move (reinforcement learning), or two networks pull at each
# other. Such rises stay about a hundred times the first loss, and the norm grows less than tenfold.
BLOWN_UP = 100.0
NORM_GREW = 30.0
# With several optimizers a loss that one of them raises is often another's success.
BLOWN_UP_AMONG_SEVERAL = 1e4
# Ten times the median of the hundred steps before. Norms of a healthy run vary by two or three.
SPIKE = 10.0
USUAL_OVER = 100
# Norms fall fast at the beginning, and a median of fewer is none.
FIRST = 30
# Spikes so close together are one event.
APART = 20
# How many of them a sentence names.
NAMED = 3
# A norm of exactly zero at half of the steps: nothing is learned there.
SILENT = 0.5
# Fewer steps prove no silence.
FEWEST_NORMS = 5
# Fewer steps say nothing about a rate.
ENOUGH_FOR_A_RATE = 50
# Norms are large while training begins: the first tenth does not count.
WARMING_UP = 0.1
# Large models are often clipped in half of their steps, on purpose. At nine in ten the limit, not
# the gradient, sets the length of nearly every step.
NEARLY_ALWAYS = 0.9
# A limit that was never reached in so many steps guards against nothing seen so far.
NEVER_IN = 200
# So far above the limit, a usual norm says that the limit was set for another model.
FAR_ABOVE = 10.0


def loss_not_finite(track: Track) -> Iterator[Finding]:
    """Says where the loss itself was NaN or Inf: for good, or at single steps."""
    since = track.bad.lost_from
    if since is not None:
        yield _never_finite_again(track, since)
    lost = [place for place in track.lost if since is None or place < since]
    taken = [place for place in lost if not track.steps[place].skipped]
    if taken and since is None:
        first, at = track.steps[taken[0]].step, count(len(taken), "step")
        # Gradients that were finite all the same have spoilt nothing.
        spoilt = [track.steps[i].step for i in sorted({*taken} & {*track.taken})]
        title = f"The loss was NaN or Inf{_ranks_at(track, taken)} at {at}"
        told = "The gradients were finite all the same, so the weights are not spoilt by it."
        if spoilt:
            title += " that went into the weights"
            told = f"Go back to a checkpoint before step {spoilt[0]:,} whose weights are finite."
        told = f"The first was step {first:,}. {told}"
        yield Finding("loss-not-finite", "problem", title, told, {"steps": len(taken)}, step=first)
    skipped = [place for place in lost if track.steps[place].skipped]
    if skipped:
        first = track.steps[skipped[0]].step
        where = _ranks_at(track, skipped)
        title = f"The loss itself was NaN or Inf{where} at {count(len(skipped), 'step')}"
        told = (
            f"First at step {first:,}; {'it was' if len(skipped) == 1 else 'they were'} skipped "
            f"and changed no weight. {where_it_arose(track, skipped)}"
            "No scale can cure that: look at the batches there, and at what the loss divides by or "
            f"takes the logarithm of. {by_trace(track, skipped)}"
        )
        evidence = {"steps": len(skipped), "share": len(skipped) / len(track.steps)}
        yield Finding("loss-nonfinite-steps", "warning", title, told, evidence, step=first)


def _ranks_at(track: Track, places: Iterable[int]) -> str:
    """On which ranks the losses of these steps were bad, in words."""
    return on_ranks(*(track.steps[place] for place in places))


def _never_finite_again(track: Track, since: int) -> Finding:
    """The loss ended as NaN or Inf: the weights are spoilt, or the steps were skipped."""
    step, here = track.steps[since].step, range(since, len(track.steps))
    gone = count(len(here), "step")
    spoilt = track.spoilt_at(since)
    evidence: dict[str, float] = {"steps": len(here)}
    if since:
        evidence["last loss"] = before = track.loss[since - 1]
        title = f"The loss is not finite{_ranks_at(track, here)} from step {step:,} on"
        told = f"It was {number(before)} just before and has been NaN or Inf for {gone}. "
    else:
        title = "The loss was never finite"
        told = f"None of {gone} has a finite loss: look at the inputs and at the weights that "
        told += "training began with. "
    if spoilt is not None:
        latest, sound = ("", "") if spoilt.surely else (" at the latest", SOUND)
        told += (
            f"NaN or Inf went into the weights at step {spoilt.step:,}{latest}: go back to a "
            f"checkpoint before it{sound}. What came after tells nothing more."
        )
    elif all(track.steps[i].skipped for i in here):
        told += (
            "All of these steps were skipped and changed no weight. "
            f"{where_it_arose(track, here)}No scale can cure that: look at the batches, at what "
            "the loss divides by or takes the logarithm of, and at whether a weight is itself NaN "
            f"or Inf. {by_trace(track, here)}"
        )
    elif not any(place >= since for place in track.nonfinite):
        told += "The gradients stayed finite, so the weights are not spoilt by it" + (
            "." if track.steps[since].loss_nonfinite else "; or the loss is only missing."
        )
    return Finding("loss-not-finite", "problem", title, told.rstrip(), evidence, step=step)


def divergence(track: Track) -> Iterator[Finding]:
    """Judges where the loss ended against where it began and how low it had been."""
    known = [(i, value) for i, value in enumerate(track.loss) if not math.isnan(value)]
    if len(known) < WINDOWS * SHORTEST // 2:
        return
    size = max(SHORTEST, len(known) // WINDOWS)
    windows = [known[i : i + size] for i in range(0, len(known) - size + 1, size)]
    middles = [nanmedian(value for _, value in window) for window in windows]
    start, best, last = middles[0], min(middles), middles[-1]
    noise = median(abs(value - last) for _, value in windows[-1])
    lost = last - best
    if lost <= NOISE * noise or lost <= LOST * (start - best):
        return
    low = windows[middles.index(best)]
    step = track.steps[low[-1][0]].step
    grown = _growth(track, [i for i, _ in windows[0]], [i for i, _ in windows[-1]])
    # Not a ratio of losses: they may be zero or negative.
    factor = (last - start) / max(abs(start), start - best, 1e-30)
    blown = factor >= (BLOWN_UP_AMONG_SEVERAL if track.several else BLOWN_UP)
    diverged = blown and grown >= NORM_GREW
    told = (
        f"It began at {number(start)}, was lowest ({number(best)}) around step {step:,}, and ended "
        f"at {number(last)}. "
    )
    if diverged:
        title = "The loss diverged"
        told += (
            f"The norm grew {number(grown)} times. A lower learning rate, a longer warm-up or a "
            "tighter limit are the usual cures."
        )
    else:
        title = "The loss ended higher than it began" if last > start else "The loss rose again"
        told += (
            "That is usual where targets move or networks play against each other; elsewhere look "
            "at what the norm did after that step."
        )
    severity: Severity = "problem" if diverged else "note"
    evidence = {"first": start, "lowest": best, "last": last}
    yield Finding("loss-diverged", severity, title, told, evidence, step=step)


def _growth(track: Track, early: list[int], late: list[int]) -> float:
    """How many times larger the norm was; infinite if it was not even finite any more."""
    after = early[-1]
    if any(place > after for place in track.nonfinite if not track.steps[place].skipped):
        return math.inf
    before = nanmedian(track.norm[i] for i in early)
    then = nanmedian(track.norm[i] for i in late)
    return then / before if before > 0 and not math.isnan(then) else 1.0


def converged(track: Track) -> bool:
    """Whether the loss, and the norm with it, has next to nothing left to fall."""
    for values in (track.loss, track.norm):
        known = [value for value in values if not math.isnan(value)]
        size = max(1, len(known) // WINDOWS)
        if not known or not 0 <= nanmedian(known[-size:]) <= 1e-2 * nanmedian(known[:size]):
            return False
    return True


def spikes(track: Track) -> Iterator[Finding]:
    """Names the steps at which the norm shot up, and the tensor that did it."""
    found = _spikes(track.norm)
    if not found:
        return
    unguarded = [i for i, _ in found if not track.clipped[i] and not track.steps[i].skipped]
    worst = sorted(sorted(found, key=lambda spike: -spike[1])[:NAMED])
    most = [track.tensor_of_most(i) for i, _ in worst]
    told = [
        f"step {track.steps[i].step:,} ({number(track.norm[i])}, {number(factor)} times the usual"
        + (f", most of it in {clean(tensor.name)})" if tensor else ")")
        for (i, factor), tensor in zip(worst, most, strict=True)
    ]
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
        {"spikes": len(found), "unguarded": len(unguarded), "largest factor": worst[-1][1]},
        step=track.steps[worst[0][0]].step,
        culprit=most[0].name if most[0] else None,
    )


def silence(track: Track) -> Iterator[Finding]:
    """Says so if all gradients together were zero at many steps."""
    taken = [value for value in track.norm if not math.isnan(value)]
    zero = sum(value == 0 for value in taken) / max(1, len(taken))
    if len(taken) >= FEWEST_NORMS and zero >= SILENT:
        title = f"All gradients were zero at {percent(zero)} of the steps"
        told = (
            "Nothing can be learned from them. They may have been rounded to zero (use a loss "
            "scale), or the loss does not depend on the parameters."
        )
        yield Finding("no-gradient", "problem", title, told, {"share": zero})


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
        if len(recent) > USUAL_OVER:
            del ordered[bisect_left(ordered, recent.popleft())]
    return found


def clipping(track: Track) -> Iterator[Finding]:
    """Judges the share of clipped steps among those that were taken under a limit."""
    limited = [
        i
        for i, step in enumerate(track.steps)
        if not math.isnan(track.limit[i]) and not step.skipped
    ]
    if len(limited) < ENOUGH_FOR_A_RATE:
        return
    late = [i for i in limited if i >= len(track.steps) * WARMING_UP]
    share = sum(track.clipped[i] for i in late) / max(1, len(late))
    typical = nanmedian(track.norm[i] for i in late)
    limit = nanmedian(track.limit[i] for i in late)
    norms = [track.norm[i] for i in limited if not math.isnan(track.norm[i])]
    # A limit that adapts is right to keep its distance.
    fixed = len({track.limit[i] for i in limited}) == 1
    never = not any(track.clipped[i] for i in limited) and len(limited) >= NEVER_IN
    if share >= NEARLY_ALWAYS:
        told = (
            f"The norm is usually {number(typical)}, the limit {number(limit)}: the limit sets the "
            "length of nearly every step, so it works as a second learning rate. Raise it to where "
            "only outliers reach it, or keep it if that is what you want."
        )
        severity: Severity = "warning" if typical > FAR_ABOVE * limit else "note"
        title = f"{percent(share)} of the steps were clipped"
        evidence = {"share": share, "median norm": typical, "limit": limit}
        yield Finding("clipped-nearly-always", severity, title, told, evidence)
    elif never and norms and fixed:
        told = (
            f"In {count(len(limited), 'step')} the largest norm was {number(max(norms))}, the "
            f"limit {number(limit)}. It guards against spikes only; nothing is wrong with that."
        )
        evidence = {"largest norm": max(norms), "limit": limit}
        yield Finding("never-clipped", "note", "The limit was never reached", told, evidence)
