"""Several runs → what differs between them.

The first run is the one that the others are compared with. Pure: runs enter, a `Comparison` leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradilocks.report.summary import Summary, summarize
from gradilocks.runfile import Header, Run

__all__ = ["Comparison", "Parting", "compare"]


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
        return {
            "runs": [summary.to_plain() for summary in self.summaries],
            "what_ran": {name: list(values) for name, values in self.what_ran.items()},
            "partings": [asdict(parting) for parting in self.partings],
            "missing": [list(names) for names in self.missing],
        }


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
    for name in ("settings", "versions", "hardware"):
        for key, value in getattr(header, name).items():
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
