"""A GradientControl's steps → Samples, one an optimizer, for its Recorder.

The control says that a loss was scaled, that a step begins and that it is over. What is asked here
is read and never written, and nothing waits.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gradilocks.ranks.layout import is_distributed
from gradilocks.record.recorder import Recorder, refuse_capture
from gradilocks.record.sample import Sample, Weights
from gradilocks.step.gradients import Names, collect, every_parameter
from gradilocks.step.measure import measure
from gradilocks.values import ROW, Statistics, StepRecord, wide

__all__ = ["Journal", "NoJournal", "journal_for"]

_AT = {name: place for place, name in enumerate(ROW)}


class _Judge(Protocol):
    detail: bool
    clip_policy: Any
    state: Any


class NoJournal:
    """Records nothing: what a control without `record=` has, and every copy of a control."""

    recorder: Recorder | None = None

    def note_loss(self, loss: Tensor, *, first: bool) -> None:
        """A loss was scaled; `first` if it is the first since the last step."""

    def before_step(self, judge: _Judge, *, unscaled: bool) -> None:
        """A step begins; `unscaled` if the gradients have lost the scale already."""

    def after_step(self, record: StepRecord, judge: _Judge) -> None:
        """The optimizers have stepped or not, and the scale has moved on."""


class Journal(NoJournal):
    """Records each step."""

    def __init__(self, recorder: Recorder, optimizers: Sequence[Any], names: Names) -> None:
        self.recorder: Recorder = recorder
        self._optimizers, self._names = optimizers, names
        self._loss: Tensor | None = None
        self._unscaled = False
        self._counts: list[int] = []
        self._weights: list[Weights | None] = []
        self._elements: list[int] | None = None
        self._two_norms: Tensor | None = None
        self._meet()

    def __reduce__(self) -> Any:
        return NoJournal, ()

    def note_loss(self, loss: Tensor, *, first: bool) -> None:
        if not self.recorder.recording:
            return
        loss = loss.detach()
        if loss.numel() != 1 or is_distributed(loss):
            self._loss = None
            return
        with torch.no_grad():  # A copy: the loss is the caller's, who may change it.
            mine = loss.reshape(()).to(wide(loss.device), copy=True)
            before = None if first else self._loss
            self._loss = mine if before is None else before.to(mine.device) + mine

    def before_step(self, judge: _Judge, *, unscaled: bool) -> None:
        if not self.recorder.recording:
            return
        refuse_capture()
        if self._counts != self._count():
            self._meet()
        self._unscaled = unscaled
        wanted = [self.recorder.wants_detail(index) for index in self._indices]
        judge.detail = any(wanted)
        self._weights, self._elements, self._two_norms = [], None, None
        if judge.detail:
            try:
                self._look_closely(wanted, judge)
            except Exception as error:  # Tensors of a kind that nobody has thought of.
                self.recorder.warn_once(
                    f"a step could not be recorded tensor by tensor: {type(error).__name__}: "
                    f"{error}. Training goes on, and so does the record of whole steps."
                )

    def _look_closely(self, wanted: Sequence[bool], judge: _Judge) -> None:
        found = collect(every_parameter(self._optimizers), name=self._names)
        self._elements = [tensor.numel() for tensor in found.tensors]
        if float(judge.clip_policy.order) != 2.0 and found.tensors:
            home = judge.state.scale.device
            self._two_norms = measure(found.tensors, home=home).tensors.norms
        self._weights = [
            Weights(list(every_parameter([optimizer]))) if wants else None
            for optimizer, wants in zip(self._optimizers, wanted, strict=True)
        ]

    def after_step(self, record: StepRecord, judge: _Judge) -> None:
        loss, self._loss = self._loss, None
        judge.detail = False
        if not self.recorder.recording:
            return
        parts = self._parts(record)
        row = record.row
        for number, (index, optimizer) in enumerate(
            zip(self._indices, self._optimizers, strict=True)
        ):
            statistics, places, elements = parts[number]
            weight = update = None
            before = self._weights[number] if self._weights else None
            if before is not None:
                weight, update = before.moved_by_step(row.device)
            self.recorder.step(
                index,
                Sample(
                    loss=loss,
                    scale=row[_AT["scale"]],
                    norm=row[_AT["norm"]],
                    limit=row[_AT["limit"]],
                    clipped=row[_AT["clipped"]],
                    skip=row[_AT["skip"]],
                    lr=optimizer.param_groups[0].get("lr") if optimizer.param_groups else None,
                    next_scale=judge.state.scale,
                    statistics=statistics,
                    carried=1.0 if self._unscaled else None,
                    places=places,
                    elements=elements,
                    weight=weight,
                    update=update,
                    more=number + 1 < len(self._optimizers),
                ),
            )
        self._weights = []

    def _meet(self) -> None:
        """Introduces the optimizers, with their parameters as they are at this moment."""
        every = list(every_parameter(self._optimizers))
        order = self._names.in_backward_order([weakref.ref(p) for p in every])
        named = {every[place]: name for place, name in reversed(order)}
        ordered = self._names.knows_all(every)
        self._indices = [
            self.recorder.add_optimizer(o, names=named, ordered=ordered) for o in self._optimizers
        ]
        self._counts = self._count()

    def _count(self) -> list[int]:
        return [sum(len(g["params"]) for g in each.param_groups) for each in self._optimizers]

    def _parts(
        self, record: StepRecord
    ) -> Sequence[tuple[Statistics | None, list[int] | None, list[int] | None]]:
        """Each optimizer's share of what was measured, and of whom it is."""
        found = record.statistics
        if self._two_norms is not None:
            found = replace(found, norms=self._two_norms)
        measured = found.norms.numel()
        places: list[list[int] | None] = [None] * len(self._counts)
        lengths = self._counts
        if measured != sum(self._counts):
            having = [
                [k for k, p in enumerate(every_parameter([o])) if p.grad is not None]
                for o in self._optimizers
            ]
            places, lengths = [*having], [len(each) for each in having]
            if sum(lengths) != measured:  # An optimizer that cleared its gradients: whose, nobody
                return [(None, None, None)] * len(lengths)  # can tell any more.
        parts = []
        begin = 0
        for each, length in zip(places, lengths, strict=True):
            end = begin + length
            mine = None if self._elements is None else self._elements[begin:end]
            parts.append((_slice(found, begin, end), each, mine))
            begin = end
        return parts


def journal_for(
    record: object, optimizers: Sequence[Any], names: Names, **settings: object
) -> NoJournal:
    """What a control keeps its records with.

    Args:
        record: a path, a Recorder, or None.
        optimizers: of the control.
        names: of their parameters.
        settings: for the header.
    """
    if record is None:
        return NoJournal()
    if isinstance(record, Recorder):
        record.describe(**{key: str(value) for key, value in settings.items()})
        return Journal(record, optimizers, names)
    if not isinstance(record, (str, os.PathLike)) or isinstance(record, bytes):
        raise TypeError(
            "record must be a path such as 'runs/a.jsonl', a gradilocks.Recorder or None, got "
            f"{type(record).__name__}."
        )
    told = {key: str(value) for key, value in settings.items()}
    return Journal(Recorder(record, settings=told), optimizers, names)


def _slice(found: Statistics, begin: int, end: int) -> Statistics:
    if begin == 0 and end == found.norms.numel():
        return found
    return Statistics(
        norms=found.norms[begin:end],
        nan=found.nan[begin:end],
        inf=found.inf[begin:end],
        largest=None if found.largest is None else found.largest[begin:end],
        zeros=None if found.zeros is None else found.zeros[begin:end],
    )
