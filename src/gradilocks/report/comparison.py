"""Runs → their numbers: how many steps, what was skipped and why, loss, norm, scale, speed; and of
several runs what differs between them. The first is the one that the others are compared with.

Pure: runs enter, a `Summary` or a `Comparison` leaves, and nothing is read or printed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from gradilocks.report.tracks import Track, quantile, tracks
from gradilocks.runfile import Header, Run, has_bad_gradients, state_without_end


@dataclass(frozen=True)
class Loss:
    """The course of an optimizer's loss; None where no step knew a finite one."""

    first: float | None
    """At the first step."""
    last: float | None
    """The median over the last `window` finite losses of steps that were taken: one alone says
    little. None if the loss ended as NaN or Inf."""
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
class OwnNumber:
    """One of the user's own numbers over a run; None where it was never finite."""

    values: int
    """How often it was logged."""
    first: float | None
    last: float | None
    """The last one, NaN or not: None if it was not finite."""
    last_at: int
    least: float | None
    least_at: int | None
    most: float | None
    most_at: int | None


def own_numbers(run: Run) -> dict[str, OwnNumber]:
    """The user's own numbers of a run, by name."""
    found = {}
    for name, pairs in run.logged.items():
        finite = [(value, step) for step, value in pairs if math.isfinite(value)]
        least, least_at = min(finite, default=(None, None))
        most, most_at = max(finite, default=(None, None))
        step, last = pairs[-1]
        found[name] = OwnNumber(
            values=len(pairs),
            first=finite[0][0] if finite else None,
            last=last if math.isfinite(last) else None,
            last_at=step,
            least=least,
            least_at=least_at,
            most=most,
            most_at=most_at,
        )
    return found


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Shares are 0 to 1; what the run does not know is None."""

    path: str
    status: str
    """'finished', 'error', 'interrupted', 'exit'; of a run without an end 'running' or 'killed' if
    that can be seen from here, else 'no end'."""
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
    damaged: int
    """Lines that were left out for being damaged."""
    logged: Mapping[str, OwnNumber]
    """The user's own numbers, by name."""


def summarize(run: Run) -> Summary:
    """The numbers of one run."""
    steps = run.steps
    skipped = [step for step in steps if step.skipped]
    clipped = sum(step.clipped for step in steps if not step.skipped)
    taken = len(steps) - len(skipped)
    seconds = seconds_of(run)
    culprits = Counter(culprit.name for step in skipped for culprit in step.culprits)
    followed = tracks(run)
    likely = Counter(
        origin.name
        for track in followed
        for origin in track.origins(i for i in track.skipped if track.steps[i].culprits)
        if origin.name
    )
    losses = {track.optimizer.index: _loss(track) for track in followed}
    endings = {track.optimizer.index: track.ending for track in followed}
    return Summary(
        path=str(run.path),
        status=state_without_end(run.process) if run.end is None else run.end.status,
        error=None if run.end is None else run.end.error,
        steps=len(steps),
        skipped=len(skipped),
        reasons=dict(Counter(step.reason or "unknown" for step in skipped).most_common()),
        culprits=dict(culprits.most_common()),
        clipped=clipped,
        clip_rate=clipped / taken if taken else None,
        losses={index: loss for index, loss in losses.items() if loss is not None},
        likely=dict(likely.most_common()),
        bad_endings={index: words for index, words in endings.items() if words is not None},
        taken_nonfinite=sum(has_bad_gradients(step) for step in steps if not step.skipped),
        norm=_spread(step.norm for step in steps),
        scale=_spread(step.scale for step in steps),
        lr=_spread(step.lr for step in steps),
        seconds=seconds,
        steps_per_second=len(steps) / seconds if steps and seconds > 0 else None,
        parameters=sum(sum(info.sizes) for info in run.optimizers),
        tensors=sum(len(info.names) for info in run.optimizers),
        sessions=1 + len(run.resumed),
        torn=run.torn,
        damaged=len(run.damaged),
        logged=own_numbers(run),
    )


def seconds_of(run: Run) -> float:
    """How long the run has taken: each session counts its time from its own header."""
    last = [before.time for before, after in pairwise(run.steps) if after.time < before.time]
    at_end = run.steps[-1].time if run.steps else 0.0
    if run.end is not None:
        at_end = max(at_end, run.end.time)
    return sum(last) + at_end


def _loss(track: Track) -> Loss | None:
    known = [(step.loss, step.step) for step in track.steps if step.loss is not None]
    if not known and not track.lost:
        return None
    first, last, over = track.loss_ends
    least, least_at = min(known, default=(None, None))
    return Loss(
        first=None if math.isnan(first) else first,
        last=None if math.isnan(last) else last,
        window=over,
        least=least,
        least_at=least_at,
        nonfinite=len(track.lost),
        nonfinite_since=track.bad.lost_since,
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    first, last = known[0], known[-1]
    known.sort()
    return Spread(known[0], quantile(known, 0.5), quantile(known, 0.99), known[-1], first, last)


@dataclass(frozen=True)
class Parting:
    """Where the losses of a run leave those of the first run."""

    shared: int
    """Steps of which both runs know the loss, NaN and Inf included."""
    step: int | None
    """The first of them at which the losses differ; None if all are equal."""
    first: float | None
    """The first run's loss there; None if it was NaN or Inf, or no step differs."""
    other: float | None
    """This run's, likewise."""


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; every sequence runs along them."""

    summaries: tuple[Summary, ...]
    what_ran: Mapping[str, tuple[Any, ...]]
    """What the headers say, as far as they differ: 'settings.clip' → one value a run, None where a
    run has none."""
    partings: tuple[Parting, ...]
    """Of every run but the first."""
    missing: tuple[tuple[str, ...], ...]
    """Parameters that another run has and this one lacks."""

    def to_plain(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        plain = asdict(self)
        return {"runs": plain.pop("summaries"), **plain}


def compare(runs: Sequence[Run]) -> Comparison:
    """Compares runs, at least one, in the order given."""
    losses = [_losses(run) for run in runs]
    return Comparison(
        summaries=tuple(map(summarize, runs)),
        what_ran=_what_differs([_flat(run.header) for run in runs]),
        partings=tuple(_parting(losses[0], other) for other in losses[1:]),
        missing=_missing(runs),
    )


def _flat(header: Header) -> dict[str, Any]:
    found: dict[str, Any] = {"command": " ".join(header.command)}
    for name in ("config", "git", "settings", "versions", "hardware"):
        for key, value in (getattr(header, name) or {}).items():
            if (name, key) != ("config", "argv"):  # The command has it.
                found[f"{name}.{key}"] = value
    found["ranks"] = header.ranks
    return found


def _what_differs(headers: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    names = dict.fromkeys(name for header in headers for name in header)
    rows = {name: tuple(header.get(name) for header in headers) for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


_Losses = dict[tuple[int, int], float | None]


def _losses(run: Run) -> _Losses:
    """By step and optimizer; None for one that was NaN or Inf, and no entry where nobody knew."""
    # A session that went on from a checkpoint repeats steps: the later one counts.
    return {
        (step.step, step.optimizer): step.loss
        for step in run.steps
        if step.loss is not None or step.loss_nonfinite
    }


def _parting(first: _Losses, other: _Losses) -> Parting:
    shared = sorted(first.keys() & other.keys())
    for key in shared:
        if first[key] != other[key]:
            return Parting(len(shared), key[0], first[key], other[key])
    return Parting(len(shared), None, None, None)


def _missing(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    names = [dict.fromkeys(n for info in run.optimizers for n in info.names) for run in runs]
    anywhere = dict.fromkeys(name for own in names for name in own)
    return tuple(tuple(name for name in anywhere if name not in own) for own in names)
