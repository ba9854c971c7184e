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
from typing import NamedTuple

from gradilocks.errors import BadRunFile
from gradilocks.runfile import (
    BadSteps,
    OptimizerInfo,
    Origin,
    Run,
    Spoilt,
    SpoiltWeights,
    Step,
    Trace,
    backward_groups,
    describe_ending,
    has_bad_gradients,
    is_bad,
    origin_of,
)

NAN = math.nan
ANOTHERS = "another optimizer's"
Column = Sequence[float]

# Formats that round small gradients to zero: there a loss scale has something to save.
NARROW = ("float16", "float8", "float4")
# The last loss is a median over so many steps, of a short run over a tenth: one batch is too noisy.
LAST = 20


class LossEnds(NamedTuple):
    """Where a loss began and where it ended: the one definition, for every number and sentence."""

    first: float
    """At the first step whose loss was finite; NaN if there is none."""
    last: float
    """The median over the last `over` steps that were taken with a finite loss; NaN if there is
    none, or if the loss ended as NaN or Inf."""
    over: int


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
        return nanmedian(self.norm)

    @cached_property
    def usual_zeros(self) -> float:
        """The median share of zeros in its gradient; NaN if it never had one."""
        return nanmedian(self.zeros)

    @cached_property
    def usual_update(self) -> float:
        """The median of its update-to-weight ratio at steps that were taken; NaN if none were."""
        return nanmedian(self.update)


class Track:
    """The steps of one optimizer, in the order of the file.

    A "place" is the index of a step in `steps` and in the columns, which are equally long.

    Attributes:
        optimizer: its name and its parameters, as the run file has them.
        steps: as the run file has them.
        scale_policy: the policy of the loss scale, as the run's header writes it, or ''.
        several: whether the run has other optimizers too.
        trains: the one model, or part of one, that it trains and no other optimizer does; or ''.
        spoilt: for each step None if no earlier step of its session had put NaN or Inf into any
            weights; else which had put it into its own, or `ANOTHERS` if it is only in those of
            another optimizer. What is bad at such a step may come from there.
        others: by the place of a step with NaN or Inf, the steps of other optimizers after the same
            backward pass, where there are any.
        traced: whether a trace was to find the module.
        traces: by the place of a step with NaN or Inf, what a trace found of it, if NaN or Inf was
            not in the weights before.
        all_traces: whatever traces found in this run.
        traced_late: whether one of them came when NaN or Inf was in the weights already.
        damaged: the first trace that found NaN or Inf in the weights though no step with such
            gradients had been taken, if this optimizer's steps show it.
        computed_in: the formats in which its loss was computed; None if the file does not say.
        renumbered: whether step numbers go back, as in a run resumed from an older checkpoint.
        at: where each step stands on a plot's axis: its number, or its place if numbers go back.
        skipped: places of the skipped steps.
        nonfinite: places of the steps with NaN or Inf among the gradients.
        clipped: 1 for a step that was clipped and taken, 0 for another.
        seconds: how long each step took, since the one before it; NaN at the first of a session.
        waited: seconds between the step before it and the next forward, as far as they are known.
        detailed: places of the steps with detail.
        tensors: one for each parameter, if any step has detail.
    """

    def __init__(
        self,
        optimizer: OptimizerInfo,
        steps: Sequence[Step],
        *,
        scale_policy: str,
        several: bool,
        trains: str = "",
        spoilt: Sequence[Spoilt | str | None],
        others: Mapping[int, Sequence[Step]],
        traced: bool,
        traces: Mapping[int, Trace],
        all_traces: Sequence[Trace],
        traced_late: bool,
        damaged: Trace | None,
        computed_in: Sequence[str] | None,
        begins: Set[int] = frozenset(),
    ) -> None:
        self.optimizer, self.steps = optimizer, steps
        self.scale_policy, self.several, self.trains = scale_policy, several, trains
        self.spoilt, self.others, self.traced, self.traces = spoilt, others, traced, traces
        self.all_traces, self.traced_late = all_traces, traced_late
        self.damaged = damaged
        self.computed_in = computed_in
        numbers = array("q", [step.step for step in steps])
        self.renumbered = any(later <= earlier for earlier, later in pairwise(numbers))
        self.at = array("q", range(1, len(steps) + 1)) if self.renumbered else numbers
        self.loss = _column(step.loss for step in steps)
        self.scale = _column(step.scale for step in steps)
        self.norm = _column(step.norm for step in steps)
        self.limit = _column(step.limit for step in steps)
        self.lr = _column(step.lr for step in steps)
        self.time = _column(step.time for step in steps)
        self.waited = _column(step.waited for step in steps)
        took = [NAN, *(later - earlier for earlier, later in pairwise(self.time))][: len(steps)]
        self.seconds = _column(
            each if each > 0 and place not in begins else NAN for place, each in enumerate(took)
        )
        self.skipped = [place for place, step in enumerate(steps) if step.skipped]
        self.nonfinite = [place for place, step in enumerate(steps) if has_bad_gradients(step)]
        self.clipped = bytes(step.clipped and not step.skipped for step in steps)
        self.detailed = [place for place, step in enumerate(steps) if step.detail is not None]
        self.tensors = _tensors(optimizer, [steps[place] for place in self.detailed])

    @property
    def label(self) -> str:
        """The optimizer, as a report calls it: 'AdamW' or 'optimizer 1 (AdamW)'."""
        kind = self.optimizer.kind
        whose = f", {self.trains}" if self.trains else ""
        return f"optimizer {self.optimizer.index} ({kind}{whose})" if self.several else kind

    @property
    def prefix(self) -> str:
        """What a sentence about this optimizer begins with, if the run has others too."""
        return f"{self.label}: " if self.several else ""

    def tensor_of_most(self, place: int) -> Tensor | None:
        """The tensor with the largest gradient norm at a step; None if it has no detail."""
        if place not in self._rows:
            return None
        row = self._rows[place]
        present = [tensor for tensor in self.tensors if not math.isnan(tensor.norm[row])]
        return max(present, key=lambda tensor: tensor.norm[row], default=None)

    @cached_property
    def lost(self) -> Sequence[int]:
        """Places of the steps whose loss was itself NaN or Inf.

        A run file has nothing in place of a loss that was not finite, and nothing in place of one
        that nobody knew. Newer files tell which; of older ones `BadSteps` guesses.
        """
        guessed = self.bad.guesses_lost
        return [
            place
            for place, step in enumerate(self.steps)
            if step.loss is None
            and (
                guessed and has_bad_gradients(step)
                if step.loss_nonfinite is None
                else step.loss_nonfinite
            )
        ]

    @cached_property
    def without_rate(self) -> Sequence[int]:
        """Places of the steps whose learning rate was NaN or Inf: one before them had one."""
        first = next((i for i, rate in enumerate(self.lr) if not math.isnan(rate)), len(self.lr))
        return [i for i, rate in enumerate(self.lr) if i > first and math.isnan(rate)]

    @cached_property
    def nan_begins(self) -> int | None:
        """Place of the first step whose loss was NaN or Inf, or that was taken with such gradients;
        None if there is none. Overflows that a scale has caught are none."""
        return min([*self.lost[:1], *self.taken[:1]], default=None)

    @cached_property
    def taken(self) -> Sequence[int]:
        """Places of the steps that were taken with NaN or Inf among the gradients."""
        return [place for place in self.nonfinite if not self.steps[place].skipped]

    def origins(self, places: Iterable[int]) -> list[Origin]:
        """Where NaN or Inf arose, of those of the steps before which no weights were spoilt."""
        lost = set(self.lost)
        return [
            origin_of(self.steps[place], lost=place in lost, others=self.others.get(place, ()))
            for place in places
            if not self.spoilt[place]
        ]

    def spoilt_at(self, place: int) -> Spoilt | None:
        """What put NaN or Inf into the weights before a step, or first at it or after it."""
        before = self.spoilt[place]
        if isinstance(before, Spoilt):
            return before
        after = [self.steps[i] for i in self.taken if i >= place]
        return Spoilt(after[0].step, after[0].loss is not None) if after else None

    @cached_property
    def bad(self) -> BadSteps:
        """Since when loss and gradients are NaN or Inf, and how the run ended in it."""
        bad = BadSteps()
        for step in self.steps:
            bad.take(step)
        return bad

    @cached_property
    def ending(self) -> str | None:
        """How it ended in NaN or Inf, and where that arose as far as is known; None if it ended
        well."""
        first = self.bad.first
        place = next((i for i, step in enumerate(self.steps) if step is first), 0)
        before = self.spoilt[place]
        return describe_ending(
            self.bad,
            self.all_traces,
            others=self.others.get(place, ()),
            spoilt_before=f"{before} weights were spoilt before" if before == ANOTHERS else "",
        )

    @cached_property
    def loss_ends(self) -> LossEnds:
        """Where the loss began and ended."""
        if not self.loss_places:
            return LossEnds(NAN, NAN, 0)
        first, *last = [self.loss[place] for place in self.loss_places]
        lost = self.bad.lost_from is not None
        return LossEnds(first, NAN if lost else median(last), len(last))

    @cached_property
    def loss_places(self) -> Sequence[int]:
        """Places of the steps that `loss_ends` is of: the first, then those of the last loss; none
        if no loss was finite."""
        known = [place for place, loss in enumerate(self.loss) if not math.isnan(loss)]
        # A step that was skipped taught nothing, and its loss may be why it was.
        taken = [place for place in known if not self.steps[place].skipped] or known
        over = max(1, min(LAST, len(taken) // 10))
        return [*known[:1], *taken[-over:]]

    @cached_property
    def scaled(self) -> bool:
        """Whether a loss scale was in use: it was another number than 1 at some step."""
        return any(value != 1 for value in self.scale if not math.isnan(value))

    @cached_property
    def may_underflow(self) -> bool:
        """Whether small gradients may have been rounded to zero, so that a loss scale matters.

        Not in float32 or bfloat16, which reach as low; nor where nothing tells of a narrower
        format.
        """
        formats = {*self.optimizer.dtypes, *(self.computed_in or ())}
        return self.scaled or any(name.startswith(NARROW) for name in formats)

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {place: row for row, place in enumerate(self.detailed)}


def tracks(run: Run) -> list[Track]:
    """Returns one Track for each optimizer that stepped, in the order of their indices.

    Raises:
        BadRunFile: a number in the file is none, or a step's detail does not fit its optimizer.
    """
    steps: dict[int, list[Step]] = {}
    spoilt: dict[int, list[Spoilt | str | None]] = {}
    others: dict[int, dict[int, Sequence[Step]]] = {}
    begins: dict[int, set[int]] = {}
    session, last = 0, dict[int, int]()  # Which goes on, and by optimizer that of its last step.
    for place, (step, (before, _), group) in enumerate(
        zip(run.steps, _spoilt_weights(run), backward_groups(run.steps), strict=True)
    ):
        mine = steps.setdefault(step.optimizer, [])
        session += run.begins.count(place)
        if last.get(step.optimizer) != session:
            begins.setdefault(step.optimizer, set()).add(len(mine))
            last[step.optimizer] = session
        if len(group) > 1 and has_bad_gradients(step):
            rest = [each for each in group if each is not step]
            others.setdefault(step.optimizer, {})[len(mine)] = rest
        mine.append(step)
        spoilt.setdefault(step.optimizer, []).append(before)
    infos = {info.index: info for info in run.optimizers}
    damaged = _damaged(run)
    shown = {s.optimizer for s in run.steps if damaged and s.time >= damaged.time and is_bad(s)}
    in_time = [t for t in run.traces if t.where == "buffers" or not came_late(run, t)]
    try:
        return [
            Track(
                infos.get(index) or OptimizerInfo(index, "optimizer", (), (), ()),
                steps[index],
                scale_policy=str(run.header.settings.get("scale", "")),
                several=len(steps) > 1,
                trains=_trained(infos, index),
                spoilt=spoilt[index],
                others=others.get(index, {}),
                traced=bool(run.header.settings.get("trace")) or bool(run.traces),
                traces=_placed(in_time, steps[index]),
                all_traces=run.traces,
                traced_late=len(in_time) < len(run.traces),
                damaged=damaged if index in (shown or {min(steps)}) else None,
                computed_in=run.computed_in,
                begins=begins[index],
            )
            for index in sorted(steps)
        ]
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRunFile(
            f"{run.path}: a step holds something else than the numbers of a run file ({error}). "
            "The file was changed, or written by another version of gradilocks."
        ) from error


def _trained(infos: Mapping[int, OptimizerInfo], index: int) -> str:
    """With what the names of an optimizer's parameters begin, if no other's do so; else ''."""
    begin = {i: {name.partition(".")[0] for name in info.names} for i, info in infos.items()}
    mine = begin.get(index, set())
    others = set().union(*(names for i, names in begin.items() if i != index))
    # A number alone, as in a Sequential, would say nothing.
    return mine.pop() if len(mine) == 1 and not mine & others and not min(mine).isdigit() else ""


def nanmedian(values: Iterable[float]) -> float:
    """The median of the values that are not NaN; NaN if there is none."""
    present = [value for value in values if not math.isnan(value)]
    return median(present) if present else NAN


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


def came_late(run: Run, trace: Trace) -> bool:
    """Whether NaN or Inf was in the weights before a traced step, as far as the file tells."""
    if trace.damaged or "was damaged before this step" in trace.text:
        return True
    late = False
    if trace.damaged is None:  # Else the trace looked at the weights and found none.
        for step, (_, after) in zip(run.steps, _spoilt_weights(run), strict=True):
            if step.time > trace.time:
                break
            late = after
    return late


def _damaged(run: Run) -> Trace | None:
    """The first trace that came late, if no step with NaN or Inf had been taken before it."""
    late = (trace for trace in run.traces if trace.certainty != "unknown")
    first = next((t for t in late if t.where != "buffers" and came_late(run, t)), None)
    if first is None or any(
        has_bad_gradients(s) and not s.skipped and s.time <= first.time for s in run.steps
    ):
        return None  # The finding about the step that was taken says that the trace came after it.
    return first


def _spoilt_weights(run: Run) -> Iterator[tuple[Spoilt | str | None, bool]]:
    """For each step of a run `Track.spoilt`, and whether any weights are spoilt after it.

    A session that is resumed begins anew.
    """
    spoilt, begins = SpoiltWeights(), set(run.begins)
    for place, step in enumerate(run.steps):
        if place in begins:
            spoilt.forget()
        before = spoilt.of(step.optimizer) or (ANOTHERS if spoilt else None)
        spoilt.take(step)
        yield before, bool(spoilt)


def _placed(traces: Iterable[Trace], steps: Sequence[Step]) -> dict[int, Trace]:
    """By place, the first trace of each of these steps that was bad."""
    found: dict[int, Trace] = {}
    for trace in traces:
        # A step has the number that the trace has, or it is of an optimizer that counts otherwise:
        # then it is the one that was going on at the time.
        numbered = [i for i, s in enumerate(steps) if s.step == trace.step and is_bad(s)]
        going_on = next((i for i, s in enumerate(steps) if s.time >= trace.time), None)
        nearest = min(numbered, key=lambda i: abs(steps[i].time - trace.time), default=going_on)
        if nearest is not None and (is_bad(steps[nearest]) or steps[nearest].loss is None):
            found.setdefault(nearest, trace)
    return found


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
