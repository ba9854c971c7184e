"""Gradients in, a Measurement out: the one read of every gradient that a step pays for.

The norm, the skip flag, the culprits' names and the telemetry all come from here. Every device has
its back end (`kernels`), whose numbers are brought together on one of them. The functions at the
end serve the drop-ins, which also multiply while they look.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.kernels.totals import any_double, rounded, total_norm
from gradilocks.step.table import AddressedGradients, Gradients
from gradilocks.values import Measurement, NonFinite, Statistics, moved

__all__ = [
    "Look",
    "look",
    "measure",
    "multiply_",
    "norm_and_coefficient",
    "summarize",
]


def measure(
    tensors: Sequence[Tensor], *, home: torch.device, order: float = 2.0, detail: bool = False
) -> Measurement:
    """Measures gradients as they stand, on whatever devices they lie.

    Args:
        tensors: the gradients' elements; may be empty.
        home: the device on which the results are brought together.
        order: the p of the norm.
        detail: also find the largest magnitude and count the zeros.

    Returns:
        The Measurement, on `home`; nothing waits.
    """
    places, double = kernels.by_device(tensors), any_double(tensors)
    if len(places) == 1:
        (device,) = places
        found = kernels.for_device(device).measure(tensors, order=order, detail=detail)
        return summarize(_moved(found, home), order=order, double=double)
    parts = [
        _moved(
            kernels.for_device(device).measure(
                [tensors[i] for i in indices], order=order, detail=detail
            ),
            home,
        )
        for device, indices in places.items()
    ]
    order_of_parts = [i for indices in places.values() for i in indices]
    merged = _merged(parts, order_of_parts, home=home, detail=detail)
    return summarize(merged, order=order, double=double)


def summarize(statistics: Statistics, *, order: float, double: bool) -> Measurement:
    """The Measurement of tensors whose statistics are known; `double` if one is float64."""
    norms = statistics.norms
    if order == 2.0 and not double and norms.dtype is torch.float64:
        # The square of a float32 norm is far from the ends of float64, so the sum needs no care,
        # and it is finite just when every element is. 8 small operations instead of 20.
        norm = rounded(torch.linalg.vector_norm(norms))
        nonfinite = torch.logical_not(norm < math.inf).to(torch.float32)
    else:
        norm = rounded(total_norm(norms, order), double=double)
        nonfinite = ((statistics.nan + statistics.inf).sum() > 0).to(torch.float32)
    return Measurement(
        order=order, tensors=statistics, norm=norm, nonfinite=nonfinite, double=double
    )


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
    order = torch.tensor(sorted(range(len(places)), key=places.__getitem__), device=home)

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


class Look(NamedTuple):
    """What one pass over gradients found of NaN and Inf, device by device."""

    flags: dict[torch.device, Tensor]
    """float32, 0-d each: exactly 1 if an element is NaN or Inf, else exactly 0."""
    places: list[int]
    """The places of the gradients in the order in which `counted` counts them."""
    counted: list[Callable[[], NonFinite]]
    """For each device, what counts NaN and Inf gradient by gradient."""


def look(gradients: Gradients, multiplier: Tensor | None) -> Look:
    """Multiplies the gradients in place, and says which hold NaN or Inf; nothing waits.

    Args:
        gradients: may be none.
        multiplier: 0-d; None to look without multiplying.
    """
    if isinstance(gradients, AddressedGradients):
        settle = _settling()
        factor = None if multiplier is None else moved(multiplier, gradients.device)
        try:
            flag, counted = settle.look(gradients, factor)
        except kernels.KernelFailed:  # The user has been warned, and nothing has been written.
            pass
        else:
            places = list(range(len(gradients.tensors)))
            return Look({gradients.device: flag}, places, [counted])
    flags: dict[torch.device, Tensor] = {}
    every: list[int] = []
    counts: list[Callable[[], NonFinite]] = []
    for device, places in kernels.by_device(gradients.tensors).items():
        tensors = [gradients.tensors[place] for place in places]
        factor = None if multiplier is None else moved(multiplier, device)
        found = kernels.for_device(device).multiply_and_check_(tensors, factor)
        flags[device] = (found.nan + found.inf).any().to(torch.float32)
        every += places
        counts.append(_returning(found))
    return Look(flags, every, counts)


def norm_and_coefficient(
    gradients: AddressedGradients, bound: float, order: float
) -> tuple[Tensor, Tensor] | None:
    """The norm, and what bounds it, in two launches; None if the kernels cannot do it."""
    if order not in kernels.ORDERS:
        return None
    try:
        found: tuple[Tensor, Tensor] = _settling().limit(gradients, bound, order)
    except kernels.KernelFailed:  # The user has been warned, and nothing has been written.
        return None
    return found


def multiply_(gradients: Gradients, factor: Tensor) -> None:
    """Multiplies every gradient in place, one that several parameters share only once."""
    if isinstance(gradients, AddressedGradients):
        try:
            _settling().multiply_(gradients, moved(factor, gradients.device))
        except kernels.KernelFailed:  # The user has been warned, and nothing has been written.
            pass
        else:
            return
    tensors = list({id(tensor): tensor for tensor in gradients.tensors}.values())
    for device, places in kernels.by_device(tensors).items():
        on_device = [tensors[place] for place in places]
        kernels.for_device(device).multiply_(on_device, moved(factor, device))


def _returning(found: NonFinite) -> Callable[[], NonFinite]:
    return lambda: found


def _settling() -> Any:
    """The kernels that settle, which only a device with Triton can import."""
    return importlib.import_module("gradilocks.kernels.triton_settle")
