"""Numbers of a step, on the host → a Step: unscaled, in their places, with culprits by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradilocks.record.batch import Held
from gradilocks.runfile import Culprit, Detail, OptimizerInfo, Step

__all__ = ["Known", "step_of"]


@dataclass
class Known:
    """An optimizer that is recorded."""

    info: OptimizerInfo
    backward: list[int]
    """The places of its parameters in backward order."""
    ordered: bool = True
    """Whether that is the order of a model, and not of the optimizer's list alone."""
    whole: bool = True
    """Whether this process sees each gradient whole, and every loss that made it."""
    steps: int = 0
    """How many steps it has handed over, in earlier sessions too."""


def step_of(held: Held, known: Known) -> Step:
    """The record of a step whose numbers have arrived."""
    numbers = held.scalars
    skip = numbers["skip"] or 0.0
    rejected = skip == 2.0 or bool(numbers["rejected"])
    skipped = skip > 0 or rejected
    nan, inf = _counts(held, "nan"), _counts(held, "inf")
    places = range(len(nan)) if held.places is None else held.places
    return Step(
        step=held.step,
        time=held.time,
        optimizer=held.index,
        loss=_finite(numbers["loss"]),
        scale=_finite(numbers["scale"]),
        norm=_finite(numbers["norm"]),
        limit=_finite(numbers["limit"]),
        clipped=bool(numbers["clipped"]) and not skipped,
        skipped=skipped,
        reason=None if not skipped else "rejected" if rejected else "nonfinite",
        culprits=_culprits(known, places, nan, inf),
        lr=_finite(numbers["lr"]),
        nan=sum(nan),
        inf=sum(inf),
        detail=_detail(held, known, places) if held.detail else None,
        loss_nonfinite=numbers["loss"] is not None and not math.isfinite(numbers["loss"]),
        **_finite_ones(known, places, nan, inf),
    )


def _culprits(
    known: Known, places: Sequence[int], nan: list[int], inf: list[int]
) -> tuple[Culprit, ...]:
    if not any(nan) and not any(inf):
        return ()
    names = known.info.names
    found = {
        place: Culprit(names[place], nan[k], inf[k])
        for k, place in enumerate(places)
        if (nan[k] or inf[k]) and place < len(names)
    }
    return tuple(found[place] for place in known.backward if place in found)


def _finite_ones(
    known: Known, places: Sequence[int], nan: list[int], inf: list[int]
) -> dict[str, Any]:
    """`finite_gradients` and `finite_after` of a step, where they tell something."""
    if not known.whole or not (any(nan) or any(inf)):
        return {}
    bad = {place: bool(nan[k] or inf[k]) for k, place in enumerate(places)}
    found: dict[str, Any] = {"finite_gradients": len(bad) - sum(bad.values())}
    order = [place for place in known.backward if place in bad]
    first = next((k for k, place in enumerate(order) if bad[place]), 0)
    in_a_row = sum(bad.values()) == 1 or all(bad[place] for place in order[first:])
    if known.ordered and in_a_row and first and len(order) == len(bad):
        found["finite_after"] = known.info.names[order[first - 1]]
    return found


def _detail(held: Held, known: Known, places: Sequence[int]) -> Detail:
    count = len(known.info.names)
    carried = held.scalars["carried"]
    if carried is None:
        carried = held.scalars["scale"]
    factor = 1.0 if carried is None else 1.0 / carried if carried else math.nan
    sizes = held.elements
    if sizes is None:
        sizes = [known.info.sizes[place] for place in places if place < count]

    def placed(numbers: Sequence[float | None]) -> list[float | None]:
        row: list[float | None] = [None] * count
        for place, number in zip(places, numbers, strict=False):
            if place < count:
                row[place] = number
        return row

    def along(name: str) -> list[float | None]:
        column = held.columns.get(name, [])
        return placed([_finite(column[p]) if p < len(column) else None for p in places])

    def times(name: str) -> list[float | None]:
        return placed([_finite(number * factor) for number in held.columns.get(name, [])])

    zeros = zip(held.columns.get("zeros", []), sizes, strict=False)
    return Detail(
        norm=times("norms"),
        largest=times("largest"),
        zeros=placed([number / size if size else None for number, size in zeros]),
        nan=placed(_counts(held, "nan")),  # type: ignore[arg-type]
        inf=placed(_counts(held, "inf")),  # type: ignore[arg-type]
        weight=along("weight"),
        update=along("update"),
    )


def _counts(held: Held, name: str) -> list[int]:
    return [int(number) for number in held.columns.get(name, [])]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
