"""A run → its numbers: how many steps, what was skipped and why, loss, norm, scale, speed.

Pure: a `Run` enters, a `Summary` leaves, and nothing is read or printed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from gradilocks.report.lost import lost_places
from gradilocks.report.tracks import aftermath_of
from gradilocks.runfile import BadSteps, Run, Step, backward_groups, origin_of

__all__ = ["Loss", "Spread", "Summary", "quantile", "seconds_of", "summarize"]


@dataclass(frozen=True)
class Loss:
    """The course of an optimizer's loss; None where no step knew a finite one."""

    first: float | None
    last: float | None
    """Mean over the last `window` finite losses of steps that were taken: one alone says little."""
    window: int
    least: float | None
    least_at: int | None
    """The step of the least."""
    nonfinite: int
    """Steps at which the loss itself was NaN or Inf."""
    nonfinite_since: int | None
    """The step from which on it was never finite again; None if it ended well."""


@dataclass(frozen=True)
class Spread:
    """A number over a run, of the steps where it was finite."""

    least: float
    median: float
    p99: float
    most: float
    first: float
    last: float


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Shares are 0 to 1; what the run does not know is None."""

    path: str
    status: str
    """'finished', 'error', 'interrupted', 'exit', or 'no end' for a run that goes on or was killed.
    """
    error: str | None
    steps: int
    """Calls to an optimizer's step, skipped ones included."""
    skipped: int
    reasons: Mapping[str, int]
    """Why steps were skipped, and how many for each reason."""
    culprits: Mapping[str, int]
    """Parameters with non-finite gradients → in how many steps; the most frequent first."""
    clipped: int
    clip_rate: float | None
    """Clipped steps among those taken."""
    losses: Mapping[int, Loss]
    """Optimizers, by their index, and the loss that each of them knew."""
    taken_nonfinite: int
    """Steps that were taken though there were NaN or Inf among the gradients."""
    likely: Mapping[str, int]
    """Parameters at which the NaN or Inf of a skipped step likely arose → in how many steps; steps
    whose gradients do not tell are left out."""
    bad_endings: Mapping[int, str]
    """Optimizers whose last steps ended in NaN or Inf, by their index, and how, in words."""
    norm: Spread | None
    scale: Spread | None
    lr: Spread | None
    seconds: float
    """From the start of each session to its last line, summed up."""
    steps_per_second: float | None
    parameters: int
    """How many numbers all optimizers train."""
    tensors: int
    sessions: int
    torn: int

    def to_plain(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)


def summarize(run: Run) -> Summary:
    """The numbers of one run."""
    steps = run.steps
    skipped = [step for step in steps if step.skipped]
    clipped = sum(step.clipped for step in steps if not step.skipped)
    taken = len(steps) - len(skipped)
    seconds = seconds_of(run)
    culprits = Counter(culprit.name for step in skipped for culprit in step.culprits)
    bad: dict[int, BadSteps] = {}
    for step in steps:
        bad.setdefault(step.optimizer, BadSteps()).take(step)
    return Summary(
        path=str(run.path),
        status="no end" if run.end is None else run.end.status,
        error=None if run.end is None else run.end.error,
        steps=len(steps),
        skipped=len(skipped),
        reasons=dict(Counter(step.reason or "unknown" for step in skipped).most_common()),
        culprits=dict(culprits.most_common()),
        clipped=clipped,
        clip_rate=clipped / taken if taken else None,
        losses=_losses(steps, bad),
        likely=dict(_likely(run).most_common()),
        bad_endings={
            index: each.ending for index, each in sorted(bad.items()) if each.ending is not None
        },
        taken_nonfinite=sum(step.nan + step.inf > 0 for step in steps if not step.skipped),
        norm=_spread(step.norm for step in steps),
        scale=_spread(step.scale for step in steps),
        lr=_spread(step.lr for step in steps),
        seconds=seconds,
        steps_per_second=len(steps) / seconds if steps and seconds > 0 else None,
        parameters=sum(sum(info.sizes) for info in run.optimizers),
        tensors=sum(len(info.names) for info in run.optimizers),
        sessions=1 + len(run.resumed),
        torn=run.torn,
    )


def seconds_of(run: Run) -> float:
    """How long the run has taken: each session counts its time from its own header."""
    last = [before.time for before, after in pairwise(run.steps) if after.time < before.time]
    at_end = run.steps[-1].time if run.steps else 0.0
    if run.end is not None:
        at_end = max(at_end, run.end.time)
    return sum(last) + at_end


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted numbers; between two of them where it falls between.

    Example:
        >>> quantile([1.0, 2.0, 4.0], 0.75)
        3.0
    """
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    part = place - below
    return ordered[below] * (1 - part) + ordered[above] * part


def _likely(run: Run) -> Counter[str]:
    """Where the NaN or Inf of skipped steps likely arose, if nothing had spoilt weights before."""
    return Counter(
        origin.name
        for step, mark, group in zip(
            run.steps, aftermath_of(run), backward_groups(run.steps), strict=True
        )
        if step.skipped
        and step.culprits
        and not mark
        and (origin := origin_of(step, others=[each for each in group if each is not step])).name
    )


def _losses(steps: Sequence[Step], bad: Mapping[int, BadSteps]) -> dict[int, Loss]:
    by_index: dict[int, list[Step]] = {}
    for step in steps:
        by_index.setdefault(step.optimizer, []).append(step)
    made = {index: _loss(by_index[index], bad[index]) for index in sorted(by_index)}
    return {index: loss for index, loss in made.items() if loss is not None}


def _loss(steps: Sequence[Step], bad: BadSteps) -> Loss | None:
    known = [(step.loss, step.step) for step in steps if step.loss is not None]
    lost = lost_places(steps, bad)
    if not known and not lost:
        return None
    window = max(1, min(50, len(known) // 10))
    # A step that was skipped taught nothing, and its loss may be why it was.
    taken = [step.loss for step in steps if step.loss is not None and not step.skipped]
    tail = (taken or [loss for loss, _ in known])[-window:]
    least, least_at = min(known, default=(None, None))
    return Loss(
        first=known[0][0] if known else None,
        last=sum(x / len(tail) for x in tail) if tail else None,
        window=window,
        least=least,
        least_at=least_at,
        nonfinite=len(lost),
        nonfinite_since=bad.lost_since,
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    first, last = known[0], known[-1]
    known.sort()
    return Spread(known[0], quantile(known, 0.5), quantile(known, 0.99), known[-1], first, last)
