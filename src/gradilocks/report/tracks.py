"""A Run → its Tracks: the steps of each optimizer as columns of numbers.

Every rule and every plot walks over columns, and there may be a hundred thousand steps with some
hundred tensors each, so each number is looked at once here: it is checked, and what is missing or
not finite becomes NaN.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from gradilocks.errors import BadRunFile
from gradilocks.report.lost import lost_places
from gradilocks.runfile import (
    BadSteps,
    OptimizerInfo,
    Run,
    SpoiltWeights,
    Step,
    Trace,
    backward_groups,
)

__all__ = ["ANOTHERS", "OWN", "Tensor", "Track", "aftermath_of", "came_late", "tracks"]

NAN = math.nan
# Before a step, NaN or Inf had gone into the weights of its optimizer, or only into another's.
OWN, ANOTHERS = 1, 2
Column = Sequence[float]


@dataclass(frozen=True)
class Tensor:
    """One parameter, at every step that has detail: columns as long as `Track.detailed`."""

    name: str
    size: int
    norm: Column
    zeros: Column
    update: Column
    """Update-to-weight ratio; NaN at skipped steps, which say nothing about it."""

    @cached_property
    def usual_norm(self) -> float:
        """The median of its gradient norm; NaN if it never had one."""
        return middle(self.norm)

    @cached_property
    def usual_zeros(self) -> float:
        """The median share of zeros in its gradient; NaN if it never had one."""
        return middle(self.zeros)

    @cached_property
    def usual_update(self) -> float:
        """The median of its update-to-weight ratio at steps that were taken; NaN if none were."""
        return middle(self.update)


@dataclass(frozen=True)
class Track:
    """The steps of one optimizer, in the order of the file; all columns are equally long."""

    optimizer: OptimizerInfo
    several: bool
    """Whether the run has other optimizers too."""
    steps: Sequence[Step]
    at: Sequence[int]
    """Where each step stands on a plot's axis: its number, or its place if numbers go back."""
    renumbered: bool
    loss: Column
    scale: Column
    norm: Column
    limit: Column
    rate: Column
    time: Column
    skipped: Sequence[int]
    """Places of the skipped steps."""
    nonfinite: Sequence[int]
    """Places of the steps with NaN or Inf among the gradients."""
    clipped: bytes
    """1 for a step that was clipped and taken, 0 for another."""
    detailed: Sequence[int]
    """Places of the steps with detail."""
    tensors: Sequence[Tensor]
    aftermath: bytes
    """0 for a step before which no NaN or Inf was in any weights by an earlier step of its session;
    else `OWN` or `ANOTHERS`: what is bad at such a step may come from there."""
    others: Mapping[int, Sequence[Step]]
    """By the place of a step with NaN or Inf: the steps of other optimizers after the same backward
    pass; none where there are none."""
    traced: bool
    """Whether `gradilocks.trace` was to find the module."""
    found: Set[int]
    """Places of the steps in which it did, before any NaN or Inf had gone into the weights."""

    @property
    def label(self) -> str:
        """The optimizer, as a report calls it: 'AdamW' or 'optimizer 1 (AdamW)'."""
        kind = self.optimizer.kind
        return f"optimizer {self.optimizer.index} ({kind})" if self.several else kind

    def tensor_of_most(self, place: int) -> Tensor | None:
        """The tensor with the largest gradient norm at a step; None if it has no detail."""
        try:
            row = self._rows[place]
        except KeyError:
            return None
        present = [tensor for tensor in self.tensors if not math.isnan(tensor.norm[row])]
        return max(present, key=lambda tensor: tensor.norm[row], default=None)

    @cached_property
    def lost(self) -> Sequence[int]:
        """Places of the steps whose loss was itself NaN or Inf."""
        return lost_places(self.steps, self._bad)

    @cached_property
    def taken(self) -> Sequence[int]:
        """Places of the steps that were taken with NaN or Inf among the gradients."""
        return [place for place in self.nonfinite if not self.steps[place].skipped]

    def spoilt_by(self, place: int) -> int | None:
        """The step that put NaN or Inf into the weights before a place, or first after it."""
        before = self.spoilers.get(place)
        return next((i for i in self.taken if i >= place), None) if before is None else before

    @cached_property
    def spoilers(self) -> Mapping[int, int]:
        """By the place of a step with `OWN` aftermath: the step that put NaN or Inf there."""
        found: dict[int, int] = {}
        for place, mark in enumerate(self.aftermath):
            if mark == OWN:
                found[place] = found.get(place - 1, place - 1)
        return found

    @cached_property
    def lost_since(self) -> int | None:
        """The place from which on the loss was never finite again; None if it ended well."""
        return self._bad.lost_from

    @cached_property
    def ending(self) -> str | None:
        """How the run ended in NaN or Inf, in words; None if it did not."""
        return self._bad.ending

    @cached_property
    def _bad(self) -> BadSteps:
        bad = BadSteps()
        for step in self.steps:
            bad.take(step)
        return bad

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {place: row for row, place in enumerate(self.detailed)}


def tracks(run: Run) -> list[Track]:
    """Returns one Track for each optimizer that stepped, in the order of their indices.

    Raises:
        BadRunFile: a number in the file is none, or a step's detail does not fit its optimizer.
    """
    by_index: dict[int, list[Step]] = {}
    known = {info.index: info for info in run.optimizers}
    try:
        marks: dict[int, bytearray] = {}
        others: dict[int, dict[int, Sequence[Step]]] = {}
        for step, mark, group in zip(
            run.steps, aftermath_of(run), backward_groups(run.steps), strict=True
        ):
            mine = by_index.setdefault(step.optimizer, [])
            if len(group) > 1 and step.nan + step.inf > 0:
                rest = [each for each in group if each is not step]
                others.setdefault(step.optimizer, {})[len(mine)] = rest
            mine.append(step)
            marks.setdefault(step.optimizer, bytearray()).append(mark)
        traced = bool(run.header.settings.get("trace")) or bool(run.traces)
        in_time = [
            trace.time
            for trace in run.traces
            if trace.where == "buffers" or not came_late(run, trace)
        ]
        return [
            _track(
                known.get(index) or OptimizerInfo(index, "optimizer", (), (), ()),
                by_index[index],
                several=len(by_index) > 1,
                aftermath=bytes(marks[index]),
                others=others.get(index, {}),
                traced=traced,
                found=frozenset(_place_at(by_index[index], time) for time in in_time),
            )
            for index in sorted(by_index)
        ]
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRunFile(
            f"{run.path}: a step holds something else than the numbers of a run file ({error}). "
            "The file was changed, or written by another version of gradilocks."
        ) from error


def middle(values: Iterable[float]) -> float:
    """The median of what is there; NaN if nothing is."""
    present = [value for value in values if not math.isnan(value)]
    return median(present) if present else NAN


def came_late(run: Run, trace: Trace) -> bool:
    """Whether NaN or Inf was in the weights before a traced step, as far as the file tells."""
    if trace.damaged or "was damaged before this step" in trace.text:
        return True
    if trace.damaged is not None:  # It looked.
        return False
    spoilt, begins = SpoiltWeights(), set(run.begins)
    for place, step in enumerate(run.steps):
        if step.time > trace.time:
            break
        if place in begins:
            spoilt.forget()
        spoilt.take(step)
    return bool(spoilt)


def _place_at(steps: Sequence[Step], time: float) -> int:
    """The place of the step that was going on at a time."""
    return next((place for place, step in enumerate(steps) if step.time >= time), len(steps))


def aftermath_of(run: Run) -> Iterator[int]:
    """For each step of a run: `Track.aftermath`. A session that is resumed begins anew."""
    spoilt = SpoiltWeights()
    begins = set(run.begins)
    for place, step in enumerate(run.steps):
        if place in begins:
            spoilt.forget()
        yield 0 if not spoilt else ANOTHERS if spoilt.of(step.optimizer) is None else OWN
        spoilt.take(step)


def _track(
    info: OptimizerInfo,
    steps: list[Step],
    *,
    several: bool,
    aftermath: bytes,
    others: Mapping[int, Sequence[Step]],
    traced: bool,
    found: Set[int],
) -> Track:
    numbers = array("q", [step.step for step in steps])
    back = any(later <= earlier for earlier, later in pairwise(numbers))
    detailed = array("q", [place for place, step in enumerate(steps) if step.detail is not None])
    return Track(
        optimizer=info,
        several=several,
        steps=steps,
        at=array("q", range(1, len(steps) + 1)) if back else numbers,
        renumbered=back,
        loss=_column(step.loss for step in steps),
        scale=_column(step.scale for step in steps),
        norm=_column(step.norm for step in steps),
        limit=_column(step.limit for step in steps),
        rate=_column(step.lr for step in steps),
        time=_column(step.time for step in steps),
        nonfinite=array("q", [i for i, step in enumerate(steps) if step.nan + step.inf > 0]),
        skipped=array("q", [place for place, step in enumerate(steps) if step.skipped]),
        clipped=bytes([1 if step.clipped and not step.skipped else 0 for step in steps]),
        detailed=detailed,
        tensors=_tensors(info, [steps[place] for place in detailed]),
        aftermath=aftermath,
        others=others,
        traced=traced,
        found=found,
    )


def _tensors(info: OptimizerInfo, steps: Sequence[Step]) -> list[Tensor]:
    if not steps:
        return []
    nothing = [None] * len(info.names)
    # Lists of one step across all tensors → one column a tensor across all steps, field by field,
    # so that only one field is held twice at a time.
    fields = []
    for field in ("norm", "zeros", "update"):
        rows = [
            nothing if step.skipped and field == "update" else getattr(step.detail, field)
            for step in steps
        ]
        if any(len(row) != len(info.names) for row in rows):
            raise ValueError(f"detail for other than the {len(info.names)} tensors of {info.kind}")
        fields.append([_column(column) for column in zip(*rows, strict=True)])
    return [
        Tensor(name, size, *columns)
        for name, size, *columns in zip(info.names, info.sizes, *fields, strict=True)
    ]


def _column(values: Iterable[float | None]) -> array[float]:
    column = array("d", [NAN if value is None else value for value in values])
    if math.inf in column or -math.inf in column:
        return array("d", [NAN if math.isinf(value) else value for value in column])
    return column
