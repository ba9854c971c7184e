"""Steps of a GradientControl or a GradScaler → Samples, one an optimizer, for its Recorder.

They tell of their losses and steps by `step/events.py`. What is asked here is read and never
written, and nothing waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from gradilocks.eager import eager
from gradilocks.names import Names
from gradilocks.ranks.all_parameters import AllParameters
from gradilocks.ranks.layout import has_other_ranks, is_distributed
from gradilocks.record.own_numbers import checked_numbers
from gradilocks.record.precision import formats_behind
from gradilocks.record.recorder import Recorder, refuse_capture
from gradilocks.record.sample import OF_CONTROL, Sample, SpreadSample, Weights
from gradilocks.step.events import EVENTS, Step, StepEvents, StepListener
from gradilocks.step.measure import measure
from gradilocks.step.own_step import weakly
from gradilocks.step.table import every_parameter, gradients_of, parameter_list
from gradilocks.step.together import Together
from gradilocks.values import Statistics, StepRecord, wide

__all__ = ["Journal", "journal_of", "log", "recorder_for"]


class Journal(StepListener):
    """Records each step of one control, or of one scaler.

    Args:
        recorder: where to.
        find_names: the names of a control's parameters, given its own; by default just those.
        names_of: of a scaler, the names of an optimizer's parameters.

    Attributes:
        loss: the sum of the losses since the last step; None if it is not known.
        waited: seconds of the host between the last step and the forward pass of the coming one,
            told by whoever knows; of several optimizers' steps the first carries them.
        has_recorded: whether it has handed over a step.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        find_names: Callable[[Names], Names] | None = None,
        names_of: Callable[[Any], Names] | None = None,
    ) -> None:
        self.recorder = recorder
        self.loss: Tensor | None = None
        self.waited: float | None = None
        self.has_recorded = False
        self._find_names, self._names_of = find_names, names_of
        # By the id of an optimizer, before its next step: how many of its steps the control has
        # counted, and how many in a state that it loaded.
        self._goes_on_from: dict[int, tuple[int, int | None]] = {}
        self._numbered: set[int] = set()  # Those that go on so, as the recorder knows them.
        # By the ids of the optimizers that step together.
        self._known: dict[tuple[int, ...], _Introduced] = {}
        # The optimizers that have stepped on the losses so far, each alone.
        self._stepped: set[int] = set()
        self._weights: list[Weights | None] = []
        self._two_norms: Tensor | None = None

    def introduce(
        self, optimizers: Sequence[Any], names: Names, together: Together | None = None
    ) -> _Introduced:
        """Tells the recorder of the optimizers, with their parameters as they are now.

        Args:
            optimizers: of the control.
            names: of their parameters.
            together: what all ranks have told, where several hold the model: theirs are told too.
        """
        if self._find_names is not None:
            names = self._find_names(names)
        every = list(every_parameter(optimizers))
        order = names.in_backward_order(every)
        named = {every[place]: name for place, name in reversed(order)}
        ordered = names.knows_all(every)
        every_rank = (
            [None] * len(optimizers) if together is None else together.parameters.optimizers
        )
        indices = [
            self.recorder.add_optimizer(optimizer, names=named, ordered=ordered, spread=spread)
            for optimizer, spread in zip(optimizers, every_rank, strict=False)
        ]
        parameters = None if together is None else together.parameters
        who = tuple(map(weakly, optimizers))
        known = _Introduced(indices, _counts(optimizers), parameters, who)
        self._known[_key(optimizers)] = known
        return known

    def goes_on_from(
        self, optimizers: Sequence[Any], counted: Sequence[int], loaded: Sequence[int] = ()
    ) -> None:
        """The next step of each optimizer is the one after those that the control has counted.

        Not of those that this journal has numbered already, until another state is loaded.

        Args:
            optimizers: of the control.
            counted: for each of them, so many.
            loaded: likewise, how many it had counted in the last state that it loaded; () if it has
                loaded none, which may still come.
        """
        marks = [*loaded, *[None] * len(optimizers)]
        for optimizer, count, mark in zip(optimizers, counted, marks, strict=False):
            self._goes_on_from[id(optimizer)] = count, mark
        if loaded:
            self._number_known()

    def state_loaded(self, control: Any, steps: Sequence[int]) -> None:
        self.loss = None
        self._numbered.clear()
        self.goes_on_from(control.optimizers, steps, steps)

    def rebind(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """A control has other optimizers: those that are new in a place go on for who was there."""
        self._known = {}  # By ids, which new ones may have now.
        self._goes_on_from = {}
        for old, new in zip(before, after, strict=False):
            if old is not new and not any(old is each for each in after):
                self.recorder.replace_optimizer(old, new)

    def _number_known(self) -> None:
        """As `_number_steps`, of all optimizers that the recorder was told of."""
        for key, known in list(self._known.items()):
            self._number_steps(key, known)

    def _number_steps(self, key: tuple[int, ...], known: _Introduced) -> None:
        """Tells the recorder, once, from which step optimizers go on."""
        for each, index in zip(key, known.indices, strict=False):
            counts = self._goes_on_from.pop(each, None)
            if counts is not None and index not in self._numbered:
                self._numbered.add(index)
                self.recorder.resume(index, counted=counts[0], loaded=counts[1])

    def loss_counted(self, control: Any, loss: Tensor, *, first: bool, averaged: int = 0) -> None:
        if not self.recorder.recording:
            return
        if not self.recorder.knows_precision:
            self.recorder.precision(formats_behind(loss))
        if loss.numel() != 1 or (type(loss) is not Tensor and is_distributed(loss)):
            self.loss = None
            return
        mine = loss.detach()
        if mine.dim():
            mine = mine.reshape(())
        # A copy: the loss is the caller's, who may change it.
        kind = wide(mine.device)
        mine = mine.clone() if mine.dtype is kind else mine.to(kind)
        before = self.loss
        if first or self._stepped:  # A loss after an optimizer's own step begins another sum.
            self._stepped.clear()
            self.loss = mine
        elif before is None:  # A part of the sum was not seen: attached since, or no scalar.
            return
        elif averaged:
            self.loss = before.to(mine.device) + (mine - before.to(mine.device)) / averaged
        else:
            self.loss = before.to(mine.device) + mine

    def step_begins(self, step: Step) -> None:
        recorder = self.recorder
        if not recorder.recording:
            return
        refuse_capture()
        known = self._introduced(step.optimizers)
        if known is not None and self._goes_on_from:
            self._number_steps(_key(step.optimizers), known)
        self._weights, self._two_norms = [], None
        if has_other_ranks():
            plan = recorder.plan(known.indices[0] if known else None)
            step.plans = (*step.plans, plan)
            if self._tells_of_all(step):
                step.detail = step.detail or plan.wants_detail(0)
                return  # The ranks share what they find, and who holds what they tell at the step.
        if known is None or known.counts != _counts(step.optimizers):
            known = self.introduce(step.optimizers, self._names(step))
            self._number_steps(_key(step.optimizers), known)
        wanted = [recorder.wants_detail(index) for index in known.indices]
        if any(wanted):
            step.detail = True
            try:
                self._read_detail(wanted, step)
            except Exception as error:  # Tensors of a kind that nobody has thought of.
                recorder.warn_once(
                    f"a step could not be recorded tensor by tensor: {type(error).__name__}: "
                    f"{error}. Training goes on, and so does the record of whole steps."
                )

    def _introduced(self, optimizers: Sequence[Any]) -> _Introduced | None:
        """What the recorder was told of these; None if it was not, or of others with their ids."""
        known = self._known.get(_key(optimizers))
        if known is not None:
            for who, optimizer in zip(known.who, optimizers, strict=True):
                if who() is not optimizer:
                    return None
        return known

    def wants_detail(self, optimizer: Any) -> bool:
        """Whether the coming step of one that steps alone is to be recorded tensor by tensor."""
        if not self.recorder.recording:
            return False
        known = self._introduced((optimizer,))
        if known is None:  # As the recorder will number its first one.
            return self.recorder.plan(None).wants_detail(0)
        return self.recorder.wants_detail(known.indices[0])

    def _names(self, step: Step) -> Names:
        if step.names is not None:
            return step.names
        assert self._names_of is not None
        return self._names_of(step.optimizers[0])

    def _tells_of_all(self, step: Step) -> bool:
        """Whether what all ranks tell each other is recorded: on the first of them.

        Another rank that records does so for what it holds itself.
        """
        return self.recorder.rank in step.ranks[:1]

    def _read_detail(self, wanted: Sequence[bool], step: Step) -> None:
        if step.order != 2.0 or not step.is_of_control:
            found = gradients_of(parameter_list(step.optimizers), name=self._names(step))
            at = found.addressed
            step.elements = at.at.sizes if at else [each.numel() for each in found.tensors]
            if step.order != 2.0 and found.tensors:
                assert isinstance(step.scale, Tensor)
                self._two_norms = measure(found.tensors, home=step.scale.device).tensors.norms
        self._weights = [
            Weights(parameter_list([optimizer])) if wants else None
            for optimizer, wants in zip(step.optimizers, wanted, strict=True)
        ]

    def step_ended(self, step: Step) -> None:
        loss = self._loss_of(step)
        waited, self.waited = self.waited, None
        record = step.record
        if not self.recorder.recording or record is None:
            return
        self.has_recorded = True
        if step.together is not None and self._tells_of_all(step):
            self._record_of_all(step, record, loss, step.together, waited)
            return
        known = self._known[_key(step.optimizers)]
        parts = self._parts(step, record, known.counts)
        for number, optimizer in enumerate(step.optimizers):
            found, places, elements = parts[number]
            weight = change = None
            before = self._weights[number] if self._weights else None
            if before is not None:
                weight, change = before.norms(record.row.device)
            groups = optimizer.param_groups
            self.recorder.step(
                known.indices[number],
                Sample(
                    loss=loss,
                    record=record,
                    lr=groups[0].get("lr") if groups else None,
                    next_scale=step.next_scale,
                    found=found,
                    carried=1.0 if step.unscaled else None,
                    places=places,
                    elements=elements,
                    weight=weight,
                    change=change,
                    rank_losses=step.rank_losses,
                    of_rank=len(step.ranks) > 0 or step.of_rank,
                    waited=None if number else waited,
                    more=number + 1 < len(step.optimizers),
                ),
            )
        self._weights = []

    def numbers_logged(self, numbers: Mapping[str, Tensor | float], *, step: int | None) -> None:
        self._number_known()
        self.recorder.log(numbers, step=step)

    def _record_of_all(
        self,
        step: Step,
        record: StepRecord,
        loss: Tensor | None,
        together: Together,
        waited: float | None,
    ) -> None:
        """A step of a model that several ranks hold, as all of them have told it."""
        known = self._known.get(_key(step.optimizers))
        if known is None or known.parameters is not together.parameters:
            known = self.introduce(step.optimizers, self._names(step), together)
            self._number_steps(_key(step.optimizers), known)
        of_all = OF_CONTROL
        if len(known.indices) > 1:  # NaN and Inf are counted over all of them.
            of_all = tuple(name for name in OF_CONTROL if name not in ("nan", "inf"))
        for number, index in enumerate(known.indices):
            groups = step.optimizers[number].param_groups
            sample = Sample(
                loss=loss,
                record=record,
                of_record=of_all,
                lr=groups[0].get("lr") if groups else None,
                next_scale=step.next_scale,
                carried=1.0 if step.unscaled else None,
                spread=SpreadSample(
                    together=together,
                    blamed=together.blamed_rows(),
                    mean_loss=together.mean_loss(),
                    losses=together.total("losses"),
                    optimizer=number,
                    shared=step.shared,
                ),
                waited=None if number else waited,
                more=number + 1 < len(known.indices),
            )
            self.recorder.step(index, sample)

    def _loss_of(self, step: Step) -> Tensor | None:
        """The loss of the step: known to each optimizer that steps alone on the same gradients."""
        if not step.apart:
            loss, self.loss = self.loss, None
            return loss
        mine = id(step.optimizers[0])
        loss = None if mine in self._stepped else self.loss
        self._stepped.add(mine)
        return loss

    def _parts(self, step: Step, record: StepRecord, counts: list[int]) -> Sequence[_Part]:
        """Each optimizer's share of what was measured, and of whom it is."""
        measured, norms = step.measured, self._two_norms
        if measured is None:
            measured = record.statistics.norms.numel()
        elements = step.elements if step.detail else None
        if measured == sum(counts) and len(counts) == 1 and norms is None:
            return [_Part(None, None, elements)]
        places: list[list[int] | None] = [None] * len(counts)
        lengths = counts
        if measured != sum(counts):
            having = [
                [k for k, p in enumerate(every_parameter([o])) if p.grad is not None]
                for o in step.optimizers
            ]
            places, lengths = [*having], [len(each) for each in having]
            if sum(lengths) != measured:  # An optimizer that cleared its gradients: whose, nobody
                nothing = _Part(lambda: None, None, None)  # can tell any more.
                return [nothing] * len(lengths)
        parts = []
        begin = 0
        for each, length in zip(places, lengths, strict=True):
            end = begin + length
            mine = None if elements is None else elements[begin:end]
            parts.append(_Part(partial(_slice, record, norms, begin, end), each, mine))
            begin = end
        return parts


class _Part(NamedTuple):
    """What one optimizer has of what was measured at a step."""

    found: Callable[[], Statistics | None] | None
    """As a Sample has it, and likewise the others."""
    places: list[int] | None
    elements: Sequence[int] | None


def recorder_for(
    record: object,
    *,
    config: Mapping[str, Any] | None,
    exists: str = "refuse",
    **settings: object,
) -> Recorder:
    """The Recorder that `record=` means; `settings` are for the header of its run file.

    `exists` and `config` are for one that is made here.
    """
    told = {key: str(value) for key, value in settings.items()}
    if isinstance(record, Recorder):
        if config is not None:
            raise ValueError(
                "config= goes into the header of the run file, which this Recorder has written "
                "already. Give it to the Recorder: Recorder(path, config=...)."
            )
        if exists != "refuse":
            raise ValueError(
                f"exists={exists!r} says what to do with a file that is there, and this Recorder "
                "has opened its own already. Give it to the Recorder: Recorder(path, exists=...)."
            )
        record.describe(**told)
        recorder = record
    elif isinstance(record, (str, os.PathLike)) and not isinstance(record, bytes):
        recorder = Recorder(record, settings=told, config=config, exists=exists)
    else:
        raise TypeError(
            "record must be a path such as 'runs/a.jsonl', a gradilocks.Recorder or None, got "
            f"{type(record).__name__}."
        )
    return recorder


def journal_of(events: StepEvents) -> Journal | None:
    """What records the steps of a control, if somebody does."""
    return next((each for each in events.own if isinstance(each, Journal)), None)


@eager
def log(
    values: Mapping[str, object] | None = None, /, *, step: int | None = None, **more: object
) -> None:
    """Records numbers of your own beside the steps; does nothing if nobody records.

    In every run file of the process: those of its controls and scalers, and that of `gradilocks
    run`. There they are plotted by `gradilocks report`, compared by `compare`, exported by
    `export`. On a GPU nothing waits.

    Args:
        values: names and numbers, for names that are no Python names, as "val/loss".
        step: the step that they belong to; the last one that an optimizer took, if None.
        more: names and numbers: Python's, NumPy's, or tensors of one element.

    Raises:
        TypeError: a name is no text, or a value is no number.
        ValueError: a tensor of several elements, a name that cannot be shown, or given twice.

    Example:
        >>> gradilocks.log(val_loss=0.31, accuracy=0.92)
        >>> gradilocks.log({"val/loss": 0.31}, step=1000)
    """
    numbers = checked_numbers(values, more, step=step)
    for listener in EVENTS.listeners:
        listener.numbers_logged(numbers, step=step)
    journals = filter(None, map(journal_of, EVENTS.of_drivers()))
    for recorder in {id(each.recorder): each.recorder for each in journals}.values():
        recorder.log(numbers, step=step)  # Once, also where several controls share it.


class _Introduced(NamedTuple):
    """What the recorder knows of optimizers that step together."""

    indices: list[int]
    counts: list[int]
    """How many parameters each of them has."""
    parameters: AllParameters | None
    """Of all ranks, where several hold the model."""
    who: tuple[Callable[[], Any], ...]
    """What returns each of them as long as it lives; Python gives its id to another then."""


def _key(optimizers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(id, optimizers))


def _counts(optimizers: Sequence[Any]) -> list[int]:
    counts = []
    for optimizer in optimizers:
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        counts.append(count)
    return counts


def _slice(record: StepRecord, norms: Tensor | None, begin: int, end: int) -> Statistics:
    """A part of what was measured; with other norms, if those are not of the order 2."""
    found = record.statistics if norms is None else replace(record.statistics, norms=norms)
    if begin == 0 and end == found.norms.numel():
        return found
    largest, zeros = found.largest, found.zeros
    return Statistics(
        norms=found.norms[begin:end],
        nan=found.nan[begin:end],
        inf=found.inf[begin:end],
        largest=None if largest is None else largest[begin:end],
        zeros=None if zeros is None else zeros[begin:end],
    )
