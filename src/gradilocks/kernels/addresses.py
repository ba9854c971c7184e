"""Addresses of gradients and parameters, for kernels that find tensors through tables."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels.reference import LOW_ADDRESS, is_dense, without_address
from gradilocks.ranks.layout import is_dtensor, local
from gradilocks.torch_private import local_tensor

EMPTY = 16
"""Address for a tensor without elements: not 0, which means no gradient, so that the step is counted. Never read."""

_dtype_of = attrgetter("dtype")


def _load_reader() -> Callable[..., int] | None:
    """`gl_read_addresses` of the C extension, bound to the functions it calls; None if one of them is missing."""
    try:
        from gradilocks.kernels.cpu import LIBRARY_PATH

        capsule = torch.Tensor.__dlpack_c_exchange_api__
    except (ImportError, AttributeError):
        return None
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    api = get_pointer(capsule, b"dlpack_exchange_api")
    major, minor = (ctypes.c_uint32 * 2).from_address(api)
    if (major, minor >= 3) != (1, True):
        return None
    # DLPackExchangeAPI: version, prev_api, three functions, dltensor_from_py_object_no_sync.
    read_tensor = (ctypes.c_void_p * 6).from_address(api)[5]
    get_item = ctypes.cast(ctypes.pythonapi.PyList_GetItem, ctypes.c_void_p)
    function = ctypes.PyDLL(str(LIBRARY_PATH)).gl_read_addresses
    pointer, tensors = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int64)
    function.argtypes = [pointer, pointer, ctypes.py_object, *[pointer] * 3, ctypes.c_int, *tensors]
    return partial(function, get_item, read_tensor, None)


_read_addresses = _load_reader()


def _never_read(*_: Any) -> int:
    return -1


class AddressReader:
    """Reads the addresses of tensors that have the device, dtype, shape, strides and placements of the parameters.

    148 addresses take 5 us in the C extension and 100 us without it.

    Args:
        params: plain tensors or DTensors.

    Attributes:
        sizes: number of elements of each parameter on this rank.
        dtypes: their dtypes.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        tensors = [local(param) for param in params]
        self.sizes = tuple(map(Tensor.numel, tensors))
        self.dtypes = list(map(_dtype_of, tensors))
        self._total_sizes = list(map(Tensor.numel, params))
        self._placements = list(map(_placements_of, params)) if any(map(is_dtensor, params)) else None
        self._are_dense = all(map(is_dense, tensors))
        self._single = [i for i, size in enumerate(self._total_sizes) if size == 1]
        self._layouts = list(map(_layout_of, tensors))
        self._addresses = array("q", bytes(8 * len(tensors)))
        begins = array("q", [0])
        for tensor in tensors:
            begins.append(begins[-1] + 2 + 2 * tensor.dim())
        numbers = array("q", bytes(8 * begins[-1]))
        self._buffers = (numbers, begins, self._addresses)
        self._read_natively: Callable[..., int] = _never_read
        if _read_addresses is not None and self._are_dense:
            read = partial(_read_addresses, *[buffer.buffer_info()[0] for buffer in self._buffers])
            with suppress(RuntimeError, BufferError):  # Wrapper subclasses of Tensor have no memory of their own.
                if read(1, tensors, len(tensors)) == 0:
                    self._read_natively = partial(read, 0)

    def read(self, tensors: list[Any]) -> array[int] | None:
        """The address of each tensor: 0 for None, `EMPTY` for one without elements.

        Returns:
            An array that the next call overwrites; None if a tensor is laid out differently than its parameter, or if a
            parameter is not dense.

        Raises:
            RuntimeError: if the storage of a tensor was freed.
        """
        if not self._are_dense:
            return None
        # Autograd may store a lazy negation, whose memory has the other sign, only for a single element: others are
        # copied into the layout of the parameter.
        if any(tensors[i] is not None and tensors[i].is_neg() for i in self._single):
            return None
        if self._placements is not None:
            pairs = list(zip(tensors, self._placements, strict=True))
            if any(tensor is not None and _placements_of(tensor) != placements for tensor, placements in pairs):
                return None
            tensors = [tensor if tensor is None or p is None else local_tensor(tensor) for tensor, p in pairs]
        with suppress(RuntimeError, BufferError):  # Sparse, or without memory of its own.
            if self._read_natively(tensors, len(tensors)) == 0:
                return self._addresses
        return self._addresses if self._read_in_python(tensors) else None

    def read_gradients(self, grads: list[Any]) -> array[int] | None:
        """`read` for gradients.

        Raises:
            RuntimeError: also if a gradient has not as many elements as its parameter.
        """
        addresses = self.read(grads)
        if addresses is None:
            for grad, size in zip(grads, self._total_sizes, strict=True):
                if grad is not None and grad.numel() != size:
                    raise RuntimeError(
                        f"a gradient has {grad.numel()} elements and its parameter {size}, as after "
                        "`grad.data = ...`. Assign to param.grad instead."
                    )
        return addresses

    def _read_in_python(self, tensors: list[Any]) -> bool:
        for i, (tensor, layout) in enumerate(zip(tensors, self._layouts, strict=True)):
            if tensor is None:
                self._addresses[i] = 0
                continue
            if tensor.layout is not torch.strided or _layout_of(tensor) != layout:
                return False
            address = tensor.data_ptr()
            if address < LOW_ADDRESS and without_address([tensor], [address]):
                return False
            self._addresses[i] = address if tensor.numel() else EMPTY
        return True


def _placements_of(tensor: Any) -> Any:
    """The placements of a DTensor; None for a plain tensor."""
    return getattr(tensor, "placements", None)


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    # Strides of dimensions of size 1 do not matter.
    return tensor.device, tensor.dtype, tensor.shape, "contiguous" if tensor.is_contiguous() else tensor.stride()
