"""Kernels over lists of tensors: measure, multiply, clamp, unscale.

All tensors of a call are on one device, real and floating point, of any strides, possibly empty; there is at least one.
`BACKENDS` chooses the implementation by device type:

    cpu     kernels/cpu.py        the C extension, if it was compiled
    cuda    kernels/cuda.py       Triton, if it is installed and its kernels compile
    others  kernels/reference.py  plain torch; also used if the extension or Triton is missing

A backend is loaded at the first call with a tensor of its device type. A test that sets TRITON_INTERPRET=1 runs the
Triton kernels on CPU tensors with `BACKENDS["cpu"] = gradilocks.kernels.cuda`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from gradilocks.kernels import reference
from gradilocks.kernels.reference import STATISTICS, total_norm

__all__ = [
    "BACKENDS",
    "STATISTICS",
    "Backend",
    "backend_for",
    "clamp_",
    "describe",
    "has_recorded_step",
    "measure",
    "multiply_",
    "norm",
    "total_norm",
    "unscale_",
]


class Backend(Protocol):
    """The functions of a backend module."""

    def measure(self, tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = True) -> Tensor: ...
    def norm(self, tensors: Sequence[Tensor], order: float) -> Tensor | float: ...
    def multiply_(self, tensors: Sequence[Tensor], factor: Tensor | float) -> None: ...
    def clamp_(self, tensors: Sequence[Tensor], bound: Tensor) -> None: ...
    def unscale_(self, tensors: Sequence[Tensor], inverse_scale: Tensor) -> Tensor: ...


BACKENDS: dict[str, Backend | None] = {}
"""Backend module by device type. Absent: not loaded yet. None: plain torch."""

_MODULES = {"cpu": "gradilocks.kernels.cpu", "cuda": "gradilocks.kernels.cuda"}
_failures: dict[str, str] = {}


def backend_for(device_type: str) -> Backend:
    """Returns the backend for tensors on `device_type`, loading it if necessary."""
    if device_type not in BACKENDS:
        BACKENDS[device_type] = _load(device_type)
    return BACKENDS[device_type] or reference


def has_recorded_step(device_type: str) -> bool:
    """True if the backend of `device_type` is Triton, whose kernels `recorded_step.RecordedStep` replays."""
    return backend_for(device_type) is sys.modules.get("gradilocks.kernels.cuda")


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = True) -> Tensor:
    """Computes the statistics of each tensor in one read, without synchronizing the device.

    Args:
        tensors: at least one.
        order: p of the norm: any float above 0, or inf.
        detail: False if the rows "largest" and "zeros" are not needed. Plain torch then saves a pass or two over the
            tensors and fills these rows with NaN; the other backends always compute them.

    Returns:
        float64 [5, n] on the tensors' device (float32 where the device has no float64), one row for each of
        `STATISTICS`. norm: accumulated in float64; NaN if the tensor contains NaN, else inf if it contains Inf.
        largest: largest magnitude, NaN ignored. zeros, nan, inf: number of such elements.
    """
    return backend_for(tensors[0].device.type).measure(tensors, order=order, detail=detail)


def norm(tensors: Sequence[Tensor], order: float) -> Tensor | float:
    """Computes the norm of all tensors together in one read, without synchronizing the device.

    Args:
        tensors: at least one.
        order: p of the norm: any float above 0, or inf.

    Returns:
        A float for CPU tensors, otherwise 0-d float64 on their device. NaN if an element is NaN, else inf if one is
        Inf.
    """
    return backend_for(tensors[0].device.type).norm(tensors, order)


def multiply_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiplies tensors in place. The product is formed in float32 (float64 for float64) and rounded once.

    Args:
        tensors: at least one.
        factor: float64 or float32 on the same device; 0-d, or 1-d with one entry per tensor. A float for CPU tensors.
            1 changes no bit, and on a CPU writes nothing.
    """
    backend_for(tensors[0].device.type).multiply_(tensors, factor)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """Clamps elements to [-bound, bound] in place. NaN stays NaN.

    Args:
        tensors: at least one.
        bound: 0-d float64 on the same device, not negative. A bound above a dtype's largest finite number leaves
            tensors of that dtype unchanged.
    """
    backend_for(tensors[0].device.type).clamp_(tensors, bound)


def unscale_(tensors: Sequence[Tensor], inverse_scale: Tensor) -> Tensor:
    """Multiplies tensors in place and checks the products, in one pass.

    Args:
        tensors: at least one.
        inverse_scale: 0-d float64 or float32 on the same device.

    Returns:
        float32, 0-d: exactly 1 if an element is NaN or Inf after the multiplication, else exactly 0.
    """
    return backend_for(tensors[0].device.type).unscale_(tensors, inverse_scale)


def describe() -> dict[str, str]:
    """Returns the implementation for "cpu" and "cuda", with the reason if it is plain torch."""
    lines = {}
    for device_type in _MODULES:
        backend = backend_for(device_type)
        if backend is reference:
            lines[device_type] = f"plain torch: {_failures.get(device_type, 'selected in kernels.BACKENDS')}"
        else:
            lines[device_type] = getattr(backend, "DESCRIPTION", str(backend))
    return lines


def _load(device_type: str) -> Backend | None:
    if device_type not in _MODULES:
        return None
    if device_type == "cuda" and not torch.cuda.is_available():
        _failures[device_type] = "no CUDA device"
        return None
    try:
        backend: Backend = import_module(_MODULES[device_type])
        # Compiles the kernel. Triton needs a C compiler at run time, which small containers lack.
        backend.measure([torch.ones(3, device=device_type)])
    except Exception as error:
        _failures[device_type] = f"{type(error).__name__}: {error}"
        return None
    return backend
