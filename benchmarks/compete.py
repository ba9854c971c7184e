"""Builds the contenders, lets them compete, and compares what they have computed.

A contender that cannot be built or run is left out with a note, and so is an optional one whose
result differs; anybody else's differing result is a failure of the whole run, told at its end.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from harness import Contender, Ready, alternate, synchronize
from torch import Tensor

from report import Notes, Row, rows_of


@dataclass(frozen=True)
class Settings:
    """What all competitions of a run have in common."""

    device: torch.device
    notes: Notes = field(default_factory=Notes)
    queued: bool = False
    """Whether the device is also timed with its queue full."""


def compete(
    workload: str,
    contenders: Sequence[Contender],
    settings: Settings,
    *,
    rounds: int,
    start: Callable[[], Iterable[Tensor]],
    tolerance: float,
    floor_ms: float | None = None,
    at_most: int = 100,
) -> list[Row]:
    """Times the contenders against each other.

    Args:
        workload: its name in the rows.
        contenders: in the order of the rows.
        settings: of the run.
        rounds: how often each is timed.
        start: what the results were before the first step.
        tolerance: how far results may lie apart, as a part of what the steps have changed.
        floor_ms: for the rows.
        at_most: how many fit into memory at once. If there are more, each further batch also has
            the fastest baseline of the first, and its ratios are against that one.
    """
    rows: list[Row] = []
    waiting, companion = list(contenders), None
    while waiting:
        room = at_most - (companion is not None)
        batch, waiting = waiting[:room], waiting[room:]
        if companion is not None:
            batch = [companion, *batch]
        found = _compete_in_one_batch(workload, batch, settings, rounds, start, tolerance, floor_ms)
        rows += [row for row in found if companion is None or row.contender != companion.name]
        free()
        if companion is None and rows:
            best = rows[0].baseline.get("wall")
            companion = next((c for c in contenders if c.name == best), None)
    return rows


def free() -> None:
    """Gives memory back before the next contenders are built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compete_in_one_batch(
    workload: str,
    contenders: Sequence[Contender],
    settings: Settings,
    rounds: int,
    start: Callable[[], Iterable[Tensor]],
    tolerance: float,
    floor_ms: float | None,
) -> list[Row]:
    built: list[tuple[Contender, Ready]] = []
    for contender in contenders:
        ready = _built(workload, contender, settings)
        if ready is not None:
            built.append((contender, ready))
    if not built:
        return []
    times = alternate(
        [ready for _, ready in built],
        rounds=rounds,
        device=settings.device,
        queued=settings.queued,
    )
    distances = _distances([ready for _, ready in built], start)
    kept = []
    for place, (contender, _) in enumerate(built):
        if distances[place] <= tolerance:  # A NaN is not.
            kept.append(place)
            continue
        differs = (
            f"{workload}: the result of {contender.name} lies {distances[place]:.2g} of the "
            f"change away from that of {built[0][0].name}, more than {tolerance:g}"
        )
        if contender.optional:
            settings.notes.say(differs + "; left out")
        else:
            settings.notes.say(differs, failure=True)
            kept.append(place)
    return rows_of(
        workload,
        [built[place][0] for place in kept],
        [times[place] for place in kept],
        floor_ms=floor_ms,
    )


def _built(workload: str, contender: Contender, settings: Settings) -> Ready | None:
    """The contender after its first step; None if it cannot take part."""
    try:
        ready = contender.build()
        ready.prepare()
        ready.run()
        synchronize(settings.device)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        settings.notes.say(
            f"{workload}: {contender.name} left out ({type(error).__name__}: {reason})",
            failure=not contender.optional,
        )
        ready = None
    if ready is None:  # Here, where the error no longer holds on to what was built.
        free()
    return ready


def _distances(ready: Sequence[Ready], start: Callable[[], Iterable[Tensor]]) -> list[float]:
    """How far each result lies from the first one's, as a part of the way from the start."""
    most = max(each.ahead for each in ready)
    for each in ready:  # Some took steps while they were built: the others catch up.
        for _ in range(most - each.ahead):
            each.prepare()
            each.run()
    first = ready[0].result()
    way = _distance(start(), first)
    return [_distance(first, each.result()) / way if way else math.nan for each in ready]


@torch.no_grad()
def _distance(here: Iterable[Tensor], there: Iterable[Tensor]) -> float:
    # Tensor by tensor, since a difference of all of them may not fit into memory.
    norms = [
        torch.linalg.vector_norm(a.float() - b.float()) for a, b in zip(here, there, strict=True)
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms).double()))
