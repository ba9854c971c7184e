"""Where a multi-tensor kernel finds its tensors: tables of chunks and of pointers on the device.

The chunks depend on the tensors' sizes and kinds alone and are made once for a set of them. The
pointers are sent again only when they have changed: every step if gradients are set to None, never
if they stay. Sending does not wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks._torch import current_stream
from gradilocks.kernels.captured import capturing, keep_if_captured

__all__ = ["Bucket", "Layout", "layout_for", "rules_for", "send", "stream_of"]

_MOST_LAYOUTS = 32
_STAGED = 1 << 15
"""So many bytes the driver takes over before it returns; more is pinned, or it might wait."""


class Bucket(NamedTuple):
    """The chunks of all tensors of one kind, which one launch works on."""

    kind: Hashable
    first: int
    chunks: int


class Layout:
    """The chunks of a list of tensors of given sizes and kinds.

    A chunk is a run of at most `chunk` elements of one tensor; a kernel gets a program a chunk.
    Chunks are numbered bucket by bucket.

    Args:
        sizes: elements of each tensor.
        kinds: what a launch must have in common, tensor by tensor; None leaves a tensor out.
        chunk: elements a chunk, a power of two.
        most: how many chunks there may be, if there are not more tensors than that; a model that
            would have more gets larger ones.
        device: where the tables go.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kinds: Sequence[Hashable],
        chunk: int,
        most: int,
        device: torch.device,
    ) -> None:
        largest = max(sizes, default=0)
        while chunk < largest and sum([-(-size // chunk) for size in sizes]) > most:
            chunk *= 2
        members: dict[Hashable, list[int]] = {}
        for place, kind in enumerate(kinds):
            if kind is not None and sizes[place]:
                members.setdefault(kind, []).append(place)
        counts = torch.zeros(len(sizes), dtype=torch.int64, device="cpu")
        begin = torch.zeros_like(counts)
        owners, indices, buckets, first = [], [], [], 0
        for kind, places in members.items():
            each = torch.tensor([-(-sizes[place] // chunk) for place in places], device="cpu")
            at = torch.tensor(places, device="cpu")
            starts = each.cumsum(0) - each
            counts[at], begin[at] = each, first + starts
            total = int(each.sum())
            owners.append(torch.repeat_interleave(at, each))
            indices.append(
                torch.arange(total, device="cpu") - torch.repeat_interleave(starts, each)
            )
            buckets.append(Bucket(kind, first, total))
            first += total
        nothing = [torch.zeros(0, dtype=torch.int64, device="cpu")]
        self.device = device
        self.count = len(sizes)
        self.chunk = chunk
        self.chunks = first
        self.longest = int(counts.max()) if len(sizes) else 0
        """Chunks of the tensor that has most of them."""
        self.kinds = frozenset(kinds)
        """The kinds that there are, those of empty tensors too."""
        self.buckets = tuple(buckets)
        self.sizes = send(torch.tensor(sizes, dtype=torch.int64, device="cpu"), device)
        self.owner = send(torch.cat(owners or nothing).to(torch.int32), device)
        self.index = send(torch.cat(indices or nothing).to(torch.int32), device)
        self.begin = send(begin.to(torch.int32), device)
        self.counts = send(counts.to(torch.int32), device)
        self.launches: dict[Hashable, list[Any]] = {}
        """What the kernels' users have found out about launching on it."""
        self._sent: tuple[list[int], Tensor] = [], self.sizes

    def point_at(self, addresses: list[int]) -> Tensor:
        """The tensors' addresses on the device; sent only if they are not what was sent before."""
        sent, pointers = self._sent
        if addresses != sent:
            stream = self.device, stream_of(self.device)
            sent, pointers = _latest.get(stream, ([], self.sizes))
            if addresses != sent:
                pointers = send(array("q", addresses), self.device)
            if not capturing():  # What a graph sends is there only when it is replayed.
                _latest[stream] = self._sent = addresses, pointers  # Both at once, for threads.
        keep_if_captured(self, pointers)
        return pointers


def send(numbers: Tensor | array[int], device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on `device`, without waiting for it.

    Always a new tensor: a kernel that is still queued may be reading the last one.
    """
    if isinstance(numbers, array):
        numbers = torch.frombuffer(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return numbers.to(device, copy=True)
    if numbers.numel() == 0:
        return torch.empty_like(numbers, device=device)
    if numbers.nbytes > _STAGED or capturing():
        numbers = numbers.pin_memory()
        keep_if_captured(numbers)  # It is sent again at every replay.
    return numbers.to(device, non_blocking=True)


def stream_of(device: torch.device) -> int | None:
    """The stream on which work for `device` is queued; no other waits for what is sent on it."""
    return None if device.type != "cuda" else current_stream(device.index)


def rules_for(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Settings as a kernel reads them: float64, sent on first use and kept a stream."""
    key = (numbers, device, stream_of(device))
    rules = None if capturing() else _rules.get(key)
    if rules is None:
        rules = send(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)
        if capturing():  # What a graph sends is there only when it is replayed.
            keep_if_captured(rules)
            return rules
        if len(_rules) >= _MOST_LAYOUTS:
            _rules.clear()
        _rules[key] = rules
    return rules


_rules: dict[tuple[object, ...], Tensor] = {}
_latest: dict[tuple[torch.device, int | None], tuple[list[int], Tensor]] = {}
"""The pointers that were sent last, for the next layout of the same tensors."""
_layouts: dict[tuple[object, ...], Layout] = {}


def layout_for(
    sizes: tuple[int, ...],
    kinds: tuple[Hashable, ...],
    chunk: int,
    most: int,
    device: torch.device,
) -> Layout:
    """The layout for tensors of these sizes and kinds, made on first use and kept."""
    key = (sizes, kinds, chunk, most, device, stream_of(device))
    layout = _layouts.get(key)
    if layout is None and capturing():  # What was sent before a capture begins has arrived.
        known = list(_layouts.items())
        layout = next((each for there, each in known if there[:-1] == key[:-1]), None)
    if layout is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.pop(next(iter(list(_layouts))), None)  # Another thread may be here too.
        layout = Layout(sizes, kinds, chunk, most, device)
        if not capturing():
            _layouts[key] = layout
    return layout
