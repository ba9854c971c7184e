"""A list of tensors as the kernels see it: which they can take, in which chunks, and where it is.

The chunks depend on the tensors' sizes and kinds alone and are made once for a set of them. The
pointers are sent again only when they have changed: every step if gradients are set to None, never
if they stay. Sending does not wait.
"""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from gradilocks.kernels import native, pieces
from gradilocks.kernels.cuda_graph import capturing, keep_if_captured
from gradilocks.kernels.guards import Guard, attribute, empty
from gradilocks.kernels.host_numbers import STAGED, send, send_into, stream_of

__all__ = [
    "CHUNK",
    "DTYPES",
    "ORDERS",
    "AddressedTensors",
    "Addresses",
    "Bucket",
    "Chunking",
    "Located",
    "all_aligned",
    "as_numbers",
    "chunking_for",
    "kinds_of",
    "locate",
    "note_written",
]

CHUNK = 1 << 15
"""Elements a program: 0.98 ms at 2^15, 1.03 at 2^14, 0.99 at 2^16 (1.1 B float32, H200)."""
MOST_CHUNKS = 36_000
"""Measuring needs 28 bytes of scratch a chunk: a megabyte in all, however large the model."""
MOST_TO_CHANGE = 1 << 19
"""Writing needs no scratch, only the table of 8 bytes a chunk."""
DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
ORDERS = {2.0: 2, 1.0: 1, math.inf: 0}
"""The p of the norms that kernels can measure, and so a device settle; and what they call it."""
_MOST_KEPT = 32


class Bucket(NamedTuple):
    """The chunks of all tensors of one kind, which one launch works on."""

    kind: Hashable
    first: int
    chunks: int


class Chunking:
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
        # By the host's own lists: torch's repeat_interleave opens a parallel region even for a few
        # numbers, which hangs in a process that was forked after another one.
        counts, begin = array("i", bytes(4 * len(sizes))), array("i", bytes(4 * len(sizes)))
        owners, indices = array("i"), array("i")
        buckets: list[Bucket] = []
        for kind, places in members.items():
            first = len(owners)
            for place in places:
                begin[place], counts[place] = len(owners), -(-sizes[place] // chunk)
                owners.extend(array("i", [place]) * counts[place])
                indices.extend(range(counts[place]))
            buckets.append(Bucket(kind, first, len(owners) - first))
        self.device = device
        self.count = len(sizes)
        self.chunk = chunk
        self.chunks = len(owners)
        self.longest = max(counts, default=0)
        """Chunks of the tensor that has most of them."""
        self.kinds = frozenset(kinds)
        """The kinds that there are, those of empty tensors too."""
        self.buckets = tuple(buckets)
        self.sizes = send(torch.tensor(sizes, dtype=torch.int64, device="cpu"), device)
        self.owner, self.index = (send(_int32(each), device) for each in (owners, indices))
        self.begin, self.counts = (send(_int32(each), device) for each in (begin, counts))
        self.launches: dict[Hashable, list[Any]] = {}
        """What the kernels' users have found out about launching on it."""
        self._sent = _NOTHING, self.sizes

    def point_at(self, addresses: Tensor) -> Tensor:
        """The tensors' addresses on the device; sent only if they are not what was sent before.

        Args:
            addresses: int64, on the host; nobody writes to it.
        """
        sent, pointers = self._sent
        if not torch.equal(addresses, sent):
            stream = self.device, stream_of(self.device)
            sent, pointers = _latest.get(stream, (_NOTHING, self.sizes))
            if not torch.equal(addresses, sent):
                pointers = send(addresses, self.device)
            if not capturing():  # What a graph sends is there only when it is replayed.
                _latest[stream] = self._sent = addresses, pointers  # Both at once, for threads.
        keep_if_captured(self, pointers)
        return pointers


_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


def _int32(numbers: array[int]) -> Tensor:
    if not numbers:  # Nothing that a tensor could be made over.
        return torch.zeros(0, dtype=torch.int32, device="cpu")
    return torch.frombuffer(numbers, dtype=torch.int32)


_latest: dict[tuple[torch.device, int | None], tuple[Tensor, Tensor]] = {}
"""The pointers that were sent last, for the next chunking of the same tensors."""
_chunkings: dict[tuple[object, ...], Chunking] = {}


def chunking_for(
    sizes: tuple[int, ...],
    kinds: tuple[Hashable, ...],
    chunk: int,
    most: int,
    device: torch.device,
) -> Chunking:
    """The chunks for tensors of these sizes and kinds, made on first use and kept."""
    key = (sizes, kinds, chunk, most, device, stream_of(device))
    chunking = _chunkings.get(key)
    if chunking is None and capturing():  # What was sent before a capture begins has arrived.
        known = list(_chunkings.items())
        chunking = next((each for there, each in known if there[:-1] == key[:-1]), None)
    if chunking is None:
        if len(_chunkings) >= _MOST_KEPT:
            _chunkings.pop(next(iter(list(_chunkings))), None)  # Another thread may be here too.
        chunking = Chunking(sizes, kinds, chunk, most, device)
        if not capturing():
            _chunkings[key] = chunking
    return chunking


class Located(NamedTuple):
    """Where the tensors of one device are."""

    device: torch.device
    chunking: Chunking
    pointers: Tensor
    """int64: the address of each tensor, on the device."""
    rest: tuple[int, ...]
    """The places of those tensors that the kernels cannot take."""


class Addresses:
    """Where tensors of one device lie, all of which the kernels can take.

    What kernels make of that is worked out on first use, and again only as far as it has changed.

    Args:
        numbers: the address of each tensor: int64, on the host; nobody writes to it.
        kinds: dtype and alignment in bytes of each.
        sizes: elements of each.
        device: of all of them.
    """

    def __init__(
        self,
        numbers: Tensor,
        kinds: tuple[tuple[torch.dtype, int], ...],
        sizes: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.numbers, self.kinds, self.sizes, self.device = numbers, kinds, sizes, device
        self._listed: tuple[Tensor, list[int]] | None = None
        self._located: dict[int | None, Located] = {}
        self._in_captures: set[int | None] = set()
        # Pointers on the device that nobody else knows, and the stream that they were sent on.
        self._own: tuple[Tensor, int | None] | None = None
        self._parts: dict[tuple[int, int], tuple[Tensor, Addresses]] = {}

    @property
    def addresses(self) -> list[int]:
        """The address of each tensor; a list is made when it is asked for."""
        numbers, listed = self.numbers, self._listed
        if listed is None or listed[0] is not numbers:
            listed = self._listed = numbers, numbers.tolist()  # Both at once, for threads.
        return listed[1]

    @property
    def located(self) -> Located:
        """The tensors as the kernels that measure see them."""
        found = self._located.get(None)
        return self.located_in(None) if found is None or capturing() else found

    def located_in(self, chunk: int | None) -> Located:
        """The tensors in chunks of so many elements; None for what is best for measuring."""
        found = self._located.get(chunk)
        if found is None:
            found = _placed(self.sizes, self.kinds, self.numbers, self.device, chunk)
            if self._own is not None:  # All have the same: they change together.
                found = found._replace(pointers=self._own[0])
            self._located[chunk] = found
            if chunk is not None and capturing():
                self._in_captures.add(chunk)
        if capturing():
            keep_if_captured(found)
            self._own = None  # A graph will read there whenever it is replayed.
        return found

    @functools.cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that there are."""
        return frozenset([dtype for dtype, _ in self.kinds])

    def moved(self, numbers: Tensor) -> Addresses:
        """Tensors of the same sizes and kinds that lie elsewhere, or there."""
        made = Addresses(numbers, self.kinds, self.sizes, self.device)
        made._located, made._in_captures = dict(self._located), set(self._in_captures)
        made.dtypes = self.dtypes
        if torch.equal(numbers, self.numbers):
            self._own = None  # From here on both read there.
        else:
            made.change(numbers)
        return made

    def part(self, begin: int, end: int) -> Addresses:
        """Some of the tensors, one after the other, such as those of one optimizer of several."""
        found = self._parts.get((begin, end))
        numbers = self.numbers
        if found is None:
            kinds, sizes = self.kinds[begin:end], self.sizes[begin:end]
            made = Addresses(numbers[begin:end], kinds, sizes, self.device)
        else:
            of, made = found
            if of is not numbers:
                made.change(numbers[begin:end])
        self._parts[begin, end] = numbers, made
        return made

    def guards(self) -> list[Guard]:
        """What must be as it is now for launches that are bound to its tables to serve again."""
        return [*attribute(self, "_own", "_located"), *empty(self._in_captures)]

    def own_table(self) -> tuple[Tensor | None, int | None]:
        """Where the kernels read the addresses and the stream on which they may be written there.

        None if nobody may: others read there too, a graph does, or they are too many.
        """
        if self._own is None or self._in_captures or self.numbers.nbytes > STAGED:
            return None, None
        return self._own

    def change(self, numbers: Tensor) -> None:
        """From here on the tensors lie elsewhere; their sizes and kinds are the same.

        Args:
            numbers: the address of each tensor, as before.
        """
        self.numbers = numbers
        for chunk in self._in_captures:  # What a graph sends is there only when it is replayed.
            self._located.pop(chunk, None)
        self._in_captures.clear()
        if not self._located:
            return
        stream, captured = stream_of(self.device), capturing()
        if self._own is not None and self._own[1] == stream and not captured:
            # Behind all that reads the old ones, which was queued on the same stream.
            send_into(self._own[0], numbers, stream)
            return
        pointers = send(numbers, self.device)
        self._own = None if captured else (pointers, stream)
        self._located = {
            chunk: each._replace(pointers=pointers) for chunk, each in self._located.items()
        }


class AddressedTensors(Sequence[Tensor]):
    """Tensors whose addresses are known: `locate` need not ask each.

    Args:
        tensors: as a list, or as C++ holds them; then Python objects are made of them only if
            somebody asks for one (2,000 take 0.3 ms).
        at: where they lie.
    """

    def __init__(self, tensors: Sequence[Tensor], at: Addresses) -> None:
        self.held, self._size = tensors, len(tensors)
        """The tensors as they are held, for C++."""
        self.at = at

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if not isinstance(place, slice):
            return self._listed()[place]
        begin, end, step = place.indices(self._size)
        if step != 1 or end <= begin:
            return self._listed()[place]
        if end - begin == self._size:
            return self
        return AddressedTensors(self.held[place], self.at.part(begin, end))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._listed())

    def _listed(self) -> list[Tensor]:
        if not isinstance(self.held, list):
            self._memory: Sequence[Tensor] = self.held  # Which holds what is at the addresses.
            self.held = list(self.held)
        return self.held


def note_written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that kernels have written to the tensors.

    As torch.autograd.graph.increment_version: of 2,000 tensors in 0.01 ms, where Python takes 0.2.
    """
    library = native.library()
    if library is None:
        torch.autograd.graph.increment_version(tensors)
    else:
        # Not isinstance: for a list it would ask the abstract class, in Python.
        library.count_write(tensors.held if type(tensors) is AddressedTensors else tensors)


def locate(tensors: Sequence[Tensor], *, chunk: int | None = None) -> Located:
    """Finds the tensors, all on one device, and sends their addresses there; nothing waits."""
    if isinstance(tensors, AddressedTensors):
        return tensors.at.located_in(chunk)
    addresses = [_address_of(tensor) for tensor in tensors]
    sizes = tuple([tensor.numel() for tensor in tensors])
    numbers = as_numbers(array("q", addresses))
    return _placed(sizes, kinds_of(tensors, addresses), numbers, tensors[0].device, chunk)


def _address_of(tensor: Tensor) -> int:
    """Where the elements begin; 0 if there are none, or they lie in other tensors (a subclass)."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _placed(
    sizes: tuple[int, ...],
    kinds: tuple[tuple[torch.dtype, int] | None, ...],
    numbers: Tensor,
    device: torch.device,
    chunk: int | None,
) -> Located:
    """Tensors of these sizes and kinds at these addresses."""
    most = MOST_CHUNKS if chunk is None else MOST_TO_CHANGE
    chunking = chunking_for(sizes, kinds, CHUNK if chunk is None else chunk, most, device)
    rest = tuple([place for place, kind in enumerate(kinds) if kind is None])
    return Located(device, chunking, chunking.point_at(numbers), rest)


def as_numbers(addresses: array[int]) -> Tensor:
    """Addresses as `Addresses` takes them; nobody may write to the array any more."""
    return torch.frombuffer(addresses, dtype=torch.int64) if addresses else _NOTHING


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
            if tensor.dtype in DTYPES
            and (address or not tensor.numel())
            and (tensor.is_contiguous() or pieces.is_dense(tensor))
            else None
            for tensor, address in zip(tensors, addresses, strict=True)
        ]
    )
