"""An optimizer's gradients enter, their statistics leave; nothing that the script sees changes.

Gradients are recorded as they were before they were clipped, because clipping can spread one NaN to
all. So they are measured before a clip, after it, and again when the step comes: if the norms and
the counts of NaN and Inf are to the bit those that the clip has left, of all the gradients that
were clipped together, what was found before it is told, else what the step finds. All three are
reads. Whether somebody has written in between cannot be asked of torch: its counter of versions
does not see `p.grad.data /= world_size`, a collective on `.data`, or NumPy.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradilocks._torch import sparse_values
from gradilocks.kernels.totals import any_double
from gradilocks.step.measure import measure
from gradilocks.values import Statistics

__all__ = ["GradientReader", "Reading", "measurable"]

_PLAIN = {Tensor, nn.Parameter}


@dataclass(frozen=True)
class Reading:
    """What was found in gradients."""

    places: list[int]
    """Which of the parameters had one."""
    statistics: Statistics | None
    """Of those; None if there was none."""
    elements: list[int]
    """How many elements each has."""
    double: bool
    """Whether one of them is float64."""


@dataclass(frozen=True)
class _Seen:
    """A gradient that was measured before and after it was clipped."""

    gradient: weakref.ref[Tensor]
    row: int
    """Its place in both Statistics."""
    before: Statistics
    after: Statistics | None = None

    def serves(self, gradient: Tensor, *, detail: bool) -> bool:
        """Whether it is of this gradient, clipped, and in as much detail as is wanted."""
        if self.gradient() is not gradient or self.after is None:
            return False
        return not detail or self.before.zeros is not None


class GradientReader:
    """Measures gradients, and remembers what it found before a clip."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def before_clip(self, params: Sequence[Tensor], *, detail: bool) -> list[Tensor]:
        """Measures the gradients that are about to be clipped, and returns them."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen.gradient() is not None}
        gradients, tensors = _gradients(params)
        if not tensors:
            return []
        found = _measured(tensors, detail=detail)
        for row, gradient in enumerate(gradients):
            self._seen[id(gradient)] = _Seen(weakref.ref(gradient), row, found)
        return gradients

    def after_clip(self, gradients: Sequence[Tensor]) -> None:
        """The clip is done: measures what it has left."""
        tensors = [inner for gradient in gradients if (inner := measurable(gradient)) is not None]
        if tensors and len(tensors) == len(gradients):
            after = _measured(tensors, detail=False)
            for gradient in gradients:
                self._seen[id(gradient)] = replace(self._seen[id(gradient)], after=after)

    def changed(self, gradients: Sequence[Tensor]) -> Tensor | bool:
        """Whether a clip has changed one of these gradients, as far as this process holds them."""
        seen = self._seen.get(id(gradients[0])) if gradients else None
        if seen is None or seen.after is None:
            return False
        before, after = seen.before.norms, seen.after.norms
        return ((before != after) & torch.logical_not(torch.isnan(before))).any().to(torch.float32)

    def largest(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The largest magnitudes among gradients that were measured before a clip, in detail."""
        return self._seen[id(gradients[0])].before.largest if gradients else None

    def read(self, params: Sequence[Tensor], *, detail: bool) -> Reading:
        """Measures the gradients of `params`; those that a clip has left tell of before it."""
        places: list[int] = []
        tensors: list[Tensor] = []
        clipped: list[tuple[int, _Seen]] = []
        for place, param in enumerate(params):
            gradient = param.grad
            inner = None if gradient is None else measurable(gradient)
            if gradient is None or inner is None:
                continue
            seen = self._seen.pop(id(gradient), None)  # What was clipped for one step is past.
            if seen is not None and seen.serves(gradient, detail=detail):
                clipped.append((len(places), seen))
            places.append(place)
            tensors.append(inner)
        if not tensors:
            return Reading([], None, [], double=False)
        now = _measured(tensors, detail=detail)
        sizes = [tensor.numel() for tensor in tensors]
        found = _unclipped(now, clipped, detail=detail) if clipped else now
        return Reading(places, found, sizes, double=any_double(tensors))


def _unclipped(
    now: Statistics, clipped: Sequence[tuple[int, _Seen]], *, detail: bool
) -> Statistics:
    """What was found before a clip that has left its gradients as they are, else `now`."""
    home = now.norms.device
    rows = torch.tensor([row for row, _ in clipped], device="cpu").to(home, non_blocking=True)
    before = _gathered([(seen.before, seen.row) for _, seen in clipped], home)
    after = _gathered([(cast("Statistics", seen.after), seen.row) for _, seen in clipped], home)
    norms = now.norms[rows]
    same = (norms == after.norms) | (torch.isnan(norms) & torch.isnan(after.norms))
    same = same & (now.nan[rows] == after.nan) & (now.inf[rows] == after.inf)
    clips: dict[int, list[int]] = {}  # A norm of some from before and others from after is none.
    for place, (_, seen) in enumerate(clipped):
        clips.setdefault(id(seen.after), []).append(place)
    if len(clips) == 1:
        same = same.all().expand_as(same)
    else:
        for places in clips.values():
            at = torch.tensor(places, device="cpu").to(home, non_blocking=True)
            same = same.index_copy(0, at, same[at].all().expand(len(places)))

    def chosen(column: Tensor, old: Tensor) -> Tensor:
        return column.index_copy(0, rows, torch.where(same, old, column[rows]))

    largest, zeros = now.largest, now.zeros
    if largest is not None and zeros is not None and detail:
        assert before.largest is not None
        assert before.zeros is not None
        largest, zeros = chosen(largest, before.largest), chosen(zeros, before.zeros)
    return Statistics(
        norms=chosen(now.norms, before.norms),
        nan=chosen(now.nan, before.nan),
        inf=chosen(now.inf, before.inf),
        largest=largest if detail else None,
        zeros=zeros if detail else None,
    )


def measurable(gradient: Tensor) -> Tensor | None:
    """A gradient's own elements, or None if nothing can be measured; `.grad` stays as it is."""
    if type(gradient) not in _PLAIN:
        module = sys.modules.get("torch.distributed.tensor")
        if module is not None and isinstance(gradient, module.DTensor):
            gradient = cast("Any", gradient).to_local()
        if type(gradient) not in _PLAIN:
            return None
    if gradient.layout is torch.sparse_coo:
        gradient = gradient if gradient.is_coalesced() else gradient.coalesce()
        gradient = sparse_values(gradient)
    if gradient.layout is not torch.strided or gradient.is_meta or gradient.dtype.itemsize == 1:
        return None
    if not (gradient.is_floating_point() or gradient.is_complex()):
        return None
    return gradient.detach()


def _gradients(params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    gradients: list[Tensor] = []
    tensors: list[Tensor] = []
    for param in params:
        gradient = param.grad
        inner = None if gradient is None else measurable(gradient)
        if gradient is not None and inner is not None:
            gradients.append(gradient)
            tensors.append(inner)
    return gradients, tensors


def _measured(tensors: Sequence[Tensor], *, detail: bool) -> Statistics:
    return measure(tensors, home=tensors[0].device, detail=detail).tensors


def _gathered(found: Sequence[tuple[Statistics, int]], home: torch.device) -> Statistics:
    """Rows of several Statistics as one, on `home`."""
    sources = list({id(statistics): statistics for statistics, _ in found}.values())
    offsets, begin = {}, 0
    for source in sources:
        offsets[id(source)] = begin
        begin += len(source.norms)
    order = torch.tensor(
        [offsets[id(statistics)] + row for statistics, row in found], device="cpu"
    ).to(home, non_blocking=True)

    def gather(columns: Sequence[Tensor | None]) -> Tensor | None:
        there = [column.to(home, non_blocking=True) for column in columns if column is not None]
        return torch.cat(there)[order] if len(there) == len(sources) else None

    return Statistics(
        norms=cast("Tensor", gather([s.norms for s in sources])),
        nan=cast("Tensor", gather([s.nan for s in sources])),
        inf=cast("Tensor", gather([s.inf for s in sources])),
        largest=gather([s.largest for s in sources]),
        zeros=gather([s.zeros for s in sources]),
    )
