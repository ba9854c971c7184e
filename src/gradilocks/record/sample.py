"""What one step of one optimizer hands to a Recorder, made on the device and read later.

`Sample` holds the numbers of a step, `Weights` finds two of them: the norm of each parameter before
the step, and how far the step has moved it. Nothing here waits.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, overload

import torch
from torch import Tensor

from gradilocks import _torch, kernels
from gradilocks.kernels import native, pieces
from gradilocks.kernels.chunks import DTYPES, AddressedTensors, Addresses
from gradilocks.kernels.host_numbers import numbers_on, send, stream_of
from gradilocks.ranks.layout import local_of
from gradilocks.step.rank_losses import RankedLosses
from gradilocks.step.together import Together
from gradilocks.values import SharedDetail, Statistics, StepRecord, moved

__all__ = [
    "LARGEST_WHOLE",
    "OF_CONTROL",
    "RankPart",
    "Sample",
    "SpreadSample",
    "Weights",
    "update_ratios",
]

Number = Tensor | float | None
OF_CONTROL: Sequence[str] = ("scale", "norm", "limit", "clipped", "skip", "nan", "inf")
"""What the row of a control tells of a step."""


@dataclass(frozen=True)
class SpreadSample:
    """What all ranks that hold a model have told of one step of one optimizer."""

    together: Together
    blamed: Tensor
    """As `Together.blamed_rows` has it."""
    mean_loss: Tensor
    """0-d: of the ranks that have a loss."""
    losses: Tensor
    """0-d: how many have."""
    optimizer: int
    """Its number among the control's."""
    shared: SharedDetail | None
    """Of all parameters of all ranks, if they shared it."""


@dataclass(frozen=True)
class RankPart:
    """What one rank has of a step, where its ranks tell each other on the host, some time later."""

    ranks: tuple[int, ...]
    """Those that tell of the step."""
    optimizer: int
    """Its number among the optimizers of which ranks tell, the same on all of them."""
    structure: str
    """Stands for the optimizer's parameters, the same on all ranks that have the same ones."""
    spread: bool = False
    """Whether gradients are spread over the ranks, and not only losses."""
    holders: Sequence[tuple[str, tuple[int, ...]]] = ()
    """For each set of parameters that the same ranks hold: what stands for it, and the ranks."""
    norms: Tensor | None = None
    """1-d, float64, unscaled: for each of `holders` the norm of the elements that count, which of
    several ranks with the same ones are the first's. None if they are not known to be elements."""
    counts: Sequence[bool] = ()
    """For each measured gradient, whether this rank's elements count."""
    sets: Sequence[int] = ()
    """For each measured gradient, the place in `holders` of the set that its parameter is in."""
    double: bool = False
    """Whether a gradient is float64."""


@dataclass  # Not frozen: that takes 4 us for each of them.
class Sample:
    """One step. Tensors stay on their device; nothing here is read until it has arrived.

    Scale, norm, limit, clipped, skip, rejected, lr and carried are copied when they are handed
    over: the next step may overwrite them. All else is kept as it is until its batch is sent: hand
    over what nobody writes to any more.
    """

    loss: Number = None
    """Unscaled."""
    scale: Number = None
    """What the loss was multiplied by; 1 without loss scaling."""
    norm: Number = None
    """Of all gradients, unscaled, before clipping."""
    limit: Number = None
    """The bound that was put on the norm; None or inf if there is none."""
    clipped: Tensor | bool | float = False
    """Whether clipping made the gradients smaller."""
    skip: Tensor | bool | float = False
    """Whether the parameters were left as they were; 2 says that a clip policy rejected them."""
    rejected: Tensor | bool | float = False
    """Whether they were left so by a clip policy, on finite gradients."""
    lr: Number = None
    """Of the first parameter group."""
    record: StepRecord | None = None
    """What was measured and decided."""
    of_record: Sequence[str] = OF_CONTROL
    """Which numbers are those in the record's row, of those that ROW names."""
    norm_is_scaled: bool = False
    """Whether the norm there is that of the gradients with the scale that they carried."""
    waited: float | None = None
    """Seconds of the host between the step before it and the next call of a module."""
    next_scale: Number = None
    """The scale after this step, for the log: the tensor itself that moves on, or None to find it
    in the next sample."""
    found: Callable[[], Statistics | None] | None = None
    """What tells what was measured, gradient by gradient; None: the record does."""
    carried: Number = None
    """The scale that the measured gradients carried: 1 if they were unscaled; None: `scale`."""
    places: Sequence[int] | None = None
    """Which parameters the statistics are of, as places in the optimizer's list; None: all."""
    elements: Sequence[int] | None = None
    """How many elements each measured gradient has; None: as many as its parameter."""
    weight: Tensor | None = None
    """1-d, along all parameters of the optimizer: their norms before the step."""
    change: Tensor | None = None
    """1-d, likewise: the norms of what the step has changed them by."""
    spread: SpreadSample | None = None
    """What all ranks have told of the step, where several hold the model."""
    rank_losses: RankedLosses | None = None
    """What data-parallel ranks have told of the losses of the latest steps, this one the last."""
    of_rank: bool = False
    """Whether this is of what one rank holds of a model that is spread over several."""
    part: RankPart | None = None
    """What the ranks are to bring together later, if they do."""
    more: bool = False
    """Whether the next sample is of the same decision: another optimizer of the same control."""

    def statistics(self) -> Statistics | None:
        """What was measured, gradient by gradient."""
        if self.found is not None:
            return self.found()
        return None if self.record is None else self.record.statistics

    def counts(self) -> Tensor | None:
        """1-d: how many NaN each gradient has, and after those how many Inf."""
        if self.found is None:
            return None if self.record is None else self.record.counts()
        found = self.found()
        return None if found is None else torch.cat((found.nan, found.inf))


LARGEST_WHOLE = 65_536
"""A tensor of up to so many elements is looked at whole.

Of a larger one 4,096 runs of 16 elements are taken at even distances, the same ones before and
after: the ratio is then an estimate, and the copy stays small whatever the size of the model. Runs,
because a cache line holds 16 elements and is read whole anyway; an odd distance, because an even
one would see the same few columns of a matrix again and again.
"""
_RUN = 16
_RUNS = LARGEST_WHOLE // _RUN
_PLAIN = {Tensor, torch.nn.Parameter}
_device_of, _dtype_of = operator.attrgetter("device"), operator.attrgetter("dtype")


class Weights:
    """What the parameters of an optimizer are before a step.

    Each of them, or a part of a large one, is copied in float32 or wider: in as many operations as
    there are kinds of parameters, however many there are of each kind.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = _own_elements(params)
        with torch.no_grad():
            self._before = [_copies(self._params, kind) for kind in _kinds(self._params)]

    def norms(self, home: torch.device) -> tuple[Tensor, Tensor]:
        """The norms before the step, and those of what it has changed; 1-d, on `home`, no wait."""
        found = []
        with torch.no_grad():
            for before in self._before:
                norms = _moved_norms(self._params, before).to(torch.float32)
                found.append(moved(norms.view(2, len(before.sizes)), home))
            norms = found[0] if len(found) == 1 else torch.cat(found, dim=1)
            places = [place for each in self._before for place in each.kind.places]
            if places != list(range(len(places))):
                back = sorted(range(len(places)), key=places.__getitem__)
                norms = norms[:, numbers_on(home, tuple(back), torch.int64)]
            if any(each.kind.large for each in self._before):
                # The norm of a part is multiplied to estimate that of its tensor.
                sizes = list(map(_torch.TensorBase.numel, self._params))
                looked_at = torch.tensor(sizes, dtype=torch.float64, device="cpu") / LARGEST_WHOLE
                factors = looked_at.clamp_(min=1.0).sqrt_().to(torch.float32)
                norms = norms * send(factors, home)
            weight, change_norm = norms.unbind()
            return weight, change_norm


class _Kind(NamedTuple):
    """Parameters that one operation copies: of one dtype, on one device."""

    places: Sequence[int]
    large: bool
    """Whether only a part of each is looked at."""


class _Copies(NamedTuple):
    """What parameters were at one moment."""

    kind: _Kind
    elements: Tensor
    """Of one after another; 1-d."""
    sizes: list[int]
    """How many are of each."""


def _own_elements(params: Sequence[Tensor]) -> list[Tensor]:
    """Plain real tensors in the same memory; one NaN where nothing is known of what is there."""
    params = list(params)
    dtypes, kinds = set(map(_dtype_of, params)), {device.type for device in map(_device_of, params)}
    if not set(map(type, params)) <= _PLAIN or any(dtype.is_complex for dtype in dtypes):
        params = [_local(param) for param in params]
    if "meta" in kinds:
        unknown = torch.full((1,), math.nan, device="cpu")
        params = [unknown if param.is_meta else param for param in params]
    return params


def _kinds(params: Sequence[Tensor]) -> list[_Kind]:
    keys = list(
        zip(
            map(_device_of, params),
            map(_dtype_of, params),
            map(LARGEST_WHOLE.__lt__, map(_torch.TensorBase.numel, params)),
            strict=True,
        )
    )
    different = dict.fromkeys(keys)
    if len(different) == 1:
        return [_Kind(range(len(keys)), keys[0][2])]
    return [
        _Kind([at for at, key in enumerate(keys) if key == kind], kind[2]) for kind in different
    ]


def _copies(params: Sequence[Tensor], kind: _Kind) -> _Copies:
    tensors = [params[place] for place in kind.places]
    if kind.large:
        elements = torch.cat(_sampled(tensors)).view(-1)
        sizes = [LARGEST_WHOLE] * len(tensors)
    else:
        sizes = list(map(_torch.TensorBase.numel, tensors))
        elements = _one_after_another(tensors, sum(sizes))
    return _Copies(kind, elements.to(torch.promote_types(elements.dtype, torch.float32)), sizes)


def _one_after_another(tensors: list[Tensor], total: int) -> Tensor:
    """A copy of the elements of tensors of one dtype on one device."""
    library, first = native.library(), tensors[0]
    if library is not None and first.is_cpu:
        elements = torch.empty(total, dtype=first.dtype, device="cpu")
        if library.copy_elements(tensors, elements):
            return elements
    copied: Tensor = _torch.flattened(tensors)
    return copied if len(tensors) > 1 else copied.clone()  # Which torch does not copy.


def _moved_norms(params: Sequence[Tensor], before: _Copies) -> Tensor:
    """The norms of what parameters were, and behind those of what has changed since; 1-d."""
    library = native.library()
    if library is not None and before.elements.is_cpu and not before.kind.large:
        tensors = [params[place] for place in before.kind.places]
        norms = torch.empty(2 * len(tensors), dtype=torch.float64, device="cpu")
        if library.moved_norms(tensors, before.elements, norms):
            return norms
    change = _copies(params, before.kind).elements.sub_(before.elements)
    return _norms((before.elements, change), before.sizes)


def _norms(rows: Sequence[Tensor], sizes: list[int]) -> Tensor:
    """The norms of parts of so many elements, of each row those one after another; 1-d."""
    at, parts = _where_parts_lie(rows, sizes), _Parts(rows, sizes)
    if at is not None:
        backend = kernels.BACKENDS[at.device.type]
        return backend.measure(AddressedTensors(parts, at)).norms
    return torch.stack(_torch.norms(list(parts)))


class _Parts(Sequence[Tensor]):
    """Parts of rows, which become tensors of their own only if somebody asks for one."""

    def __init__(self, rows: Sequence[Tensor], sizes: list[int]) -> None:
        self._rows, self._sizes = rows, sizes

    def __len__(self) -> int:
        return len(self._rows) * len(self._sizes)

    @functools.cached_property
    def _listed(self) -> list[Tensor]:
        return [part for row in self._rows for part in torch.split(row, self._sizes)]

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        return self._listed[place]


_known: dict[tuple[object, ...], tuple[Tensor, Addresses]] = {}
_MOST_KNOWN = 8
"""How many lists of sizes are known: where the parts begin, and the tables of the kernels."""


def _where_parts_lie(rows: Sequence[Tensor], sizes: list[int]) -> Addresses | None:
    """Where the parts lie; None if no kernel reaches them by their addresses."""
    first, begins = rows[0], [row.data_ptr() for row in rows]
    if (
        not kernels.BACKENDS[first.device.type].BY_ADDRESS
        or first.dtype not in DTYPES
        or any(begin % 16 for begin in begins)
    ):
        return None
    key = tuple(sizes), len(rows), first.dtype, first.device, stream_of(first.device)
    known = _known.get(key)
    if known is not None:
        offsets, before = known
        numbers = torch.cat([offsets + begin for begin in begins])
        at = before.moved(numbers)
    else:
        width = first.element_size()
        places = [place * width for place in accumulate(sizes[:-1], initial=0)]
        offsets = torch.tensor(places, dtype=torch.int64, device="cpu")
        numbers = torch.cat([offsets + begin for begin in begins])
        kinds = tuple([(first.dtype, width if place % 16 else 16) for place in places])
        at = Addresses(numbers, kinds * len(rows), tuple(sizes) * len(rows), first.device)
        while len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(list(_known))), None)  # Another thread may be here too.
    _known[key] = offsets, at
    return at


def _sampled(tensors: list[Tensor]) -> list[Tensor]:
    """Of each of these large tensors the runs that are looked at, in its own memory."""
    library = native.library()
    if library is not None:
        found: list[Tensor] = library.sampled_runs(tensors, _RUNS, _RUN)
        return found
    return [_runs_of(tensor) for tensor in tensors]


def update_ratios(weight: Sequence[float], change: Sequence[float]) -> list[float]:
    """‖change‖ / ‖before‖; 0 where nothing has changed, whatever the norm."""
    return [
        0.0 if moved == 0.0 else moved / norm if norm else math.copysign(math.inf, moved)
        for norm, moved in zip(weight, change, strict=True)
    ]


def _local(param: Tensor) -> Tensor:
    param = local_of(param).detach()
    return torch.view_as_real(param) if param.is_complex() else param


def _runs_of(tensor: Tensor) -> Tensor:
    if not pieces.is_dense(tensor):
        tensor = tensor.contiguous()
    distance = (tensor.numel() - _RUN) // (_RUNS - 1)
    distance -= 1 - distance % 2
    return torch.as_strided(tensor, (_RUNS, _RUN), (distance, 1), tensor.storage_offset())
