"""What the kernels leave of a list of tensors, made into what the rest of the house speaks in.

`found` is float64 [5, tensors], row by row: norm, largest magnitude, and how many elements are 0,
NaN and Inf. The row of a settled step is `values.ROW`, and after it growth tracker, hysteresis and
streak as they were before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradilocks.kernels import reference
from gradilocks.values import ROW, NonFinite, ScaleState, Statistics, StepRecord

__all__ = ["fill_in", "nonfinite_of", "put_back", "statistics_of"]


def statistics_of(found: Tensor) -> Statistics:
    """The Statistics in `found`."""
    counts = found[2:].to(torch.int64)
    return Statistics(found[0], counts[1], counts[2], largest=found[1], zeros=counts[0])


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
