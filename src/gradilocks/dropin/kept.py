"""Statistics of whole lists of gradients, kept on a device where looking at a number would wait.

A list of tensors and its Statistics enter; the Statistics of some or all of those tensors leave,
unread, if each is the same tensor, at the same address, with the same version counter, on the same
stream, and no collective has run since: `torch.distributed.all_reduce` writes without moving the
counter. Everything that is compared here is known to the host.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradilocks.kernels.captured import capturing
from gradilocks.kernels.table import send, stream_of
from gradilocks.values import Statistics

__all__ = ["KeptList", "Recalled", "keep", "recall"]

_BASE = torch._C.TensorBase


class KeptList(NamedTuple):
    """One list of tensors as it was when it was measured."""

    tensors: list[weakref.ref[Tensor]]
    versions: list[int]
    addresses: list[int]
    found: Callable[[], Statistics]
    surroundings: object
    seen: Any
    """What `kernels.limiting` saw, if it was that."""


def keep(tensors: Sequence[Tensor], found: Callable[[], Statistics], seen: Any = None) -> KeptList:
    """Takes note of tensors of one device that have just been measured."""
    return KeptList(
        tensors=list(map(weakref.ref, tensors)),
        versions=[tensor._version for tensor in tensors],
        addresses=list(map(_BASE.data_ptr, tensors)),
        found=found,
        surroundings=_surroundings(tensors[0].device),
        seen=seen,
    )


class Recalled(NamedTuple):
    """Tensors that are as they were when they were measured."""

    lists: Sequence[KeptList]
    places: Sequence[int]

    @property
    def seen(self) -> Any:
        """What `kernels.limiting` saw of just these tensors; None if it was not just these."""
        whole = len(self.lists) == 1 and isinstance(self.places, range)
        return self.lists[0].seen if whole else None

    @property
    def statistics(self) -> Statistics:
        """An entry a tensor, in the order in which they were measured: a sum does not care."""
        return _chosen(_joined([each.found() for each in self.lists]), self.places)


def recall(tensors: Sequence[Tensor], lists: Sequence[KeptList]) -> Recalled | None:
    """What is known of `tensors`, all of one device; None unless every one is as it was."""
    now = _surroundings(tensors[0].device)
    lists = [each for each in lists if each.surroundings == now]
    there = [ref() for each in lists for ref in each.tensors]
    places = _places(tensors, there)
    if places is None:
        return None
    if [tensor._version for tensor in tensors] != _at(places, [each.versions for each in lists]):
        return None
    if list(map(_BASE.data_ptr, tensors)) != _at(places, [each.addresses for each in lists]):
        return None
    return Recalled(lists, places)


def _places(tensors: Sequence[Tensor], there: Sequence[Tensor | None]) -> Sequence[int] | None:
    """Where each of `tensors` is in `there`, a range if they are the same; None if one is not."""
    if len(tensors) == len(there) and all(map(operator.is_, tensors, there)):
        return range(len(there))
    # Both are alive, so the same id is the same tensor. Of two entries the later counts.
    at = dict(zip(map(id, there), range(len(there)), strict=True))
    places = [at.get(id(tensor), -1) for tensor in tensors]
    return None if -1 in places else places


def _at(places: Sequence[int], parts: Sequence[list[int]]) -> list[int]:
    numbers = parts[0] if len(parts) == 1 else list(itertools.chain.from_iterable(parts))
    return numbers if isinstance(places, range) else [numbers[place] for place in places]


def _joined(parts: Sequence[Statistics]) -> Statistics:
    if len(parts) == 1:
        return parts[0]
    return Statistics(
        norms=torch.cat([part.norms for part in parts]),
        nan=torch.cat([part.nan for part in parts]),
        inf=torch.cat([part.inf for part in parts]),
    )


def _chosen(statistics: Statistics, places: Sequence[int]) -> Statistics:
    """The entries at `places`, in ascending order."""
    if isinstance(places, range):
        return statistics
    ordered = sorted(places)
    stretch = range(ordered[0], ordered[-1] + 1)
    columns = (statistics.norms, statistics.nan, statistics.inf)
    if ordered == list(stretch):
        return Statistics(*(column[stretch.start : stretch.stop] for column in columns))
    index = send(torch.tensor(ordered, dtype=torch.int64, device="cpu"), statistics.norms.device)
    return Statistics(*(column.index_select(0, index) for column in columns))


def _surroundings(device: torch.device) -> object:
    """What must be as it was: the stream, in whose memory the Statistics are, and collectives."""
    if device.type != "cuda":
        return _collectives(device)
    if capturing():
        return object()  # Equal to nothing. A graph replays what it holds and compares nothing.
    return stream_of(device), _collectives(device)


def _collectives(device: torch.device) -> object:
    """How many collectives each process group has run on `device`; equal to nothing if unknown."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    counts = []
    group: Any
    for group in dist.distributed_c10d._world.pg_map:
        try:
            backend = group._get_backend(device)
        except RuntimeError:
            continue  # The group has no backend for this device and cannot reach what is on it.
        try:
            counts.append((group.group_name, backend._get_sequence_number_for_group()))
        except RuntimeError:
            return object()  # A backend that does not count.
    return counts
