"""A list of tensors as the kernels see it: which of them they can take, and where each one is."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks.kernels import pieces
from gradilocks.kernels.table import Layout, layout_for

__all__ = ["CHUNK", "DTYPES", "ORDERS", "Located", "all_aligned", "kinds_of", "locate", "placed"]

CHUNK = 1 << 15
"""Elements a program: 0.98 ms at 2^15, 1.03 at 2^14, 0.99 at 2^16 (1.1 B float32, H200)."""
MOST_CHUNKS = 36_000
"""Measuring needs 28 bytes of scratch a chunk: a megabyte in all, however large the model."""
MOST_TO_CHANGE = 1 << 19
"""Writing needs no scratch, only the table of 8 bytes a chunk."""
DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
ORDERS = frozenset((2.0, 1.0, math.inf))
"""The p of the norms that the kernels can measure."""


class Located(NamedTuple):
    """Where the tensors of one device are."""

    device: torch.device
    layout: Layout
    pointers: Tensor
    """int64: the address of each tensor, on the device."""
    rest: tuple[int, ...]
    """The places of those tensors that the kernels cannot take."""


def locate(tensors: Sequence[Tensor], *, chunk: int | None = None) -> Located:
    """Finds the tensors, all on one device, and sends their addresses there; nothing waits."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    sizes = tuple([tensor.numel() for tensor in tensors])
    kinds = kinds_of(tensors, addresses)
    return placed(sizes, kinds, addresses, tensors[0].device, chunk=chunk)


def placed(
    sizes: tuple[int, ...],
    kinds: tuple[tuple[torch.dtype, int] | None, ...],
    addresses: list[int],
    device: torch.device,
    *,
    chunk: int | None = None,
) -> Located:
    """Tensors of these sizes and kinds at these addresses.

    Args:
        sizes, kinds, addresses: tensor by tensor.
        device: of all of them.
        chunk: elements a program; by default what is best for measuring.
    """
    most = MOST_CHUNKS if chunk is None else MOST_TO_CHANGE
    layout = layout_for(sizes, kinds, CHUNK if chunk is None else chunk, most, device)
    rest = tuple([place for place, kind in enumerate(kinds) if kind is None])
    return Located(device, layout, layout.point_at(addresses), rest)


# The lowest byte of an address says whether it is aligned to 16 bytes.
_LOWEST = 0 if sys.byteorder == "little" else 7
_ALIGNED = bytes(range(0, 256, 16))


def all_aligned(addresses: array[int]) -> bool:
    """Whether every address is a multiple of 16."""
    return not addresses.tobytes()[_LOWEST::8].translate(None, _ALIGNED)


def kinds_of(
    tensors: Sequence[Tensor], addresses: Sequence[int]
) -> tuple[tuple[torch.dtype, int] | None, ...]:
    """Dtype and alignment in bytes of each tensor; None for one that the kernels cannot take."""
    return tuple(
        [
            (tensor.dtype, 16 if address % 16 == 0 else tensor.element_size())
            if tensor.dtype in DTYPES and (tensor.is_contiguous() or pieces.is_dense(tensor))
            else None
            for tensor, address in zip(tensors, addresses, strict=True)
        ]
    )
