"""The kernels for CPU tensors: ctypes over the C extension in kernels/native.

Importing this module fails if the extension was not compiled. float64 tensors, tensors that are not dense, and orders
other than 1, 2 and inf are left to `reference`. The extension gets addresses, so callers keep the tensors alive. It
runs on the threads of the OpenMP library that torch has loaded; results do not depend on their number.
"""

from __future__ import annotations

import ctypes
import math
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradilocks.kernels import reference

__all__ = [
    "DESCRIPTION",
    "DTYPE_CODES",
    "AddressTable",
    "adam",
    "clamp_",
    "measure",
    "multiply_",
    "norm",
    "sgd",
    "unscale_",
]

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Codes of element types, as in kernels/native/elements.h."""

_ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}
_MULTIPLY, _CLAMP, _UNSCALE = range(3)
_TOTALS = 4
_dtype_of = attrgetter("dtype")


def _load_library() -> ctypes.CDLL:
    paths = [Path(__file__).with_name("_native" + suffix) for suffix in EXTENSION_SUFFIXES]
    path = next(filter(Path.exists, paths), None)
    if path is None:
        raise ImportError("the C extension was not compiled; install with a C++ compiler to get it")
    library = ctypes.CDLL(str(path))
    pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.gl_measure.argtypes = [pointer, pointer, pointer, count, number, pointer, number]
    library.gl_change.argtypes = [pointer, pointer, pointer, count, number, pointer, number, number]
    library.gl_step.argtypes = [number, pointer, count, *[pointer] * 4, ctypes.c_double, number]
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


_library = _load_library()
DESCRIPTION = "C extension on torch's OpenMP threads" if _use_torch_threads() else "C extension on one thread"
"""For `kernels.describe`."""


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = True) -> Tensor:
    """See `gradilocks.kernels.measure`."""
    if order not in _ORDERS:
        return reference.measure(tensors, order=order, detail=detail)
    addresses = _Addresses(tensors)
    table = addresses.measure(order)
    statistics = torch.frombuffer(table, dtype=torch.float64)[:-_TOTALS].view(5, -1)
    if addresses.unsupported:
        statistics[:, addresses.unsupported] = reference.measure(
            [tensors[i] for i in addresses.unsupported], order=order
        )
    return statistics


def norm(tensors: Sequence[Tensor], order: float) -> float:
    """See `gradilocks.kernels.norm`."""
    if order in _ORDERS:
        addresses = _Addresses(tensors)
        if not addresses.unsupported:
            return addresses.measure(order)[-_TOTALS]
    return reference.total_norm_on_host(measure(tensors, order=order, detail=False)[0].tolist(), order)


def multiply_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """See `gradilocks.kernels.multiply_`."""
    numbers: Any = factor.tolist() if isinstance(factor, Tensor) else factor
    per_tensor = isinstance(numbers, list)
    factors = array("d", numbers if per_tensor else [numbers])
    if not per_tensor and factors[0] == 1.0:
        return
    addresses = _Addresses(tensors)
    addresses.call(_library.gl_change, _MULTIPLY, factors.buffer_info()[0], int(per_tensor))
    for index in addresses.unsupported:
        reference.multiply_([tensors[index]], factors[index if per_tensor else 0])
    if per_tensor:
        tensors = [tensor for tensor, own in zip(tensors, factors, strict=True) if own != 1.0]
    increment_version(tensors)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """See `gradilocks.kernels.clamp_`."""
    bound = bound.to(torch.float64)
    if bound.item() == math.inf:
        return
    addresses = _Addresses(tensors)
    addresses.call(_library.gl_change, _CLAMP, bound.data_ptr(), 0)
    if addresses.unsupported:
        reference.clamp_([tensors[i] for i in addresses.unsupported], bound)
    increment_version(tensors)


def unscale_(tensors: Sequence[Tensor], inverse_scale: Tensor) -> Tensor:
    """See `gradilocks.kernels.unscale_`."""
    factor = inverse_scale.to(torch.float64)
    addresses = _Addresses(tensors)
    found = addresses.call(_library.gl_change, _UNSCALE, factor.data_ptr(), 0)
    nonfinite = torch.tensor(float(found), dtype=torch.float32, device="cpu")
    if addresses.unsupported:
        nonfinite = torch.maximum(nonfinite, reference.unscale_([tensors[i] for i in addresses.unsupported], factor))
    if factor.item() != 1.0:
        increment_version(tensors)
    return nonfinite


def adam(table: Tensor, sizes: Tensor, kinds: Tensor, groups: Tensor, settings: Tensor, divisor: float) -> None:
    """Steps Adam or AdamW in place: parameters, moments, master copies and step counts.

    Args:
        table: int64 [6, n], contiguous: addresses of gradient, parameter, step count (float32), exp_avg, exp_avg_sq
            and float32 master copy. 0 is absent; a parameter without gradient is left unchanged.
        sizes: int64 [n]: number of elements of each. All tensors of a column are dense with the same strides.
        kinds: int32 [n]: `DTYPE_CODES` of parameter | gradient << 3 | state << 6.
        groups: int32 [n]: row of `settings` for each parameter.
        settings: float64 [g, 8]: lr, weight_decay, beta1, beta2, eps, 1 for decoupled weight decay (AdamW) else 0.
        divisor: divides the gradients.
    """
    _step(1, table, sizes, kinds, groups, settings, divisor)


def sgd(table: Tensor, sizes: Tensor, kinds: Tensor, groups: Tensor, settings: Tensor, divisor: float) -> None:
    """Steps SGD in place: parameters, momentum buffers and master copies.

    Args:
        table: as for `adam`; the third and fifth row are not used, the fourth is the momentum buffer, which starts as
            zeros. It is required where momentum is not 0.
        sizes, kinds, groups, divisor: as for `adam`.
        settings: float64 [g, 8]: lr, weight_decay, momentum, 1 for Nesterov momentum else 0.
    """
    _step(0, table, sizes, kinds, groups, settings, divisor)


def _step(is_adam: int, table: Tensor, sizes: Tensor, *rest: Any) -> None:
    *tensors, divisor = rest
    pointers = [tensor.data_ptr() for tensor in tensors]
    threads = torch.get_num_threads()
    if _library.gl_step(is_adam, table.data_ptr(), len(sizes), sizes.data_ptr(), *pointers, divisor, threads):
        raise MemoryError("gl_step could not allocate its buffer")


class AddressTable:
    """Addresses, sizes and dtypes of tensors in arrays that C can read.

    Args:
        sizes: number of elements of each tensor.
        codes: its `DTYPE_CODES`.
        addresses: its address; 0 leaves a tensor out. May be set later by `measure`.
    """

    def __init__(self, sizes: Iterable[int], codes: Iterable[int], addresses: Sequence[int] = ()) -> None:
        self._sizes, self._codes = array("q", sizes), array("i", codes)
        self._addresses = array("q", addresses or bytes(8 * len(self._sizes)))
        self._pointers = [numbers.buffer_info()[0] for numbers in (self._addresses, self._sizes, self._codes)]

    def measure(self, order: float, addresses: list[int] | None = None) -> array[float]:
        """Measures the tensors, at new addresses if given.

        Returns:
            The five statistics of each tensor, row by row, then norm, largest magnitude and number of NaN and of Inf of
            all tensors together. An array: a tensor takes five times as long to create.
        """
        if addresses is not None:
            self._addresses[:] = array("q", addresses)
        table = array("d", bytes(8 * (5 * len(self._sizes) + _TOTALS)))
        if self.call(_library.gl_measure, _ORDERS[order], table.buffer_info()[0]):
            raise MemoryError("gl_measure could not allocate its buffer")
        return table

    def call(self, function: Callable[..., int], *rest: Any) -> int:
        """Calls a kernel on the tensors, with torch's number of threads."""
        return function(*self._pointers, len(self._sizes), *rest, torch.get_num_threads())


class _Addresses(AddressTable):
    """The AddressTable of some tensors.

    Attributes:
        unsupported: indices of tensors that only `reference` can process. Their address is 0, so the kernels skip them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # One loop in C per property takes 50 us for 148 tensors, comprehensions take 54 us.
        addresses = list(map(Tensor.data_ptr, tensors))
        codes: list[Any] = list(map(DTYPE_CODES.get, map(_dtype_of, tensors)))
        unsupported: set[int] = set()
        if None in codes:
            unsupported.update(i for i, code in enumerate(codes) if code is None)
        if not all(map(Tensor.is_contiguous, tensors)):
            unsupported.update(i for i, tensor in enumerate(tensors) if not reference.is_dense(tensor))
        if min(addresses) < reference.LOW_ADDRESS:
            unsupported.update(reference.without_address(tensors, addresses))
        self.unsupported = sorted(unsupported)
        for index in self.unsupported:
            addresses[index] = codes[index] = 0
        super().__init__(map(Tensor.numel, tensors), codes, addresses)
