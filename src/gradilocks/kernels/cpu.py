"""The kernels for float32 tensors on a CPU: ctypes over the C extension in kernels/native.

Importing this module fails if the extension was not compiled. Other dtypes, tensors that are not dense, and orders
other than 1, 2 and inf are left to `reference`. The extension gets addresses, so callers keep the tensors alive. It
runs on the threads of the OpenMP library that torch has loaded; results do not depend on their number.
"""

from __future__ import annotations

import ctypes
import math
import os
from array import array
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradilocks.kernels import reference

TYPES = (torch.float32,)
"""Dtypes of the kernels."""

_ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}
_MULTIPLY, _CLAMP, _UNSCALE = range(3)
_TOTALS = 4
_dtype_of = attrgetter("dtype")


def _find_library() -> Path:
    paths = [Path(__file__).with_name("_native" + suffix) for suffix in EXTENSION_SUFFIXES]
    path = next(filter(Path.exists, paths), None)
    if path is None:
        raise ImportError("the C extension was not compiled; install with a C++ compiler to get it")
    return path


def _load_library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY_PATH))
    pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.gl_measure.argtypes = [pointer, pointer, count, number, pointer, number]
    library.gl_change.argtypes = [pointer, pointer, count, number, pointer, number, number]
    library.gl_step.argtypes = [number, pointer, count, *[pointer] * 3, ctypes.c_double, number]
    library.gl_set_parallel.argtypes = [pointer, pointer, pointer]
    return library


def _use_torch_threads() -> bool:
    """Passes torch's OpenMP functions to the extension; False if they cannot be found (macOS)."""
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        # Symbols are also looked up in the libraries that this one depends on, such as torch's own libgomp.
        torch_library = ctypes.CDLL(str(path))
        functions = [torch_library[name] for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")]
    except (OSError, AttributeError):
        return False
    _library.gl_set_parallel(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    if hasattr(os, "register_at_fork"):
        # A forked process does not have the threads of the pool, and libgomp would wait for them forever.
        os.register_at_fork(after_in_child=lambda: _library.gl_set_parallel(None, None, None))
    return True


LIBRARY_PATH = _find_library()
_library = _load_library()
DESCRIPTION = "C extension on torch's OpenMP threads" if _use_torch_threads() else "C extension on one thread"
"""For `kernels.describe`."""


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = True) -> Tensor:
    """See `gradilocks.kernels.measure`."""
    if order not in _ORDERS:
        return reference.measure(tensors, order=order, detail=detail)
    addresses, sizes, unsupported = _read(tensors)
    table = measure_at(addresses, sizes, order)
    statistics = torch.frombuffer(table, dtype=torch.float64)[:-_TOTALS].view(5, -1)
    if unsupported:
        statistics[:, unsupported] = reference.measure([tensors[i] for i in unsupported], order=order)
    return statistics


def norm(tensors: Sequence[Tensor], order: float) -> float:
    """See `gradilocks.kernels.norm`."""
    if order in _ORDERS:
        addresses, sizes, unsupported = _read(tensors)
        if not unsupported:
            return measure_at(addresses, sizes, order)[-_TOTALS]
    return reference.total_norm_on_host(measure(tensors, order=order, detail=False)[0].tolist(), order)


def multiply_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """See `gradilocks.kernels.multiply_`."""
    numbers: Any = factor.tolist() if isinstance(factor, Tensor) else factor
    per_tensor = isinstance(numbers, list)
    factors = array("d", numbers if per_tensor else [numbers])
    if not per_tensor and factors[0] == 1.0:
        return
    addresses, sizes, unsupported = _read(tensors)
    _call(_library.gl_change, addresses, sizes, _MULTIPLY, factors.buffer_info()[0], int(per_tensor))
    for index in unsupported:
        reference.multiply_([tensors[index]], factors[index if per_tensor else 0])
    if per_tensor:
        tensors = [tensor for tensor, own in zip(tensors, factors, strict=True) if own != 1.0]
    increment_version(tensors)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """See `gradilocks.kernels.clamp_`."""
    bound = bound.to(torch.float64)
    if bound.item() == math.inf:
        return
    addresses, sizes, unsupported = _read(tensors)
    _call(_library.gl_change, addresses, sizes, _CLAMP, bound.data_ptr(), 0)
    if unsupported:
        reference.clamp_([tensors[i] for i in unsupported], bound)
    increment_version(tensors)


def unscale_(tensors: Sequence[Tensor], inverse_scale: Tensor) -> Tensor:
    """See `gradilocks.kernels.unscale_`."""
    factor = inverse_scale.to(torch.float64)
    addresses, sizes, unsupported = _read(tensors)
    found = _call(_library.gl_change, addresses, sizes, _UNSCALE, factor.data_ptr(), 0)
    nonfinite = torch.tensor(float(found), dtype=torch.float32, device="cpu")
    if unsupported:
        nonfinite = torch.maximum(nonfinite, reference.unscale_([tensors[i] for i in unsupported], factor))
    if factor.item() != 1.0:
        increment_version(tensors)
    return nonfinite


def step(is_adam: bool, table: Tensor, sizes: Tensor, groups: Tensor, settings: Tensor, divisor: float) -> None:
    """Steps Adam and AdamW, or SGD, in place: parameters, moments and step counts, or momentum buffers.

    Args:
        is_adam: False for SGD.
        table: int64 [6, n], contiguous: addresses of gradient, parameter, step count, exp_avg, exp_avg_sq; the last row
            is not used. 0 is absent; a parameter without gradient is left unchanged. SGD has its momentum buffer in the
            fourth row, which starts as zeros and is required where momentum is not 0.
        sizes: int64 [n]: numbers of elements. All tensors of a column are dense with the same strides.
        groups: int32 [n]: row of `settings` for each parameter.
        settings: float64 [g, 8]: lr and weight_decay, then beta1, beta2, eps and 1 for decoupled weight decay (AdamW)
            else 0, or momentum and 1 for Nesterov momentum else 0.
        divisor: divides the gradients.
    """
    pointers = [tensor.data_ptr() for tensor in (sizes, groups, settings)]
    threads = torch.get_num_threads()
    if _library.gl_step(is_adam, table.data_ptr(), len(sizes), *pointers, divisor, threads):
        raise MemoryError("gl_step could not allocate its buffer")


def measure_at(addresses: array[int], sizes: array[int], order: float) -> array[float]:
    """Measures float32 tensors at the given addresses; address 0 leaves a tensor out.

    Returns:
        The five statistics of each tensor, row by row, then norm, largest magnitude and number of NaN and of Inf of
        all tensors together. An array: a tensor takes five times as long to create.
    """
    table = array("d", bytes(8 * (5 * len(sizes) + _TOTALS)))
    if _call(_library.gl_measure, addresses, sizes, _ORDERS[order], table.buffer_info()[0]):
        raise MemoryError("gl_measure could not allocate its buffer")
    return table


def _call(function: Callable[..., int], addresses: array[int], sizes: array[int], *rest: Any) -> int:
    """Calls a kernel with torch's number of threads."""
    pointers = addresses.buffer_info()[0], sizes.buffer_info()[0]
    return function(*pointers, len(sizes), *rest, torch.get_num_threads())


def _read(tensors: Sequence[Tensor]) -> tuple[array[int], array[int], list[int]]:
    """Addresses, sizes, and indices of tensors that only `reference` can process, whose address is set to 0."""
    # One loop in C per property takes 50 us for 148 tensors, comprehensions take 54 us.
    addresses = list(map(Tensor.data_ptr, tensors))
    unsupported: set[int] = set()
    if set(map(_dtype_of, tensors)) != {torch.float32}:
        unsupported.update(i for i, tensor in enumerate(tensors) if tensor.dtype not in TYPES)
    if not all(map(Tensor.is_contiguous, tensors)):
        unsupported.update(i for i, tensor in enumerate(tensors) if not reference.is_dense(tensor))
    if min(addresses) < reference.LOW_ADDRESS:
        unsupported.update(reference.without_address(tensors, addresses))
    for index in unsupported:
        addresses[index] = 0
    return array("q", addresses), array("q", map(Tensor.numel, tensors)), sorted(unsupported)
