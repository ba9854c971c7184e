"""Gradients in, one Measurement out, for the clip functions: few reads and few launches.

As `measure`, shorter where no gradient is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.ranks.collective import reduce_apart
from gradilocks.step.gradients import Gradients
from gradilocks.step.measure import summarize
from gradilocks.step.total import rounded
from gradilocks.values import Measurement, Meeting, Statistics, moved, wide

__all__ = ["by_device", "measured", "total"]


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    """The tensors device by device, the first one's device first."""
    devices = kernels.by_device(tensors)
    return {device: [tensors[place] for place in places] for device, places in devices.items()}


def measured(
    found: Gradients,
    order: float,
    devices: dict[torch.device, list[Tensor]],
    *,
    double: bool,
    meetings: Sequence[Meeting],
) -> Measurement:
    """Measures all gradients together; waits only to bring a device's numbers to the CPU.

    Args:
        found: the gradients.
        order: the p of the norm.
        devices: their tensors, by device.
        double: whether one of them is float64.
        meetings: the ranks that hold some of them together with this one.

    Returns:
        The Measurement, on the first tensor's device; its entries are in any order.
    """
    parts = [
        kernels.for_device(device).measure(tensors, order=order)
        for device, tensors in devices.items()
    ]
    statistics = _joined(parts, next(iter(devices), torch.device("cpu")))
    if meetings:
        every = list(zip(found.tensors, found.layouts or [None] * len(found.tensors), strict=True))
        layouts = [layout for device in devices for t, layout in every if t.device == device]
        return reduce_apart(
            summarize(statistics, order=order, double=double),
            meetings=meetings,
            ranks=[None if layout is None else layout.ranks for layout in layouts],
            counts=[layout is None or layout.counts for layout in layouts],
        )
    return total(statistics, order, double)


def _joined(parts: Sequence[Statistics], home: torch.device) -> Statistics:
    if len(parts) == 1:
        return parts[0]

    def join(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        nothing = torch.zeros(0, dtype=dtype, device=home)
        return torch.cat([nothing, *(moved(column, home) for column in columns)])

    return Statistics(
        norms=join([part.norms for part in parts], wide(home)),
        nan=join([part.nan for part in parts], torch.int64),
        inf=join([part.inf for part in parts], torch.int64),
    )


def total(statistics: Statistics, order: float, double: bool) -> Measurement:
    """As `summarize`, in 8 launches where that takes some 20, if no gradient is float64.

    The square of a float32 norm is far from the ends of float64, so the sum needs no care, and it
    is finite just when every element is.
    """
    if order != 2.0 or double or statistics.norms.dtype is not torch.float64:
        return summarize(statistics, order=order, double=double)
    norm = rounded(torch.linalg.vector_norm(statistics.norms))
    nonfinite = torch.logical_not(norm < math.inf).to(torch.float32)
    return Measurement(order=2.0, tensors=statistics, norm=norm, nonfinite=nonfinite)
