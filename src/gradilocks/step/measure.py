"""Gradients in, a Measurement out: the one read of every gradient that a step pays for.

The norm, the skip flag, the culprits' names and the telemetry all come from here. Every device has
its back end (`kernels`), whose numbers are brought together on one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.kernels.chunks import AddressedTensors
from gradilocks.kernels.host_numbers import numbers_on
from gradilocks.kernels.reference import any_double, summarize
from gradilocks.values import Measurement, Statistics, moved

__all__ = ["measure", "statistics_of"]


def measure(
    tensors: Sequence[Tensor], *, home: torch.device, order: float = 2.0, detail: bool = False
) -> Measurement:
    """Measures tensors as they stand, on whatever devices they lie.

    Args:
        tensors: plain ones; may be none.
        home: the device on which the results are brought together.
        order: the p of the norm.
        detail: also find the largest magnitude and count the zeros.

    Returns:
        The Measurement, on `home`; nothing waits.
    """
    found = statistics_of(tensors, home=home, order=order, detail=detail)
    return summarize(found, order=order, double=any_double(tensors))


def statistics_of(
    tensors: Sequence[Tensor], *, home: torch.device, order: float = 2.0, detail: bool = False
) -> Statistics:
    """What is in each of them, as `measure` has it, without what all of them have together."""
    if isinstance(tensors, AddressedTensors):
        backend = kernels.BACKENDS[tensors.at.device.type]
        return _moved(backend.measure(tensors, order=order, detail=detail), home)
    places = kernels.by_device(tensors)
    if len(places) == 1:
        (device,) = places
        found = kernels.BACKENDS[device.type].measure(tensors, order=order, detail=detail)
        return _moved(found, home)
    parts = [
        _moved(
            kernels.BACKENDS[device.type].measure(
                [tensors[i] for i in indices], order=order, detail=detail
            ),
            home,
        )
        for device, indices in places.items()
    ]
    order_of_parts = [i for indices in places.values() for i in indices]
    return _merged(parts, order_of_parts, home=home, detail=detail)


def _moved(found: Statistics, home: torch.device) -> Statistics:
    if found.norms.device == home:
        return found
    return Statistics(
        norms=moved(found.norms, home),
        nan=moved(found.nan, home),
        inf=moved(found.inf, home),
        largest=None if found.largest is None else moved(found.largest, home),
        zeros=None if found.zeros is None else moved(found.zeros, home),
    )


def _merged(
    parts: Sequence[Statistics], places: Sequence[int], *, home: torch.device, detail: bool
) -> Statistics:
    """Puts the devices' results back into the gradients' own order."""
    back = sorted(range(len(places)), key=places.__getitem__)
    order = numbers_on(home, tuple(back), torch.int64)

    def merge(columns: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not columns:
            return torch.zeros(0, dtype=dtype, device=home)
        return torch.cat(columns)[order]

    real = parts[0].norms.dtype if parts else torch.float64
    return Statistics(
        norms=merge([p.norms for p in parts], real),
        nan=merge([p.nan for p in parts], torch.int64),
        inf=merge([p.inf for p in parts], torch.int64),
        largest=merge([p.largest for p in parts if p.largest is not None], real)
        if detail
        else None,
        zeros=merge([p.zeros for p in parts if p.zeros is not None], torch.int64)
        if detail
        else None,
    )
