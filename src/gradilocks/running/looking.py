"""An optimizer's gradients enter, their statistics leave; nothing that the script sees changes.

A gradient is read once: when it is clipped, because clipping can spread one NaN to all, else when
the step comes. What was read at the clip is used at the step if nothing but the clip has written.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradilocks.measure import measure
from gradilocks.values import Statistics

__all__ = ["Look", "Looks", "elements"]

_PLAIN = {Tensor, nn.Parameter}


@dataclass(frozen=True)
class Look:
    """What was found in gradients."""

    places: list[int]
    """Which of the parameters had one."""
    statistics: Statistics | None
    """Of those; None if there was none."""
    elements: list[int]
    """How many elements each has."""


@dataclass(frozen=True)
class _Seen:
    """A gradient that was measured before it was clipped."""

    gradient: weakref.ref[Tensor]
    version: int
    """Its version after the clip."""
    statistics: Statistics
    row: int
    elements: int

    def serves(self, gradient: Tensor, *, detail: bool) -> bool:
        """Whether it is still what `gradient` was before its clip."""
        same = self.gradient() is gradient and self.version == gradient._version
        return same and not (detail and self.statistics.zeros is None)


class Looks:
    """Looks at gradients, and remembers what it saw before a clip."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def before_clip(self, params: Sequence[Tensor], *, detail: bool) -> list[Tensor] | None:
        """Measures the gradients that are about to be clipped; they are returned for `clipped`."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen.gradient() is not None}
        gradients, tensors = _gradients(params)
        if not tensors:
            return None
        statistics = _measured(tensors, detail=detail)
        for row, gradient in enumerate(gradients):
            size = tensors[row].numel()
            self._seen[id(gradient)] = _Seen(weakref.ref(gradient), -1, statistics, row, size)
        return gradients

    def clipped(self, gradients: Sequence[Tensor]) -> None:
        """The clip is done: what it wrote does not count as a change."""
        for gradient in gradients:
            seen = self._seen[id(gradient)]
            self._seen[id(gradient)] = replace(seen, version=gradient._version)

    def largest(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The largest magnitudes among gradients that were measured before a clip, in detail."""
        return self._seen[id(gradients[0])].statistics.largest if gradients else None

    def look(self, params: Sequence[Tensor], *, detail: bool) -> Look:
        """Measures the gradients of `params`, those that were clipped as they were before."""
        places = [place for place, param in enumerate(params) if param.grad is not None]
        found: list[tuple[int, Statistics, int, int]] = []
        fresh: list[int] = []
        tensors: list[Tensor] = []
        for place in places:
            gradient = cast("Tensor", params[place].grad)
            seen = self._seen.get(id(gradient))
            if seen is not None and seen.serves(gradient, detail=detail):
                found.append((place, seen.statistics, seen.row, seen.elements))
                continue
            inner = elements(gradient)
            if inner is not None:
                fresh.append(place)
                tensors.append(inner)
        if tensors:
            statistics = _measured(tensors, detail=detail)
            if not found:
                return Look(fresh, statistics, [tensor.numel() for tensor in tensors])
            found += [
                (place, statistics, row, tensors[row].numel()) for row, place in enumerate(fresh)
            ]
        if not found:
            return Look([], None, [])
        found.sort(key=lambda entry: entry[0])
        rows = [(statistics, row) for _, statistics, row, _ in found]
        sizes = [size for *_, size in found]
        return Look([place for place, *_ in found], _gathered(rows, detail=detail), sizes)


def elements(gradient: Tensor) -> Tensor | None:
    """A gradient's own elements, or None if nothing can be measured; `.grad` stays as it is."""
    if type(gradient) not in _PLAIN:
        module = sys.modules.get("torch.distributed.tensor")
        if module is not None and isinstance(gradient, module.DTensor):
            gradient = cast("Any", gradient).to_local()
        if type(gradient) not in _PLAIN:
            return None
    if gradient.layout is torch.sparse_coo:
        gradient = gradient if gradient.is_coalesced() else gradient.coalesce()
        gradient = gradient._values()
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
        inner = None if gradient is None else elements(gradient)
        if gradient is not None and inner is not None:
            gradients.append(gradient)
            tensors.append(inner)
    return gradients, tensors


def _measured(tensors: Sequence[Tensor], *, detail: bool) -> Statistics:
    return measure(tensors, home=tensors[0].device, detail=detail).tensors


def _gathered(found: Sequence[tuple[Statistics, int]], *, detail: bool) -> Statistics:
    """Rows of several Statistics as one; untouched if they are one, in its own order."""
    sources = list({id(statistics): statistics for statistics, _ in found}.values())
    if len(sources) == 1:
        rows = [row for _, row in found]
        if rows == list(range(len(sources[0].norms))):
            return sources[0]
    home = sources[0].norms.device
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
        largest=gather([s.largest for s in sources]) if detail else None,
        zeros=gather([s.zeros for s in sources]) if detail else None,
    )
