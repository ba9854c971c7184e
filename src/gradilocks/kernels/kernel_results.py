"""What the kernels leave of a list of tensors, made into what the rest of the house speaks in.

`found` is float64 [5, tensors], row by row: norm, largest magnitude, and how many elements are 0,
NaN and Inf. The row of a settled step is `values.ROW`, and after it growth tracker, hysteresis and
streak as they were before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradilocks.kernels import reference
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.values import ROW, NonFinite, ScaleState, Statistics, StepRecord

__all__ = ["KernelStatistics", "fill_in", "nonfinite_of", "put_back", "statistics_of"]


class KernelStatistics(Statistics):
    """The Statistics in `rows`, as kernels leave them: a column is made when somebody asks for it.

    Of most steps nobody does: that all is finite is known by the sums of NaN and Inf.
    """

    rows: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> KernelStatistics:
        """Those in `rows`."""
        made = object.__new__(cls)
        made.__dict__["rows"] = rows
        if capturing():  # A graph makes them anew at each replay.
            _ = made._bad, made.zeros
        return made

    @functools.cached_property
    def norms(self) -> Tensor:
        return self.rows[0]

    @functools.cached_property
    def largest(self) -> Tensor | None:
        return self.rows[1]

    @functools.cached_property
    def zeros(self) -> Tensor | None:
        return self.rows[2].to(torch.int64)

    @functools.cached_property
    def _bad(self) -> Tensor:
        return self.rows[3:].to(torch.int64)

    @functools.cached_property
    def nan(self) -> Tensor:
        return self._bad[0]

    @functools.cached_property
    def inf(self) -> Tensor:
        return self._bad[1]


def statistics_of(found: Tensor) -> Statistics:
    """The Statistics in `found`."""
    return KernelStatistics.of(found)


def nonfinite_of(found: Tensor) -> NonFinite:
    """The counts of NaN and Inf in `found`."""
    counts = found[3:].to(torch.int64)
    return NonFinite(counts[0], counts[1])


def fill_in(found: Tensor, tensors: Sequence[Tensor], places: Sequence[int], order: float) -> None:
    """Measures what the kernels cannot take by the reference, and puts it into its places."""
    measured = reference.measure(tensors, order=order, detail=True)
    columns = (measured.norms, measured.largest, measured.zeros, measured.nan, measured.inf)
    for row, column in zip(found, columns, strict=True):
        assert column is not None
        for number, place in zip(column.unbind(), places, strict=True):
            row[place] = number


def put_back(record: StepRecord, state: ScaleState, streak: Tensor, steps: Tensor) -> None:
    """Puts back what settling a step has moved on."""
    state.scale.copy_(record.row[1])
    before = record.row[len(ROW) :].unbind()
    for number, tensor in zip(
        before, (state.growth_tracker, state.hysteresis, streak), strict=True
    ):
        tensor.copy_(number)
    steps.sub_(1)
