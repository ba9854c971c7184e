"""A Run → its Tracks: the steps of each optimizer as columns of numbers.

Every rule and every plot walks over columns, and there may be a hundred thousand steps with some
hundred tensors each, so each number is looked at once here: it is checked, and what is missing or
not finite becomes NaN.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from gradilocks.errors import BadRunFile
from gradilocks.report.lost import lost_for_good, lost_places
from gradilocks.runfile import OptimizerInfo, Run, Step, Trace
from gradilocks.runfile.bad_steps import ended_badly

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
    """0 for a step before which, in its session, no NaN or Inf went into any weights; else `OWN` or
    `ANOTHERS`: what is bad at such a step may come from there."""
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
        return lost_places(self.loss, self.nonfinite, self._told)

    @cached_property
    def taken(self) -> Sequence[int]:
        """Places of the steps that were taken with NaN or Inf among the gradients."""
        return [place for place in self.nonfinite if not self.steps[place].skipped]

    def spoilt_by(self, place: int) -> int | None:
        """The step that put NaN or Inf into the weights before a place, or first after it."""
        if self.aftermath[place] != OWN:
            return next((taken for taken in self.taken if taken >= place), None)
        while self.aftermath[place] == OWN:
            place -= 1
        return place

    @cached_property
    def lost_since(self) -> int | None:
        """The place from which on the loss was never finite again; None if it ended well."""
        return lost_for_good(self.loss, self.lost, self._told, set(self.taken))

    @cached_property
    def ending(self) -> str | None:
        """How the run ended in NaN or Inf, in words; None if it did not."""
        bad, since = {*self.nonfinite, *self.lost}, len(self.steps)
        while since and since - 1 in bad:
            since -= 1
        if since == len(self.steps):
            return None
        spoilt = next((place for place in self.taken if place >= since), None)
        places = (since, self.lost_since, spoilt)
        numbers = [None if place is None else self.steps[place].step for place in places]
        return ended_badly(
            last=self.steps[-1].step,
            bad_since=numbers[0],
            lost_since=numbers[1],
            spoilt_since=numbers[2],
        )

    @cached_property
    def _told(self) -> Sequence[bool | None]:
        return [step.loss_nonfinite for step in self.steps]

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
        for step, mark in zip(run.steps, aftermath_of(run), strict=True):
            by_index.setdefault(step.optimizer, []).append(step)
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
    spoilt, begins = False, set(run.begins)
    for place, step in enumerate(run.steps):
        if step.time > trace.time:
            break
        spoilt = spoilt and place not in begins
        spoilt = spoilt or (step.nan + step.inf > 0 and not step.skipped)
    return spoilt


def _place_at(steps: Sequence[Step], time: float) -> int:
    """The place of the step that was going on at a time."""
    return next((place for place, step in enumerate(steps) if step.time >= time), len(steps))


def aftermath_of(run: Run) -> Iterator[int]:
    """For each step of a run: `Track.aftermath`. A session that is resumed begins anew."""
    spoilt: set[int] = set()
    begins = set(run.begins)
    for place, step in enumerate(run.steps):
        if place in begins:
            spoilt = set()
        yield OWN if step.optimizer in spoilt else ANOTHERS if spoilt else 0
        if step.nan + step.inf > 0 and not step.skipped:
            spoilt.add(step.optimizer)


def _track(
    info: OptimizerInfo,
    steps: list[Step],
    *,
    several: bool,
    aftermath: bytes,
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
