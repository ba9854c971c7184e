"""An optimizer's gradients enter; their statistics and how they were clipped leave.

Nothing that the script sees changes.

Gradients are recorded as they were before they were clipped, because clipping can spread one NaN to
all. So they are measured before a clip, after it, and again when the step comes: if the norms and
the counts of NaN and Inf are to the bit those that the clip has left, of all the gradients that
were clipped together, what was found before it is told, else what the step finds. So it is too if
a clip has made the first NaN itself, by a limit that is NaN. All three are reads. Whether somebody
has written in between cannot be asked of torch: its counter of versions does not see
`p.grad.data /= world_size`, a collective on `.data`, or NumPy.

A script may clip gradients that carry the scale, and have a scaler unscale them after that: then
what was found on both sides of the clip is divided by the scale too, and so is the limit.

A clip is known by the memory of the gradients that it was of. Not by their parameters: Python gives
the id of a parameter that is gone to a new one, and clearing a gradient ends its clip too.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gradilocks import kernels
from gradilocks.clip import NoClip
from gradilocks.kernels import native
from gradilocks.kernels.chunks import AddressedTensors
from gradilocks.kernels.kernel_results import KernelStatistics
from gradilocks.kernels.reference import DOUBLE, any_double, summarize
from gradilocks.observe.gradient_memory import GradientMemory, memory_of
from gradilocks.ranks.layout import has_other_ranks, is_distributed
from gradilocks.scale import NoScale
from gradilocks.step.events import Clip
from gradilocks.step.host_copy import fetch
from gradilocks.step.measure import statistics_of
from gradilocks.step.table import GradientTable, Lists, TableGradients, measurable_gradients
from gradilocks.values import ROW, Statistics, StepRecord, moved

__all__ = [
    "ClipEffect",
    "ClippedGradients",
    "GradientReader",
    "Reading",
    "WatchedGradients",
    "bad_elements",
]


class ClipEffect(NamedTuple):
    """What a clip has done to the gradients that it was of."""

    limit: Tensor | float | None
    """What the 2-norm was to be at most; None if something else was bounded."""
    clipped: Tensor | bool
    """Whether it made them smaller."""

    def divided(self, scale: Tensor) -> ClipEffect:
        """Of gradients that carried a scale, in terms of those without it."""
        limit = self.limit
        if isinstance(limit, Tensor):
            limit = moved(limit.detach(), scale.device)
        return ClipEffect(None if limit is None else limit / scale, self.clipped)


class Measured(NamedTuple):
    """Gradients as they are at one moment."""

    places: Sequence[int]
    """Which of the parameters have one."""
    record: StepRecord
    """Of those. Its row tells their norm, with the scale that they carry, and how many NaN and Inf
    there are; nothing was decided."""
    elements: Sequence[int]
    """How many elements each has."""
    double: bool
    """Whether one of them is float64."""
    detailed: bool
    """Whether the record's statistics tell of zeros and of the largest magnitude."""


_NOT_CLIPPED: Mapping[str, Any] = MappingProxyType({})


class Reading(NamedTuple):
    """What was found in gradients."""

    places: Sequence[int]
    """Which of the parameters had one."""
    record: StepRecord | None
    """As `Measured` has it; None if there was none."""
    elements: Sequence[int]
    """How many elements each has."""
    double: bool
    """Whether one of them is float64."""
    clip: Mapping[str, Any] = _NOT_CLIPPED
    """`limit` and `clipped` of a Sample; empty if none of them was clipped."""
    clipped: StepRecord | None = None
    """Of them as they are now, if `record` may be of before a clip."""

    @property
    def statistics(self) -> Statistics | None:
        """What was found of each."""
        return None if self.record is None else self.record.statistics

    def is_finite(self) -> bool | None:
        """Whether there is no NaN and no Inf in them; None if nobody knows without a wait."""
        return None if self.record is None else _is_finite(self.record)


class WatchedGradients:
    """Finds and measures the gradients of parameters: nothing is refused, coalesced or written.

    It holds the parameters, and no gradient.

    Args:
        params: whose.
        once: whether it will not be asked at every step, so that there is nothing to remember.
    """

    def __init__(self, params: list[Tensor], *, once: bool = False) -> None:
        self.params = params
        # A table lists each parameter once, and asks ranks how they hold a distributed one.
        is_plain = not once and len(set(map(id, params))) == len(params)
        is_plain = is_plain and not any(map(is_distributed, params))
        self._table = GradientTable(refuse_twice=False, may_share=True) if is_plain else None
        self._lists = [[params]]
        self._meter: _Meter | None = None
        self._settler: kernels.Settler | None = None

    def measure(self, *, detail: bool) -> Measured | None:
        """What the gradients are now; None if there are none.

        Args:
            detail: also find the largest magnitude and count the zeros.
        """
        if self._meter is not None:
            measured = self._meter.measure(self._lists)
            if measured is not None:
                return measured
            assert self._table is not None
            self._meter = None
            self._table.forget()
        table = self._table
        found = None if table is None else table.find_addressed(self._lists, name=_unnamed)
        if found is None:
            return self._measure_plain(detail=detail)
        lacks_none = len(found.params) == len(self.params)
        having = [k for k, p in enumerate(self.params) if lacks_none or p.grad is not None]
        tensors = found.addressed
        assert tensors is not None
        try:
            record = self._settle(tensors, found.largest_finite)
        except kernels.KernelFailed:  # The user has been warned.
            return self._measure_plain(detail=detail)
        finally:
            found.release()
        double = not DOUBLE.isdisjoint(found.dtypes)
        measured = Measured(having, record, found.at.sizes, double=double, detailed=True)
        own = sys.modules.get("gradilocks.kernels.native_backend")  # There where it serves.
        if found.walker is not None and kernels.BACKENDS[found.device.type] is own:
            self._meter = _Meter(found, measured, own.chunks_of(found.at.located))
        return measured

    def _settle(self, tensors: AddressedTensors, largest_finite: float) -> StepRecord:
        """As a control with no scale and no clip: in one call, or on a GPU in two launches."""
        device = tensors.at.device
        if self._settler is None or self._settler.device != device:
            backend = cast("kernels.SettlingBackend", kernels.BACKENDS[device.type])
            self._settler = backend.settler(device)
            self._state = NoScale().start(device)
            self._counts = {
                "streak": torch.zeros((), dtype=torch.int32, device=device),
                "steps": torch.zeros((), dtype=torch.int64, device=device),
            }
        self._settler.begin(tensors, *_RULES, largest_finite=largest_finite)
        _, record = self._settler.settle(
            tensors, *_RULES, self._state, **self._counts, loss=None, unscaled=True, moves=False
        )
        return record

    def _measure_plain(self, *, detail: bool) -> Measured | None:
        places, tensors = measurable_gradients(self.params)
        if not tensors:
            return None
        found, double = _measured(tensors, detail=detail), any_double(tensors)
        elements = [each.numel() for each in tensors]
        return Measured(places, _summed(found, double=double), elements, double, detail)


class _Meter:
    """Measures the gradients of a CPU as long as they are of the make that they were of: the walk
    and the one read in one call of C++.

    Args:
        found: as a table has found them, which is asked no more as long as this serves.
        measured: the same, measured.
        chunks: the CpuChunks that they are measured in.
    """

    def __init__(self, found: TableGradients, measured: Measured, chunks: Any) -> None:
        self._walker, self._numbers, self._chunks = found.walker, found.at.numbers, chunks
        self._before, self._count = measured, len(found.params)

    def measure(self, lists: Lists) -> Measured | None:
        """What they are now; None if they are of another make."""
        library = native.library()
        if library is None:
            return None
        rows = torch.empty(5, self._count, dtype=torch.float64, device="cpu")
        told = library.measure_walk(self._walker, lists, self._chunks, self._numbers, rows)
        if told is None:
            return None
        numbers, norm, nan, inf = told
        if numbers is not None:
            self._numbers = numbers
        row = _NOTHING.copy()
        row[_NORM], row[_NAN], row[_INF] = norm, nan, inf
        record = StepRecord(
            lambda: torch.tensor(row, dtype=torch.float64, device="cpu"),
            _FLAGS[nan + inf > 0.0],
            functools.partial(KernelStatistics.of, rows),
            numbers=row,
        )
        before = self._before
        return Measured(before.places, record, before.elements, before.double, detailed=True)


_NOTHING = [0.0] * len(ROW)
_FLAGS = tuple(torch.tensor(flag, dtype=torch.float32, device="cpu") for flag in (0.0, 1.0))
_RULES = NoClip().rules(), NoScale().rules()
_NORM, _NAN, _INF = (ROW.index(name) for name in ("norm", "nan", "inf"))


def _unnamed(param: Tensor) -> str:
    return "a parameter"


def _summed(found: Statistics, *, double: bool) -> StepRecord:
    """The record of gradients that were measured and of which nothing was settled."""
    whole = summarize(found, order=2.0, double=double)
    numbers = dict.fromkeys(ROW, torch.zeros_like(whole.norm))
    numbers |= {"norm": whole.norm, "nan": found.nan.sum(), "inf": found.inf.sum()}
    row = torch.stack([number.to(whole.norm.dtype) for number in numbers.values()])
    return StepRecord(row, whole.nonfinite, lambda: found)


def _is_finite(record: StepRecord) -> bool | None:
    numbers = record.numbers
    if numbers is None:
        row = record.row
        if not row.is_cpu:
            return None
        numbers = record.numbers = fetch(row)
    return numbers[_NAN] + numbers[_INF] == 0.0


def bad_elements(record: StepRecord) -> Tensor:
    """How many elements are NaN or Inf."""
    return record.row[_NAN : _INF + 1].sum()


@dataclass(eq=False)
class ClippedGradients:
    """Gradients that were clipped together, measured before it and after."""

    memory: GradientMemory
    """Where they lie, with a row for each parameter that was clipped."""
    before: Measured
    gradients: Callable[[], WatchedGradients | None]
    """What has found them, if it is still there."""
    after: StepRecord | None = None
    effect: ClipEffect | None = None
    """None until the clip is over."""
    untouched: Tensor | None = None
    """While they are being unscaled: whether they were until then as the clip has left them."""
    gone: set[int] = field(default_factory=set)
    """Places in `before` of those that were cleared, clipped again or taken by a step since."""

    @functools.cached_property
    def _rows(self) -> dict[int, int]:
        """By row of the memory: the place in `before`."""
        return {row: place for place, row in enumerate(self.before.places)}

    def changed(self) -> Tensor | bool:
        """Whether the clip has changed one of them, as far as this process holds them."""
        if self.after is None:
            return False
        before, after = self.before.record.statistics.norms, self.after.statistics.norms
        return ((before != after) & torch.logical_not(torch.isnan(before))).any().to(torch.float32)

    def are_still(self, gradients: WatchedGradients, now: Measured) -> bool:
        """Whether what `gradients` has found `now` is in the memory that they had, one by one."""
        then = self.before.places
        same = then is now.places or then == now.places
        return same and self.memory.holds(gradients.params)

    def among(self, params: Sequence[Tensor]) -> dict[int, int]:
        """Which of them the gradients of `params` are: the place in `params`, and in `before`."""
        found = {}
        for place, row in enumerate(self.memory.rows_of(params)):
            there = self._rows.get(row)
            if there is not None and there not in self.gone:
                found[place] = there
        return found

    def take(self, params: Sequence[Tensor]) -> dict[int, int]:
        """As `among`; from here on these are no more of this clip."""
        found = self.among(params)
        self.gone.update(found.values())
        return found

    @property
    def is_over(self) -> bool:
        """Whether none of them waits for a step any more."""
        return len(self.gone) == len(self.before.places) or self.memory.is_gone()

    def tells(self, *, detail: bool) -> bool:
        """Whether both measurements are there, in as much detail as is wanted."""
        return self.after is not None and (not detail or self.before.detailed)


class GradientReader:
    """Measures gradients, and remembers what it found before a clip."""

    def __init__(self) -> None:
        # Clips whose gradients wait for a step. No gradient is in two of them: the last counts.
        self._clips: list[ClippedGradients] = []

    @property
    def has_clips(self) -> bool:
        """Whether gradients were clipped that no step has taken yet."""
        return bool(self._clips)

    def _take(self, params: Sequence[Tensor]) -> list[tuple[ClippedGradients, dict[int, int]]]:
        """The clips that gradients of `params` are of, and which, as `ClippedGradients.take`."""
        taken = [(clipped, clipped.take(params)) for clipped in self._clips]
        self._clips = [clipped for clipped in self._clips if not clipped.is_over]
        return [(clipped, found) for clipped, found in taken if found]

    def before_clip(self, gradients: WatchedGradients, *, detail: bool) -> ClippedGradients | None:
        """Measures the gradients that are about to be clipped; None if there are none."""
        self._clips = [clipped for clipped in self._clips if not clipped.is_over]
        before = gradients.measure(detail=detail)
        if before is None:
            return None
        if self._clips:
            self._take(gradients.params)
        made = ClippedGradients(memory_of(gradients.params), before, weakref.ref(gradients))
        self._clips.append(made)
        return made

    def after_clip(
        self, clipped: ClippedGradients, gradients: WatchedGradients, clip: Clip
    ) -> None:
        """The clip is done: measures what it has left."""
        after = gradients.measure(detail=False)
        if after is not None and clipped.are_still(gradients, after):
            clipped.after = after.record
        clipped.effect = _effect(clip, clipped)

    def before_unscale(self, params: Sequence[Tensor]) -> None:
        """Gradients that were clipped are about to be divided by the scale."""
        for clipped, places in self._waiting(params):
            now = _measured_again(clipped, params, places)
            assert clipped.after is not None
            clipped.untouched = _alike(now, clipped.after.statistics).all()

    def after_unscale(self, params: Sequence[Tensor], scale: Tensor) -> None:
        """They were divided: what was found of them is too, and so is the limit of the clip."""
        for clipped, places in self._waiting(params):
            if clipped.untouched is None or clipped.effect is None:
                continue
            before, now = clipped.before, _measured_again(clipped, params, places)
            divisor = moved(scale, before.record.row.device)
            # A norm that none can have: what somebody has written meanwhile is not the clip's.
            norms = torch.where(clipped.untouched, now.norms, torch.full_like(now.norms, -1.0))
            now = Statistics(norms, now.nan, now.inf)
            clipped.after = _summed(now, double=before.double)
            divided = _divided(before.record.statistics, divisor)
            clipped.before = before._replace(record=_summed(divided, double=before.double))
            clipped.untouched = None
            clipped.effect = clipped.effect.divided(divisor)

    def _waiting(self, params: Sequence[Tensor]) -> list[tuple[ClippedGradients, list[int]]]:
        """Clips that are over, all of whose gradients are among those of `params`: which ones."""
        waiting = []
        for clipped in self._clips:
            if clipped.after is None or clipped.gone:
                continue
            place_of = {there: place for place, there in clipped.among(params).items()}
            if len(place_of) == len(clipped.before.places):
                waiting.append((clipped, [place_of[there] for there in range(len(place_of))]))
        return waiting

    def gradients_clear(self, params: Iterable[Tensor]) -> None:
        """Gradients are about to be cleared, perhaps in place: what comes there is not clipped."""
        if self._clips:
            self._take(list(params))

    def effects(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """`limit` and `clipped` of clips that no reading has told of; empty if there is none."""
        taken = [clipped.effect for clipped, _ in self._take(params)]
        return _together([effect for effect in taken if effect is not None])

    def read(self, gradients: WatchedGradients, *, detail: bool) -> Reading:
        """Measures the gradients; those that a clip has left tell of before it."""
        now = gradients.measure(detail=detail)
        if now is None:
            return Reading([], None, [], double=False)
        for clipped in self._clips:
            # All of them were clipped together, as a rule, and nothing else.
            if (
                clipped.gradients() is gradients
                and not clipped.gone
                and clipped.are_still(gradients, now)
            ):
                self._clips.remove(clipped)
                clip = _together([clipped.effect] if clipped.effect is not None else [])
                if not clipped.tells(detail=detail):
                    return Reading(now.places, now.record, now.elements, now.double, clip)
                record = _before_clip(now.record, clipped)
                return Reading(now.places, record, now.elements, now.double, clip, now.record)
        if not self._clips:
            return Reading(now.places, now.record, now.elements, double=now.double)
        return self._read_parts(gradients, now, detail=detail)

    def _read_parts(self, gradients: WatchedGradients, now: Measured, *, detail: bool) -> Reading:
        """As `read`, gradient by gradient: each may have been clipped with others, or not."""
        here = {place: row for row, place in enumerate(now.places)}
        found, effects, is_told = now.record.statistics, [], False
        for clipped, places in self._take(gradients.params):
            if clipped.effect is not None:
                effects.append(clipped.effect)
            pairs = [(here[place], there) for place, there in places.items() if place in here]
            if pairs and clipped.tells(detail=detail):
                found, is_told = _unclipped(found, clipped, pairs, detail=detail), True
        clip = _together(effects)
        if not is_told:
            return Reading(now.places, now.record, now.elements, now.double, clip)
        record = _summed(found, double=now.double)
        return Reading(now.places, record, now.elements, now.double, clip, now.record)


def _effect(clip: Clip, gradients: ClippedGradients) -> ClipEffect:
    """What a clip that is over has done."""
    if clip.by_value:
        largest = gradients.before.record.statistics.largest
        changed = False if largest is None else (largest > clip.limit).any().to(torch.float32)
        return ClipEffect(None, changed)
    limit, norm = clip.limit, clip.norm
    clipped: Tensor | bool
    if not isinstance(norm, Tensor):
        norm = torch.as_tensor(norm, device="cpu")
    if type(norm) not in (Tensor, nn.Parameter):  # A DTensor: reading it is a collective.
        clipped = gradients.changed()
    elif norm.device.type == "cpu" and not isinstance(limit, Tensor):
        (number,) = fetch(norm.detach().reshape(()))
        clipped = number > limit
    else:
        clipped = (norm.detach() > limit).to(torch.float32)
    if not isinstance(limit, Tensor):  # A tensor is left where it is: reading it would wait.
        limit = float(limit) if math.isfinite(limit) else None
    return ClipEffect(limit if float(clip.order) == 2.0 else None, clipped)


def _together(effects: Sequence[ClipEffect]) -> dict[str, Any]:
    """`limit` and `clipped` of a step whose gradients had these clips."""
    if len(effects) < 2:
        return effects[0]._asdict() if effects else {}
    flags = [torch.as_tensor(effect.clipped, dtype=torch.float32) for effect in effects]
    home = flags[0].device
    stacked = torch.stack([flag.reshape(()).to(home, non_blocking=True) for flag in flags])
    return {"clipped": stacked.amax()}


def _before_clip(now: StepRecord, clipped: ClippedGradients) -> StepRecord:
    """What was found before a clip if all its gradients are now as it has left them, else `now`."""
    before, after = clipped.before.record, clipped.after
    assert after is not None
    same = _same(now.statistics, after.statistics)
    if isinstance(same, bool) and isinstance(made := _made_by_clip(before, after), bool):
        return before if same and not made else now
    home = now.row.device
    unchanged = torch.as_tensor(same, device=home) & torch.logical_not(
        moved(torch.as_tensor(_made_by_clip(before, after)), home)
    )
    row = torch.where(unchanged, moved(before.row, home), now.row)

    def found() -> Statistics:
        mine, old = now.statistics, before.statistics

        def chosen(column: Tensor | None, was: Tensor | None) -> Tensor | None:
            if column is None or was is None:
                return None
            return torch.where(unchanged, moved(was, home), column)

        return Statistics(
            norms=torch.where(unchanged, moved(old.norms, home), mine.norms),
            nan=torch.where(unchanged, moved(old.nan, home), mine.nan),
            inf=torch.where(unchanged, moved(old.inf, home), mine.inf),
            largest=chosen(mine.largest, old.largest),
            zeros=chosen(mine.zeros, old.zeros),
        )

    return StepRecord(row, now.skip, found)


def _same(one: Statistics, other: Statistics) -> Tensor | bool:
    """Whether both are of the same elements, as far as they tell; a number if it is on a CPU."""
    if isinstance(one, KernelStatistics) and isinstance(other, KernelStatistics):
        mine, others = one.rows.view(torch.int64), other.rows.view(torch.int64)  # NaN is NaN.
        if mine.device.type == "cpu":
            return torch.equal(mine, others)
        return (mine == moved(others, mine.device)).all()
    return _alike(one, other).all()


def _made_by_clip(before: StepRecord, after: StepRecord) -> Tensor | bool:
    """Whether the clip itself has made the first NaN."""
    if has_other_ranks():  # It may come from the gradients that another rank holds.
        return False
    was, is_now = _is_finite(before), _is_finite(after)
    if was is not None and is_now is not None:
        return was and not is_now
    return (bad_elements(before) == 0) & (bad_elements(after) > 0)


def _unclipped(
    now: Statistics,
    clipped: ClippedGradients,
    rows: Sequence[tuple[int, int]],
    *,
    detail: bool,
) -> Statistics:
    """As `_before_clip`, of some of the gradients: `rows` are those in `now` and in the clip.

    All of them or none: a norm of some from before and others from after is none.
    """
    assert clipped.after is not None
    before, after = clipped.before.record.statistics, clipped.after.statistics
    home = now.norms.device
    pairs = torch.tensor(rows, device="cpu").to(home, non_blocking=True)
    here, there = pairs[:, 0], pairs[:, 1]

    def past(column: Tensor) -> Tensor:
        return moved(column, home)[there]

    left = Statistics(past(after.norms), past(after.nan), past(after.inf))
    mine = Statistics(now.norms[here], now.nan[here], now.inf[here])
    made = torch.as_tensor(_made_by_clip(clipped.before.record, clipped.after))
    unchanged = _alike(mine, left).all() & torch.logical_not(moved(made, home))

    def chosen(column: Tensor, old: Tensor) -> Tensor:
        return column.index_copy(0, here, torch.where(unchanged, past(old), column[here]))

    def chosen_detail(column: Tensor | None, old: Tensor | None) -> Tensor | None:
        return chosen(column, old) if detail and not (column is None or old is None) else None

    return Statistics(
        norms=chosen(now.norms, before.norms),
        nan=chosen(now.nan, before.nan),
        inf=chosen(now.inf, before.inf),
        largest=chosen_detail(now.largest, before.largest),
        zeros=chosen_detail(now.zeros, before.zeros),
    )


def _alike(one: Statistics, other: Statistics) -> Tensor:
    """By tensor: whether both are of the same elements, as far as norms and counts tell."""
    same = (one.norms == other.norms) | (torch.isnan(one.norms) & torch.isnan(other.norms))
    return same & (one.nan == other.nan) & (one.inf == other.inf)


def _divided(found: Statistics, scale: Tensor) -> Statistics:
    largest = None if found.largest is None else found.largest / scale
    return Statistics(found.norms / scale, found.nan, found.inf, largest, found.zeros)


def _measured_again(
    clipped: ClippedGradients, params: Sequence[Tensor], places: Sequence[int]
) -> Statistics:
    """Of gradients that were clipped, all of which are now those of `params` at these places."""
    gradients = clipped.gradients()
    if gradients is not None:
        now = gradients.measure(detail=False)
        if now is not None and clipped.are_still(gradients, now):
            return now.record.statistics
    _, tensors = measurable_gradients([params[place] for place in places])
    return _measured(tensors, detail=False)


def _measured(tensors: Sequence[Tensor], *, detail: bool) -> Statistics:
    at = tensors.at if isinstance(tensors, AddressedTensors) else tensors[0]
    return statistics_of(tensors, home=at.device, detail=detail)
