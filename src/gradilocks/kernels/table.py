"""Where a multi-tensor kernel finds its tensors: a table of pointers and chunks on the device.

The chunks depend on the tensors' sizes alone and are made once for a set of them. The pointers are
sent again only when they have changed: every step if gradients are set to None, never if they stay.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Table", "table_for"]

_MOST_TABLES = 64


class Table:
    """The chunks of a list of tensors of given sizes, and where those tensors are.

    A chunk is a run of at most `chunk` elements of one tensor; a kernel gets a program a chunk.
    """

    def __init__(self, sizes: Sequence[int], chunk: int, device: torch.device) -> None:
        counts = torch.tensor(
            [-(-size // chunk) for size in sizes], dtype=torch.int64, device="cpu"
        )
        first = torch.zeros(len(sizes) + 1, dtype=torch.int64, device="cpu")
        first[1:] = counts.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
        index = torch.arange(int(first[-1]), device="cpu") - first[owner]
        self.device = device
        self.count = len(sizes)
        self.chunk = chunk
        self.chunks = int(first[-1])
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu").to(device)
        self.owner = owner.to(torch.int32).to(device)
        self.index = index.to(torch.int32).to(device)
        self.first = first.to(torch.int32).to(device)
        self.aligned = False
        self._sent = array("q")
        self._pointers = self.sizes
        self._places: tuple[list[int], Tensor] | None = None

    def point_at(self, pointers: array[int]) -> Tensor:
        """The pointers on the device; sent only if they are not what was sent before."""
        if pointers != self._sent:
            union = 0
            for pointer in pointers:
                union |= pointer
            self.aligned = union % 16 == 0
            # A new tensor each time: a kernel that is still queued may be reading the last one.
            self._pointers = self._upload(pointers)
            self._sent = pointers
        return self._pointers

    def at(self, places: list[int]) -> Tensor:
        """The places of the tensors in the caller's own list, on the device."""
        if self._places is None or self._places[0] != places:
            self._places = places, self._upload(array("q", places))
        return self._places[1]

    def _upload(self, numbers: array[int]) -> Tensor:
        host = torch.frombuffer(numbers, dtype=torch.int64)
        if self.device.type == "cpu":
            return host.clone()
        return host.pin_memory().to(self.device, non_blocking=True)


_tables: dict[tuple[tuple[int, ...], int, torch.device], Table] = {}


def table_for(sizes: tuple[int, ...], chunk: int, device: torch.device) -> Table:
    """The table for tensors of these sizes, made on first use and kept."""
    key = (sizes, chunk, device)
    table = _tables.get(key)
    if table is None:
        if len(_tables) >= _MOST_TABLES:
            _tables.pop(next(iter(_tables)))
        table = _tables[key] = Table(sizes, chunk, device)
    return table
