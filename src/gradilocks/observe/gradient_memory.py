"""Parameters enter; where their gradients lie at this moment leaves, to know them again later.

A gradient is known by its storage and where it begins in it. A storage is held weakly: its memory
goes when the script lets it go, and with a weak reference to the gradient itself
`torch.utils.swap_tensors` would refuse it. Asked several times at every step of a watched script,
so without a loop in Python where the native library is there: 400 gradients take 0.01 ms, and 0.3
without it, in which Python's garbage collector runs besides.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from gradilocks._torch import version
from gradilocks.kernels import native
from gradilocks.lab.tensors import storage_of

__all__ = ["REPLACED", "WRITTEN", "GradientMemory", "memory_of"]

WRITTEN, REPLACED = 1, 2
"""How `GradientMemory.changes` tells what became of a gradient."""


class GradientMemory(Protocol):
    """Where the gradients of parameters lay at one moment: a row for each parameter."""

    def holds(self, params: Sequence[Tensor], /) -> bool:
        """Whether the gradients of `params` lie, one by one, where those were."""

    def rows_of(self, params: Sequence[Tensor], /) -> list[int]:
        """Of each of `params` the row whose gradient lay where its own lies; -1: none."""

    def changes(self, params: Sequence[Tensor], rows: Sequence[int], /) -> bytes:
        """Of each of `params` a byte: 0 if its gradient is in the storage in which that of this row
        was and nobody has written to it, else WRITTEN or REPLACED; REPLACED too if there is no such
        row."""

    def is_gone(self) -> bool:
        """Whether nobody uses that memory any more."""


def memory_of(params: Sequence[Tensor]) -> GradientMemory:
    """Where the gradients of `params` lie now."""
    library = native.library()
    made: GradientMemory = (_Memory if library is None else library.GradientMemory)(params)
    return made


class _Memory:
    """The same in Python."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        now = [_place_of(param) for param in params]
        self._storages = [None if each is None else weakref.ref(each[0]) for each in now]
        self._offsets = [0 if each is None else each[1] for each in now]
        self._versions = [0 if each is None else each[2] for each in now]
        self._rows: dict[tuple[int, int], int] | None = None

    def _is_at(self, row: int, place: tuple[Any, int, int] | None) -> bool:
        find = self._storages[row]
        if find is None or place is None:
            return find is None and place is None
        return find() is place[0] and self._offsets[row] == place[1]

    def holds(self, params: Sequence[Tensor], /) -> bool:
        return len(params) == len(self._storages) and all(
            self._is_at(row, _place_of(param)) for row, param in enumerate(params)
        )

    def rows_of(self, params: Sequence[Tensor], /) -> list[int]:
        if self._rows is None:
            self._rows = {
                (id(storage), self._offsets[row]): row
                for row, find in enumerate(self._storages)
                if find is not None and (storage := find()) is not None
            }
        rows = []
        for place in map(_place_of, params):
            row = -1 if place is None else self._rows.get((id(place[0]), place[1]), -1)
            # Python gives the id of a storage that is gone to another.
            rows.append(row if row >= 0 and self._is_at(row, place) else -1)
        return rows

    def changes(self, params: Sequence[Tensor], rows: Sequence[int], /) -> bytes:
        told = []
        for param, row in zip(params, rows, strict=True):
            place = _place_of(param)
            find = self._storages[row] if 0 <= row < len(self._storages) else None
            if place is None or find is None:
                had_none = 0 <= row < len(self._storages) and find is None
                told.append(0 if place is None and had_none else REPLACED)
            elif find() is not place[0]:
                told.append(REPLACED)
            else:
                told.append(WRITTEN if self._versions[row] != place[2] else 0)
        return bytes(told)

    def is_gone(self) -> bool:
        return all(find is None or find() is None for find in self._storages)


def _place_of(param: Tensor) -> tuple[Any, int, int] | None:
    """The storage of a gradient, where it begins in it, and how often it was written to."""
    gradient = param.grad
    if gradient is None:
        return None
    storage = storage_of(gradient)
    is_dense = storage is not gradient and not gradient.is_sparse
    offset = int(gradient.storage_offset()) if is_dense else 0
    return storage, offset, 0 if gradient.is_inference() else version(gradient)
