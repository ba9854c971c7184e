"""Findings about the curves of a run: loss, gradient norm, and the limit that it is clipped at."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from gradilocks.report.formatting import clean, count, listed, number, percent, power
from gradilocks.report.health import Finding, Severity
from gradilocks.report.tracks import Tensor, Track, nanmedian

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
# A step that changed a tensor by more than the tensor itself.
THROWN = 1.0
# So many of the weights at one step: the model that was initialized is gone.
MANY_THROWN = 1 / 3
# With several optimizers a loss that one of them raises is often another's success.
BLOWN_UP_AMONG_SEVERAL = 1e4
# Fewer losses than this are no rise.
FEWEST_TO_RISE = 3
# A rise begins where most losses from there on are more than ten times the usual.
RISEN = 10.0
# A rate that is too high lets the loss grow by a few times a step. A hundred times in one step, out
# of so many losses of which the last was like the others, is a batch.
JUMP = 100.0
CALM = 10
NOT_RISING = 3.0
# Losses before NaN that tell how far it had come.
JUST_BEFORE = 3
# In fewer steps a loss may stand still in health, on a small learning rate.
ENOUGH_TO_STAND = 100
# A slope of less than two standard errors is none.
SURELY = 2.0
# Means of ten windows lie 3.1 standard errors apart by chance, and hardly ever five.
BY_CHANCE = 5.0
# A loss so noisy that a fall by a tenth would not show says nothing.
WOULD_BE_SEEN = 0.1
# Nor does one that differs by a third of itself from step to step: a diffusion model's follows the
# noise that was drawn, and hardly what is learned.
TOO_NOISY = 0.3
# Of itself a step: less, and a thousand steps change a tensor by a hundredth; more, and each step
# throws away what the one before has learned.
HARDLY, WILDLY = 1e-5, 0.1
# Steps after which a sum of gradients shows.
ENOUGH_TO_ADD_UP = 30
# Steps at the beginning at which every one adds to the norm.
ADDING = 6
# By then the norm is this much larger; one that grows with the weights takes longer.
BEGINS_TO_ADD = 1.2
# A sum of so many gradients has grown to three times the first, however they are directed.
ADDED_UP = 3.0
# A sum of k gradients changes by about 1/k a step; single batches differ by a tenth and more.
SMOOTH = 0.05
SUM_MAY_FALL = 0.3
# Under a limit: what the second gradient makes of the first, which is clearly below the limit, and
# the most that one adds later on.
FIRST_SUM = 1.25
CLEARLY_BELOW = 0.75
MOST_ADDED = 3.0
# Ten times the median of the hundred steps before. Norms of a healthy run vary by two or three.
SPIKE = 10.0
USUAL_OVER = 100
# And so many times the usual distance from it, in orders of magnitude.
FAR_FROM_USUAL = 6.0
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
# A sum of gradients under a clip is the limit and one gradient more.
NOT_MUCH_ABOVE = 3.0
# Of the clipped steps: so many whose norm was below the limit are no accident of rounding.
CUT_BY_A_SCALE = 1e-3
"""A limit below so much of the norm was hardly meant: the clip saw gradients times a scale."""
BELOW_THE_LIMIT = 0.9
# So far above the limit, a usual norm says that the limit was set for another model.
FAR_ABOVE = 10.0


def divergence(track: Track) -> Iterator[Finding]:
    """Judges where the loss ended against where it began and how low it had been."""
    known = [(i, value) for i, value in enumerate(track.loss) if not math.isnan(value)]
    blown, back = _blown_up(track, known), _never_came_back(track, known)
    first, last, _ = track.loss_ends
    if back is not None and (blown is None or abs(last) < RISEN * abs(first)):
        yield back
    elif blown is not None:
        yield blown
    elif track.bad.lost_from is None:
        yield from _higher_again(track, known)


def _blown_up(track: Track, known: Sequence[tuple[int, float]]) -> Finding | None:
    """The loss rose by orders of magnitude, and the norm with it; to NaN in the end, or not."""
    if len(known) < FEWEST_TO_RISE:
        return None
    first, _, over = track.loss_ends
    lost = track.bad.lost_from is not None
    # On the way to NaN a loss multiplies with every step: the last few tell how far it came.
    last = median(value for _, value in known[-(JUST_BEFORE if lost else over) :])
    size = max(1, len(known) // WINDOWS)
    lows = [
        median(abs(value) for _, value in known[i : i + size])
        for i in range(0, len(known) - size + 1, size)
    ]
    # One loss alone may be small by chance, if no step has thrown the model away just after it.
    usual = max(abs(first), 0.0 if _uprooted(track) else min(lows), 1e-30)
    grown = _growth(track, [i for i, _ in known[:size]], [i for i, _ in known[-over:]])
    # Adam bounds a step whatever the norm is. Then the weights tell, and what is left is thrown
    # from batch to batch: some losses are zero, and only their mean is large.
    thrown = any(value >= THROWN for t in track.tensors for value in t.update if _is_weight(t))
    half = [abs(value) for _, value in known[len(known) // 2 :]]
    level = math.fsum(value / len(half) for value in half) if thrown else abs(last)
    least = BLOWN_UP_AMONG_SEVERAL if track.several else BLOWN_UP
    if not (max(level, abs(last)) >= least * usual and (grown >= NORM_GREW or thrown)):
        return None
    rise = _rise(known, RISEN * usual)
    last = known[-1][1] if lost else last
    step, end, rate = track.steps[rise].step, track.steps[known[-1][0]].step, track.steps[rise].lr
    title = f"The loss diverged: {number(first)} → {number(last)}" + (", then NaN" if lost else "")
    told = f"It began at {number(first)}, rose from step {step:,} on and was {number(last)} at step"
    told += f" {end:,}. " + (
        f"Since step {track.bad.lost_since:,} it is NaN or Inf: numbers this large overflow. "
        if lost
        else "It is still finite, and means nothing any more. "
    )
    used = "" if rate is None else f" ({number(rate)} at step {step:,})"
    before = _before_a_jump(known, rise)
    if before is not None:
        told += (
            f"It came in one step, from {number(before)} to {number(track.loss[rise])}, out of "
            "weights that were good the step before: look at the batch of that step first, at the "
            f"size of its inputs and at its targets. Then at the learning rate{used}; a limit on "
            "the norm, or SkipSpikes, keeps a single batch from doing that. "
        )
    elif any(gradients_add_up(track)):
        told += "The gradients add up from step to step: clear them first. "
    else:
        told += f"Lower the learning rate{used} first, to a tenth; then try a longer warm-up, or a "
        told += "limit on the norm. "
    told += (
        f"Go back to a checkpoint before step {step:,}: the weights since then are of no use."
        if rise > FEWEST_TO_RISE
        else "Begin anew: nothing was learned before it."
    )
    traces = [track.traces[place] for place in sorted(track.traces) if place >= rise]
    if traces:
        told += (
            f" A trace saw the overflow in {clean(traces[0].module) or 'the model'} at step "
            f"{traces[0].step:,}: that is where the growth showed, and not its cause."
        )
    evidence = {"first": first, "last finite" if lost else "last": last}
    return Finding("loss-diverged", "problem", title, told, evidence, step=step)


def _before_a_jump(known: Sequence[tuple[int, float]], rise: int) -> float | None:
    """The usual loss before a rise, if that came in one step; None if it was coming."""
    before = [value for place, value in known if place < rise][-CALM:]
    if len(before) < CALM:
        return None
    usual = median(map(abs, before))
    calm = abs(before[-1]) <= NOT_RISING * usual
    jump = next(abs(value) for place, value in known if place == rise)
    return usual if calm and usual > 0 and jump >= JUMP * usual else None


def _rise(known: Sequence[tuple[int, float]], bound: float) -> int:
    """The first place from which on most losses are above a bound."""
    above, rise = 0, known[-1][0]
    for many, (place, value) in enumerate(reversed(known), 1):
        above += abs(value) > bound
        if abs(value) > bound and 2 * above > many:
            rise = place
    return rise


def _uprooted(track: Track) -> bool:
    """Whether a step changed a third of the weights, or more, by more than themselves.

    Single ones that begin next to zero are, in health.
    """
    weights = [t.update for t in track.tensors if _is_weight(t)]
    return any(
        sum(value >= THROWN for value in row) >= MANY_THROWN * len(row)
        for row in zip(*weights, strict=True)
    )


def _never_came_back(track: Track, known: Sequence[tuple[int, float]]) -> Finding | None:
    """Steps larger than the weights, a loss that rose to many times the first, and an end above
    it: normalization holds norm and loss, so that nothing overflows, and nothing is learned."""
    first, last, _ = track.loss_ends
    if len(known) < 2 * FEWEST_TO_RISE or track.several or track.bad.lost_from is not None:
        return None
    peak = max(
        median(abs(value) for _, value in known[i : i + FEWEST_TO_RISE])
        for i in range(len(known) - FEWEST_TO_RISE + 1)
    )
    if not (abs(last) > abs(first) > 0 and peak >= RISEN * abs(first) and _uprooted(track)):
        return None
    highest = max(track.lr, key=lambda rate: -1.0 if math.isnan(rate) else rate)
    used = "" if math.isnan(highest) else f" (up to {number(highest)})"
    place = next(i for i, value in known if abs(value) >= RISEN * abs(first))
    told = (
        f"It began at {number(first)}, was about {number(peak)} at its highest and ended at "
        f"{number(last)}, and a step changed many weights by more than themselves: what they began "
        f"with is gone. The learning rate{used} is too high: lower it, to a tenth, then try a "
        "longer warm-up."
    )
    title = f"The loss rose to {number(peak)} and ended above where it began"
    evidence = {"first": first, "highest": peak, "last": last}
    step = track.steps[place].step
    return Finding("loss-diverged", "warning", title, told, evidence, step=step)


def _is_weight(tensor: Tensor) -> bool:
    """Not a bias: those begin at zero, and a part of nothing is large."""
    return not tensor.name.endswith("bias")


def _higher_again(track: Track, known: Sequence[tuple[int, float]]) -> Iterator[Finding]:
    """The loss lost half of what it had gained, beyond its noise."""
    if len(known) < WINDOWS * SHORTEST // 2:
        return
    size = max(SHORTEST, len(known) // WINDOWS)
    windows = [known[i : i + size] for i in range(0, len(known) - size + 1, size)]
    middles = [nanmedian(value for _, value in window) for window in windows]
    start, best, last = middles[0], min(middles), middles[-1]
    noise = median(
        median(abs(value - middle) for _, value in window)
        for window, middle in zip(windows, middles, strict=True)
    )
    lost = last - best
    if lost <= NOISE * noise or lost <= LOST * (start - best):
        return
    first, ended, _ = track.loss_ends
    step = track.steps[windows[middles.index(best)][-1][0]].step
    title = "The loss ended higher than it began" if last > start else "The loss rose again"
    told = (
        f"It began at {number(first)}, was lowest (about {number(best)}) around step {step:,}, and "
        f"ended at {number(ended)}. That is usual where targets move or networks play against each "
        "other; elsewhere look at what the norm did after that step."
    )
    evidence = {"first": first, "lowest": best, "last": ended}
    yield Finding("loss-diverged", "note", title, told, evidence, step=step)


def standing_still(track: Track) -> Iterator[Finding]:
    """Says so if the loss did not move beyond its noise, and a move would have been seen."""
    taken = [
        (i, loss)
        for i, loss in enumerate(track.loss)
        if not math.isnan(loss) and not track.steps[i].skipped
    ]
    # Two networks hold each other's loss in place, and a loss of both signs is none that should
    # fall (a policy's). A learning rate that still rises has hardly begun.
    losses = [loss for _, loss in taken]
    if (
        len(taken) < ENOUGH_TO_STAND
        or track.several
        or track.bad.ending is not None
        or min(losses) <= 0 <= max(losses)
        or _still_warming_up(track)
    ):
        return
    level, count_of = abs(median(losses)), len(losses)
    middle = (count_of - 1) / 2
    squares = count_of * (count_of**2 - 1) / 12
    mean = math.fsum(losses) / count_of
    slope = math.fsum((n - middle) * (x - mean) for n, x in enumerate(losses)) / squares
    rests = [x - mean - slope * (n - middle) for n, x in enumerate(losses)]
    spread = math.sqrt(math.fsum(x * x for x in rests) / (count_of - 2))
    # Of what it gained over the run, by a straight line, and of how exactly that is known.
    moved, error = abs(slope) * count_of, spread * count_of / math.sqrt(squares)
    tenth = count_of // 10
    means = [math.fsum(losses[i * tenth : (i + 1) * tenth]) / tenth for i in range(10)]
    waves = (max(means) - min(means)) > BY_CHANCE * spread / math.sqrt(tenth)
    unclear = spread > TOO_NOISY * level or moved + 3 * error > WOULD_BE_SEEN * level
    if moved > SURELY * error or waves or unclear:
        return
    first, last, _ = track.loss_ends
    title = f"The loss stands still: {number(first)} → {number(last)}"
    told = (
        f"Over {count(count_of, 'step')} it did not move beyond its noise of {number(spread)} a "
        f"step. {_why_it_stands(track)}"
    )
    evidence = {"first": first, "last": last, "noise": spread}
    yield Finding("loss-stands-still", "warning", title, told, evidence)


def _still_warming_up(track: Track) -> bool:
    """Whether the learning rate was at its highest only at the end."""
    rates = [step.lr for step in track.steps if step.lr is not None]
    return bool(rates) and rates[-1] > rates[0] and rates[-1] >= 0.99 * max(rates)


def _why_it_stands(track: Track) -> str:
    """What the weights did meanwhile."""
    weights = [t for t in track.tensors if _is_weight(t)]
    usual = nanmedian(t.usual_update for t in weights if t.usual_norm > 0)
    rate = next((step.lr for step in reversed(track.steps) if step.lr is not None), None)
    of = "" if rate is None else f" ({number(rate)})"
    if 2 * sum(t.usual_norm == 0 for t in weights) > len(weights):
        return "The gradients of most tensors are zero: nothing is learned there."
    if usual < HARDLY:
        return (
            f"A step usually changes a tensor by {number(usual)} of itself, where about 0.001 is "
            f"usual: the learning rate{of} is too small{_or_clipped_too_soon(track)}."
        )
    if usual > WILDLY:
        return (
            f"A step usually changes a tensor by {number(usual)} of itself, where about 0.001 is "
            f"usual: the learning rate{of} is too large."
        )
    return (
        "Look at whether inputs and targets belong together, whether the loss depends on what is "
        f"trained, and at the learning rate{of}. A run that went on from trained weights may have "
        "nothing left to gain."
    )


def _or_clipped_too_soon(track: Track) -> str:
    """What else makes steps so small, where gradients are both scaled and nearly always clipped."""
    taken = max(1, len(track.steps) - len(track.skipped))
    if not track.scaled or sum(track.clipped) < NEARLY_ALWAYS * taken:
        return ""
    return (
        ", or the gradients were clipped before they were unscaled: call "
        "`scaler.unscale_(optimizer)` before `clip_grad_norm_`"
    )


def gradients_add_up(track: Track) -> Iterator[Finding]:
    """Notices gradients that nobody clears: each step's contains all that came before."""
    taken = [i for i, step in enumerate(track.steps) if not step.skipped]
    norm = [track.norm[i] for i in taken]
    if len(norm) < ENOUGH_TO_ADD_UP or any(math.isnan(v) or v <= 0 for v in norm):
        return
    first = norm[0]
    limits = {track.limit[i] for i in taken}
    if len(limits) == 1 and _adds_up_to(min(limits), norm):
        title = "The gradients add up from step to step, as if zero_grad were missing"
        told = (
            f"The norm was {number(first)} at first, {number(norm[1])} after one step, and has "
            f"never fallen below the limit of {number(min(limits))} since it passed it: usually it "
            f"is {number(median(norm))}. That is what gradients look like that nobody clears: each "
            "step adds to what the clip has left of all before it. Call `optimizer.zero_grad()` "
            "once a step."
        )
        evidence = {"first norm": first, "median norm": median(norm), "limit": min(limits)}
        yield Finding("gradients-add-up", "warning", title, told, evidence, step=1)
        return
    # What a step adds is at most its own gradient. So a sum grows by a part of itself that gets
    # smaller and smaller, without the jumps of single batches, and does not come down again.
    changes = sorted(abs(b / a - 1) for a, b in pairwise(norm[len(norm) // 10 :]))
    peak, fallen = first, 0.0
    for value in norm:
        peak = max(peak, value)
        fallen = max(fallen, 1 - value / peak)
    begin = norm[:ADDING]
    adds = all(b >= 0.98 * a and b - a <= 1.5 * first for a, b in pairwise(begin))
    adds = adds and begin[-1] >= BEGINS_TO_ADD * first
    smooth = changes[len(changes) // 2] <= SMOOTH
    if not (adds and smooth and fallen <= SUM_MAY_FALL and median(norm) >= ADDED_UP * first):
        return
    title = "The gradients add up from step to step, as if zero_grad were missing"
    told = (
        f"The norm was {number(first)} at first, {number(begin[-1])} at step {len(begin)} and is "
        f"usually {number(median(norm))}; it hardly ever falls. That is what gradients look like "
        "that nobody clears: each step repeats all before it. Call `optimizer.zero_grad()` once a "
        "step."
    )
    evidence = {"first norm": first, "median norm": median(norm)}
    yield Finding("gradients-add-up", "warning", title, told, evidence, step=1)


def _adds_up_to(limit: float, norm: Sequence[float]) -> bool:
    """Whether gradients add up to a limit, at which a clip holds their sum.

    A sum of the first two gradients is clearly larger than the first. Then it rises by no more than
    a gradient a step to the limit, and what the clip leaves is the limit itself: the next gradient
    hardly ever makes less of it, and not much more.
    """
    first = norm[0]
    reached = next((i for i, value in enumerate(norm) if value > limit), len(norm))
    rise, held = norm[: reached + 1], norm[reached + 1 :]
    return (
        first <= CLEARLY_BELOW * limit
        and norm[1] >= FIRST_SUM * first
        and len(held) >= ENOUGH_TO_ADD_UP
        and all(b >= 0.98 * a and b - a <= 1.5 * first for a, b in pairwise(rise))
        and all(limit < value <= limit + MOST_ADDED * first for value in held)
    )


def _growth(track: Track, early: Sequence[int], late: Sequence[int]) -> float:
    """How many times larger the norm was; infinite if it was not even finite any more."""
    after = early[-1]
    if any(place > after for place in track.taken):
        return math.inf
    before = nanmedian(track.norm[i] for i in early)
    then = nanmedian(track.norm[i] for i in late)
    return then / before if before > 0 and not math.isnan(then) else 1.0


def converged(track: Track) -> bool:
    """Whether the loss, and the norm with it, has next to nothing left to fall."""
    for values in (track.loss, track.norm):
        known = [value for value in values if not math.isnan(value)]
        size = max(1, len(known) // WINDOWS)
        first = nanmedian(known[:size])
        if not first > 0 or not 0 <= nanmedian(known[-size:]) <= 1e-2 * first:
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
    if len(taken) >= FEWEST_NORMS and zero >= SILENT and not converged(track):
        title = f"All gradients were zero at {percent(zero)} of the steps"
        scale = "a larger loss scale" if track.scaled else "a loss scale"
        told = "Nothing can be learned from them. " + (
            f"They may have been rounded to zero (use {scale}), or the loss does not depend on the "
            "parameters."
            if track.may_underflow
            else "The loss does not depend on the parameters: something is multiplied by zero or "
            "clamped on the way, or every unit is dead."
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
            if value > SPIKE * usual > 0 and value > _usually_below(ordered, usual):
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


def _usually_below(ordered: Sequence[float], usual: float) -> float:
    """Where a spike begins by how norms usually spread: with batches of one sample some are a
    hundred times others, and none of them is a spike."""
    spread = median(abs(math.log(value / usual)) for value in ordered if value > 0)
    return usual * math.exp(min(FAR_FROM_USUAL * spread, 700.0))


def clipped_while_scaled(track: Track) -> Iterator[Finding]:
    """Notices a clip before the gradients were unscaled: it cut what was below its limit.

    A run file has the limit without the scale, and one of version 0.1 as the script wrote it.
    """
    clipped = [i for i, is_clipped in enumerate(track.clipped) if is_clipped and track.limit[i] > 0]
    limits: dict[int, float] = {}
    for i in clipped:
        norm, limit, scale = track.norm[i], track.limit[i], track.scale[i]
        if scale > 1 and norm < 0.99 * limit and norm * scale > limit:
            limits[i] = limit
        # A script that multiplies its limit by the scale does not cut to a thousandth.
        elif scale > 1 and limit < norm * CUT_BY_A_SCALE and norm < 0.99 * limit * scale:
            limits[i] = limit * scale
    if len(clipped) < FEWEST_NORMS or len(limits) < BELOW_THE_LIMIT * len(clipped):
        return
    scaled = list(limits)
    first = scaled[0]
    limit, scale = nanmedian(limits.values()), track.scale[scaled[-1]]
    title = "The gradients were clipped before they were unscaled"
    told = (
        f"At {len(scaled):,} of {count(len(clipped), 'clipped step')} the norm was below the limit "
        f"of {number(limit)}, usually {number(nanmedian(track.norm[i] for i in scaled))}: the clip "
        f"saw the gradients times the scale. What it left of them was {number(limit / scale)} long "
        f"once the scale of {power(scale)} was taken out, so the steps are far too small. Call "
        "`scaler.unscale_(optimizer)` before `clip_grad_norm_`."
    )
    evidence = {"steps": len(scaled), "limit": limit, "scale": scale}
    step = track.steps[first].step
    yield Finding("clipped-while-scaled", "problem", title, told, evidence, step=step)


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
            "length of nearly every step, so it works as a second learning rate. "
        )
        if fixed and all(limit < track.norm[i] <= NOT_MUCH_ABOVE * limit for i in late):
            told += (
                "No norm was below it, and none far above: see first that `zero_grad` is called "
                "once a step, for a clip holds gradients that add up just there. "
            )
        told += "Raise it to where only outliers reach it, or keep it if that is what you want."
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
