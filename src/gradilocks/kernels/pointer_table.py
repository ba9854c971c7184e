"""Tables in device memory through which the kernels find tensors, their chunks and the optimizers' settings.

A program works on one chunk: a run of elements of one tensor. `Chunks` depends on sizes and dtypes only and is built
once. `PointerTable` holds addresses, which may change with each step; new ones are one small copy from pinned memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

GRAD, PARAM, STEP, STATE1, STATE2, MASTER = range(6)
"""Rows of a PointerTable. STEP is the address of Adam's float32 step count; STATE1 is exp_avg or momentum_buffer,
STATE2 is exp_avg_sq. 0 is absent; a parameter whose GRAD is 0 is skipped."""
SETTINGS = 8
"""Numbers per parameter group. Adam: lr, weight_decay, beta1, beta2, eps, decoupled. SGD: lr, weight_decay, momentum,
nesterov."""
CHECKS_PER_STEP = 2
"""Parameters whose state is checked per step, in turn: checking all takes longer than launching the kernels."""

MEASURE_CHUNK = 1 << 15
"""Elements per program: 0.98 ms at 2^15, 1.03 at 2^14, 0.99 at 2^16 (1.1 B float32, H200)."""
OPTIMIZER_CHUNK = 1 << 12
"""7.44 ms at 2^12, 7.55 at 2^13 (AdamW, 1.1 B float32, H200)."""
MULTIPLY_CHUNK = 1 << 13
_MAX_MEASURE_CHUNKS = 36_000  # 40 bytes of intermediate results each: 1.4 MB, however large the model.
_MAX_CHUNKS = 1 << 19  # 8 bytes each: 4 MB, for up to 2 billion parameters; larger models get larger chunks.


def is_capturing(device: torch.device) -> bool:
    """True while the user captures a CUDA graph on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> torch.cuda.device:
    """Context in which `device` is the current device, on which Triton launches."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def upload(
    numbers: array[int] | array[float],
    device: torch.device,
    *,
    into: Tensor | None = None,
    keep: list[Tensor] | None = None,
) -> Tensor:
    """Copies numbers to the device without a synchronization.

    torch's allocator for pinned memory does not reuse a buffer before its copies are done, so a host that is ahead of
    the device needs no ring of buffers.

    Args:
        numbers: typecode q, d or i.
        device: the target.
        into: overwritten if given; otherwise a new tensor is returned.
        keep: receives the pinned buffer. A copy captured in a CUDA graph reads it at each replay.
    """
    dtype = {"q": torch.int64, "d": torch.float64, "i": torch.int32}[numbers.typecode]
    source = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.zeros(0, dtype=dtype, device="cpu")
    if device.type == "cuda":
        source = torch.empty_like(source, pin_memory=True).copy_(source)
        if keep is not None:
            keep.append(source)
    if into is None:
        into = torch.empty_like(source, device=device, pin_memory=False)
    return into.copy_(source, non_blocking=True)


class OptimizerKind(NamedTuple):
    """Properties that the parameters of one launch of an optimizer kernel have in common."""

    rule: str
    """adam, adamw, momentum or sgd"""
    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    has_master: bool


class Bucket(NamedTuple):
    """The chunks of all tensors of one kind, served by one launch."""

    kind: Any
    first: int
    chunks: int


class Chunks:
    """The division of tensors into chunks, numbered bucket by bucket.

    Args:
        sizes: number of elements of each tensor.
        kinds: key of each tensor's bucket, such as its dtype; None excludes a tensor.
        size: elements per chunk: MEASURE_CHUNK, OPTIMIZER_CHUNK or MULTIPLY_CHUNK. Doubled while there are too many.
        device: of the tables.
        keep: see `upload`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kinds: Sequence[Hashable],
        size: int,
        device: torch.device,
        keep: list[Tensor] | None = None,
    ) -> None:
        limit = _MAX_MEASURE_CHUNKS if size == MEASURE_CHUNK else _MAX_CHUNKS
        while size < max(sizes, default=0) and sum([-(-n // size) for n in sizes]) > limit:
            size *= 2
        members: dict[Hashable, list[int]] = {}
        for i, kind in enumerate(kinds):
            if kind is not None and sizes[i]:
                members.setdefault(kind, []).append(i)
        owner, index = array("i"), array("i")
        first, count = array("i", [0]) * len(sizes), array("i", [0]) * len(sizes)
        buckets: list[Bucket] = []
        for kind, tensors in members.items():
            begin = len(owner)
            for i in tensors:
                first[i], count[i] = len(owner), -(-sizes[i] // size)
                owner.extend(array("i", [i]) * count[i])
                index.extend(range(count[i]))
            buckets.append(Bucket(kind, begin, len(owner) - begin))
        self.size, self.total, self.buckets = size, len(owner), tuple(buckets)
        self.longest = max(count, default=0)
        """Number of chunks of the largest tensor."""
        self.owner = upload(owner, device, keep=keep)
        """int32 [total]: the tensor that each chunk belongs to."""
        self.index = upload(index, device, keep=keep)
        """int32 [total]: index of each chunk within its tensor."""
        self.first = upload(first, device, keep=keep)
        """int32 [n]: the first chunk of each tensor."""
        self.count = upload(count, device, keep=keep)
        """int32 [n]: number of chunks of each tensor."""
        self.sizes = upload(array("q", sizes), device, keep=keep)
        """int64 [n]"""


def chunks_for(
    sizes: Sequence[int], kinds: Sequence[Hashable], size: int, device: torch.device, keep: list[Tensor] | None = None
) -> Chunks:
    """Returns `Chunks(...)`, from a cache unless `keep` is given."""
    if keep is not None:
        return Chunks(sizes, kinds, size, device, keep)
    # The stream is part of the key: another stream would not wait for the copy of the tables.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _cached_chunks(tuple(sizes), tuple(kinds), size, device, stream)


@lru_cache(maxsize=64)
def _cached_chunks(
    sizes: tuple[int, ...], kinds: tuple[Hashable, ...], size: int, device: torch.device, stream: int
) -> Chunks:
    return Chunks(sizes, kinds, size, device)


class PointerTable:
    """Settings of parameter groups and addresses of n parameters with their gradients and state, in device memory.

    Settings and gradients are adjacent, so that one copy refreshes both.

    Args:
        rows: the addresses for PARAM, STEP, STATE1, STATE2 and MASTER.
        groups: number of parameter groups.
        device: of the table.
        is_captured: True if the copies are part of the user's CUDA graph.
    """

    def __init__(
        self, rows: Sequence[Sequence[int]], groups: int, device: torch.device, *, is_captured: bool = False
    ) -> None:
        n = len(rows[0])
        begin = groups * SETTINGS
        numbers = array("q", bytes(8 * (begin + n)))
        for row in rows:
            numbers.extend(row)
        self._device = device
        self._keep: list[Tensor] | None = [] if is_captured else None
        table = upload(numbers, device, keep=self._keep)
        self.settings = table[:begin].view(torch.float64)
        """float64 [groups * SETTINGS]"""
        self.rows = table[begin:].view(6, n)
        """int64 [6, n]"""
        self._changing = table[: begin + n]
        self._addresses: array[int] | None = None
        self._settings: Sequence[float] = ()

    def refresh(self, addresses: array[int], settings: list[float]) -> None:
        """Copies gradient addresses and settings to the device if they have changed.

        While the user captures, the copy is part of the graph and repeated at each replay.
        """
        if self._keep is None and addresses == self._addresses and settings == self._settings:
            return
        numbers = array("q", array("d", settings).tobytes())
        numbers.extend(addresses)
        upload(numbers, self._device, into=self._changing, keep=self._keep)
        self._addresses, self._settings = addresses[:], settings
