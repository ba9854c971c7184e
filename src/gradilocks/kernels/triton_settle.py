"""A step settled on the device: norm, clip coefficient, skip flag and next scale, in one launch.

It computes what the policies that everybody uses (`ScaleRules`, `ClipRules`) and the engine compute
in plain torch, with the same formulas, in one program of a few hundred bytes instead of forty small
launches. What is measured comes from `triton_measure`; nothing is read back by the host.
"""

# Kernel arguments have no types that a checker knows, and tl.constexpr names are capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradilocks.kernels.chunks import ORDERS, AddressedTensors, Located
from gradilocks.kernels.cuda_graph import capturing, keep_if_captured
from gradilocks.kernels.host_numbers import numbers_on, send, stream_of
from gradilocks.kernels.kernel_results import nonfinite_of, put_back, statistics_of
from gradilocks.kernels.triton_launch import BoundLaunch, Launch, launch_for, unspecialized
from gradilocks.kernels.triton_measure import (
    bound_measuring,
    gather,
    kept_scratch,
    lanes_for,
    measure_located,
    scratch_for,
)
from gradilocks.kernels.triton_optimizers import adam_rates, sgd_rates
from gradilocks.values import Decision, NonFinite, ScaleState, StepRecord

__all__ = ["BoundSettling", "Settler", "advance", "limit", "look"]

_LARGEST = torch.finfo(torch.float64).max
_ROW = 12
"""Numbers of a step's row, as the kernel writes them."""
_SLAB = 1 << 15
"""Numbers that are allocated at once: a quarter of a megabyte, or what one step needs."""


class Settler:
    """Settles the steps of one engine, and keeps what the kernel reads and writes besides.

    Args:
        device: of the gradients and of the state.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        self._divisor = torch.ones((), dtype=torch.float32, device=device)
        self._multiplier = torch.ones((), dtype=torch.float64, device=device)
        self._arrived = torch.zeros((), dtype=torch.int32, device=device)
        self._results = (self._skip, self._divisor, self._multiplier)
        self.decision = Decision(self._skip, self._multiplier, divisor=self._divisor)
        self._prepared_for: tuple[object, ...] = ()
        self._located: Located | None = None
        self._rows = Slab(_ROW, device)
        # Launches on what stays from step to step, and for which state and optimizer.
        self._measuring: list[BoundLaunch] = []
        self._settling: dict[Hashable, BoundLaunch] = {}
        self._settling_for: tuple[object, ...] = ()

    def begin(
        self, gradients: AddressedTensors, clip: Any, scale: Any, *, largest_finite: float
    ) -> None:
        """Launches the measuring, so that the device is at work while the host prepares the rest.

        Args:
            gradients: of this step.
            clip, scale: the ClipRules and the ScaleRules.
            largest_finite: what the gradients' dtypes hold.
        """
        located = gradients.at.located
        wanted: tuple[object, ...] = (located.chunking, clip, scale, largest_finite)
        if located is not self._located or wanted != self._prepared_for:
            self._prepare(located, clip, scale, largest_finite)
        for launch in self._measuring:
            launch()

    def settle(
        self,
        gradients: AddressedTensors,
        clip: Any,
        scale: Any,
        state: ScaleState,
        *,
        streak: Tensor,
        steps: Tensor,
        loss: Tensor | None,
        unscaled: bool,
        moves: bool,
        overflow: Tensor | None = None,
        rating: Any = None,
    ) -> tuple[Decision, StepRecord]:
        """Decides, and moves the scale, the streak and the count of steps on.

        Args:
            gradients, clip, scale: as `begin` was given them.
            state: of the scale.
            streak, steps: the counts of non-finite steps in a row and of all steps.
            loss: 0-d; to be looked at for NaN and Inf.
            unscaled: whether the gradients have lost the scale already.
            moves: whether the scale may move on.
            overflow: 0-d; above 0 if NaN or Inf were found in the gradients before.
            rating: "adam" or "sgd", and its tables, for rates to be worked out on the way.
        """
        located, captured = self._located, capturing()
        assert located is not None
        count, stream = located.chunking.count, stream_of(located.device)
        found, found_at = self._found.take(stream, captured)
        row, row_at = self._rows.take(stream, captured)
        # Of an optimizer only its settings are replaced as long as its rates are where they were.
        rates, settings = (None, row) if rating is None else (rating[1][3], rating[1][2])
        if self._settling_for != (id(state), id(streak), id(rates)):
            moving = (state.scale, state.growth_tracker, state.hysteresis, streak, steps)
            # The kernel gets addresses: one of the host would be written to blindly.
            assert all(tensor.device == state.scale.device for tensor in moving)
            assert state.scale.device.type == self.device.type
            self._standing = Standing((self._arrived, self._numbers, *moving), self._results)
            self._settling_for = id(state), id(streak), id(rates)
            self._held = state, streak, rates  # So that no other has their ids.
            self._settling.clear()
        key = _settling_key(moves, unscaled, loss, overflow)
        launch = self._settling.get(key)
        if launch is None:
            kernel, args = settling(
                located, self._scratch, found, row, self._standing, loss, rating,
                order=clip.order, clip=clip.max_norm is not None, dynamic=moves and scale.moves,
                unscaled=unscaled, overflow=overflow,
            )  # fmt: skip
            launch = kernel.bind(count, located.device, args, _CHANGING)
            self._settling[key] = launch
        launch(
            found, row if loss is None else loss, row if overflow is None else overflow, row,
            settings, found_at, row_at,
        )  # fmt: skip
        if captured:
            keep_if_captured(self._standing, self._scratch)
            self._located = None  # What a graph sends is there only when it is replayed.
        return self.decision, _record_at(row, row_at, found, found_at, count, self._skip)

    def bound(
        self, *, loss: Tensor | None, unscaled: bool, moves: bool, rating: Any
    ) -> BoundSettling | None:
        """The step that was settled last, to be settled again; None if C++ does not launch it.

        Args:
            loss, unscaled, moves, rating: as `settle` was given them.
        """
        settling = self._settling.get(_settling_key(moves, unscaled, loss, None))
        measuring = [launch.quick for launch in self._measuring]
        if self._located is None or settling is None or rating is None:
            return None
        if settling.quick is None or None in measuring:
            return None
        return BoundSettling(self, self._located.chunking.count, measuring, settling.quick)

    @staticmethod
    def undo(record: StepRecord, state: ScaleState, streak: Tensor, steps: Tensor) -> None:
        """Puts back what `settle` has moved on."""
        put_back(record, state, streak, steps)

    def slabs(self) -> tuple[Slab, Slab]:
        """Room for what each gradient and each step leaves behind."""
        return self._found, self._rows

    def skip_flag(self) -> Tensor:
        """float32, 0-d: 1 if the latest step was skipped."""
        return self._skip

    def _prepare(self, located: Located, clip: Any, scale: Any, largest_finite: float) -> None:
        wanted: tuple[object, ...] = (located.chunking, clip, scale, largest_finite)
        if wanted != self._prepared_for:
            numbers = [float("inf") if clip.max_norm is None else clip.max_norm]
            numbers += [largest_finite, *scale.numbers()]
            host = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            self._numbers = send(host, self.device)
            self._scratch = scratch_for(located)
            self._found = Slab(5 * located.chunking.count, self.device)
        self._measuring = bound_measuring(located, self._scratch, order=clip.order)
        self._located, self._settling_for = located, ()
        # What a graph sends is there only when it is replayed.
        self._prepared_for = () if capturing() else wanted


class BoundSettling:
    """A step that was settled, to be settled again by the same launches.

    Args:
        settler: has settled it.
        count: of the gradients.
        measuring: what launches the measuring from C++.
        settling: likewise what decides.
    """

    def __init__(
        self, settler: Settler, count: int, measuring: list[Any], settling: Callable[..., object]
    ) -> None:
        self._count, self._measuring, self._settling = count, measuring, settling
        self._found, self._rows = settler.slabs()
        self._skip = settler.skip_flag()

    def begin(self, stream: int | None) -> bool:
        """Launches the measuring; False, and nothing has been done, if this thread has used no GPU.

        Args:
            stream: the current one of the device, which is the current one itself.
        """
        return False not in [launch(stream) for launch in self._measuring]

    def settle(self, stream: int | None, loss: Tensor | None, settings: Tensor) -> StepRecord:
        """Decides, and moves the scale, the streak and the count of steps on.

        Args:
            stream: as `begin` was given it.
            loss: 0-d, of the dtype that it was bound with.
            settings: of the optimizer's groups.
        """
        slab, rows = self._found, self._rows
        # As `take` does it, without the calls as long as there is room.
        found, found_at = slab.numbers, next(slab.free, None)
        row, row_at = rows.numbers, next(rows.free, None)
        if found_at is None or stream != slab.stream:
            found, found_at = slab.take(stream)
        if row_at is None or stream != rows.stream:
            row, row_at = rows.take(stream)
        loss = row if loss is None else loss
        self._settling(stream, found, loss, row, row, settings, found_at, row_at)
        return _record_at(row, row_at, found, found_at, self._count, self._skip)


def _settling_key(
    moves: bool, unscaled: bool, loss: Tensor | None, overflow: Tensor | None
) -> tuple[object, ...]:
    """The kernel's constants, but for those that follow from the rules and from the rates."""
    return (
        moves, unscaled, None if loss is None else loss.dtype,
        None if overflow is None else overflow.dtype,
    )  # fmt: skip


def _record_at(
    row: Tensor, row_at: int, found: Tensor, found_at: int, count: int, skip: Tensor
) -> StepRecord:
    """What a step has left in its places of two slabs."""
    return StepRecord(
        partial(torch.narrow, row, 0, row_at, _ROW),
        skip,
        lambda: statistics_of(found.narrow(0, found_at, 5 * count).view(5, count)),
        partial(torch.narrow, found, 0, found_at + 3 * count, 2 * count),
    )


class Slab:
    """Room for what several steps leave behind: an allocation a step takes the host 8 µs (H200's).

    Args:
        width: numbers a step.
        device: where they lie.
        dtype: of the numbers.
    """

    def __init__(
        self, width: int, device: torch.device, dtype: torch.dtype = torch.float64
    ) -> None:
        self._width, self._device, self._dtype = width, device, dtype
        self._size = max(1, min(64, _SLAB // width)) * width
        self.stream: int | None = None
        """The stream whose steps leave something there."""
        self.free: Iterator[int] = iter(())
        """Where in `numbers` the numbers of the next steps begin, as long as there is room."""
        self.numbers = torch.empty(0, dtype=dtype, device=device)

    def take(self, stream: int | None, captured: bool = False) -> tuple[Tensor, int]:
        """1-d, and where in it the numbers of the next step begin."""
        if captured:  # A graph writes to the same place at each replay.
            return torch.empty(self._width, dtype=self._dtype, device=self._device), 0
        at = next(self.free, None)
        if at is None or stream != self.stream:
            self.numbers = torch.empty(self._size, dtype=self._dtype, device=self._device)
            self.stream, self.free = stream, iter(range(0, self._size, self._width))
            at = next(self.free)
        return self.numbers, at


class _Rooms(threading.local):
    """Slabs for functions that nobody owns, as a clip: of each thread, and of each stream."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[object, ...], Slab] = {}

    def take(
        self, width: int, device: torch.device, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, int]:
        """1-d, and where in it so many numbers are this call's."""
        key = (width, device, stream := stream_of(device), dtype)
        slab = self._slabs.get(key)
        if slab is None:
            while len(self._slabs) >= _MOST_SLABS:
                del self._slabs[next(iter(self._slabs))]
            slab = self._slabs[key] = Slab(width, device, dtype)
        return slab.take(stream, capturing())


_rooms = _Rooms()
_MOST_SLABS = 32
"""How many of them a thread keeps."""


class _Spare:
    """What the kernel reads and writes besides what a drop-in asks for, on one stream."""

    def __init__(self, device: torch.device) -> None:
        def zero(dtype: torch.dtype) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        self.arrived = zero(torch.int32)
        self.scale = torch.ones((), dtype=torch.float32, device=device)
        self.moving = (zero(torch.int32), zero(torch.int32), zero(torch.int32), zero(torch.int64))
        self.skip, self.divisor = zero(torch.float32), zero(torch.float32)


_spares: dict[tuple[torch.device, int | None], _Spare] = {}


def look(located: Located, multiplier: Tensor | None) -> tuple[Tensor, Callable[[], NonFinite]]:
    """Multiplies tensors in place and looks at the result, in two launches.

    Args:
        located: at least one tensor, and none that the kernels cannot take.
        multiplier: 0-d, on their device; None to look without multiplying.

    Returns:
        float32, 0-d: exactly 1 if an element is NaN or Inf, else exactly 0. And what counts them,
        tensor by tensor, if somebody asks.

    Raises:
        KernelFailed: one of the kernels does not compile; nothing has been done.
    """
    chunking, device = located.chunking, located.device
    count = chunking.count
    found, at = _rooms.take(5 * count, device)
    flags, place = _rooms.take(1, device, torch.float32)
    skip, scratch = flags[place], kept_scratch(located)
    if "looked" not in chunking.launches:  # Nothing is multiplied if that cannot be launched.
        _settle_spare(located, scratch, found, at, 2.0, None, skip=skip, prepare_only=True)
        chunking.launches["looked"] = []
    measure_located(located, scratch, multiplier=multiplier)
    _settle_spare(located, scratch, found, at, 2.0, None, skip=skip)
    return skip, lambda: nonfinite_of(found.narrow(0, at, 5 * count).view(5, count))


def limit(tensors: AddressedTensors, bound: float, order: float) -> tuple[Tensor, Tensor]:
    """The norm of the tensors, and what they are to be multiplied by, in two launches.

    Args:
        tensors: at least one.
        bound: the largest norm.
        order: the p of the norm: 1, 2 or inf.

    Returns:
        Both 0-d float64.

    Raises:
        KernelFailed: one of the kernels does not compile; nothing has been done.
    """
    located = tensors.at.located
    found, at = _rooms.take(5 * located.chunking.count, located.device)
    scratch = kept_scratch(located)
    measure_located(located, scratch, order=order)
    return _settle_spare(located, scratch, found, at, order, bound)


def advance(state: ScaleState, skip: Tensor, numbers: tuple[float, ...]) -> None:
    """Moves scale, growth tracker and hysteresis on in place, in one launch.

    Args:
        state: of a DynamicScale.
        skip: 0-d, on the state's device; above 0 if the step was skipped.
        numbers: growth, backoff, interval, min, max, hysteresis.

    Raises:
        KernelFailed: the kernel does not compile; nothing has moved.
    """
    moving = state.scale, state.growth_tracker, state.hysteresis
    device: torch.device = state.scale.device
    sent = numbers_on(device, numbers)
    keep_if_captured(skip, *moving)
    launch_for(advance_kernel, 1, skip.dtype)(1, device, skip, sent, *moving)


def _settle_spare(
    located: Located,
    scratch: tuple[Tensor, Tensor],
    found: Tensor,
    found_at: int,
    order: float,
    bound: float | None,
    *,
    skip: Tensor | None = None,
    prepare_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm, and the coefficient for `bound` if there is one, at a scale of 1 that stays."""
    device = located.device
    # What a graph makes is there only when it is replayed.
    spare = None if capturing() else _spares.get((device, stream_of(device)))
    if spare is None:
        spare = _Spare(device)
        if not capturing():
            _spares[device, stream_of(device)] = spare
    numbers = numbers_on(device, (_LARGEST if bound is None else bound, _LARGEST))
    row, row_at = _rooms.take(_ROW + 1, device)
    coefficient = row[row_at + _ROW]
    standing = Standing(
        (spare.arrived, numbers, spare.scale, *spare.moving),
        (spare.skip if skip is None else skip, spare.divisor, coefficient),
    )
    launch, args = settling(
        located, scratch, found, row, standing, None, None, order=order,
        clip=bound is not None, dynamic=False, unscaled=True,
    )  # fmt: skip
    if not prepare_only:
        launch(located.chunking.count, device, *args[:-2], found_at, row_at)
    keep_if_captured(spare, standing, scratch, found, row, located)
    return row[row_at + 2], coefficient


class Standing(NamedTuple):
    """What settling reads and moves on, all on the device, in the kernel's order."""

    before_loss: tuple[Tensor, ...]
    """The counter of programs, the rules, scale, tracker, hysteresis, streak, steps."""
    after_loss: tuple[Tensor, ...]
    """Skip, divisor, multiplier."""


_CHANGING = (4, 12, 13, 17, 20, 24, 25)
"""Among the arguments: found, loss, overflow, row, settings, found_at, row_at."""


def settling(
    located: Located,
    scratch: tuple[Tensor, Tensor],
    found: Tensor,
    row: Tensor,
    standing: Standing,
    loss: Tensor | None,
    rating: tuple[str, tuple[Tensor, ...]] | None,
    *,
    order: float,
    clip: bool,
    dynamic: bool,
    unscaled: bool,
    overflow: Tensor | None = None,
) -> tuple[Launch, tuple[Any, ...]]:
    """What adds up what measuring found, decides the step and moves the scale on; its arguments.

    A program a tensor. Both numbers at the end say where in `found` and `row` to begin.

    Args:
        located: the tensors.
        scratch: as `measure_located` leaves it.
        found: float64, to be filled as `gather_kernel` says.
        row: float64, to be filled as `_settle` says.
        standing: what is read and moved on.
        loss: 0-d; to be looked at for NaN and Inf.
        rating: "adam" or "sgd", and its tables, for rates to be worked out on the way.
        order, clip, dynamic, unscaled: which rules apply.
        overflow: 0-d; above 0 if the step is to be skipped whatever is found.

    Raises:
        KernelFailed: it does not compile.
    """
    chunking = located.chunking
    key = (
        "settle", order, clip, dynamic, unscaled,
        None if loss is None else loss.dtype, None if rating is None else rating[0],
        None if overflow is None else overflow.dtype,
    )  # fmt: skip
    tables = (row, row, row, row) if rating is None else rating[1]
    args = (
        chunking.begin, chunking.counts, *scratch, found,
        *standing.before_loss, row if loss is None else loss, row if overflow is None else overflow,
        *standing.after_loss, row, *tables, chunking.chunks, chunking.count, 0, 0,
    )  # fmt: skip
    launches = chunking.launches.get(key)
    if launches is None:
        launch = launch_for(
            settle_kernel, 4, (key[5], key[7]), ORDER=ORDERS[order], CLIP=clip, DYNAMIC=dynamic,
            UNSCALED=unscaled, LOSS=loss is not None, OVERFLOW=overflow is not None,
            BLOCK=lanes_for(chunking),
            DOUBLE=any(kind[0] is torch.float64 for kind in cast("Any", chunking.kinds) if kind),
            RATES=0 if rating is None else {"adam": 1, "sgd": 2}[rating[0]],
        )  # fmt: skip
        launch.prepare(located.device, *args)
        launches = chunking.launches[key] = [launch]
    return launches[0], args


@unspecialized
def settle_kernel(
    begin_ptr, chunk_counts_ptr, reals_ptr, counts_ptr, found_ptr, arrived_ptr, rules_ptr,
    scale_ptr, tracker_ptr, hysteresis_ptr, streak_ptr, steps_ptr, loss_ptr, overflow_ptr,
    skip_ptr, divisor_ptr, multiplier_ptr, row_ptr,
    own_ptr, groups_ptr, settings_ptr, rates_ptr,
    chunks, tensors, found_at, row_at,
    ORDER: tl.constexpr, CLIP: tl.constexpr, DYNAMIC: tl.constexpr, UNSCALED: tl.constexpr,
    LOSS: tl.constexpr, OVERFLOW: tl.constexpr, DOUBLE: tl.constexpr, RATES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up each tensor, a program a tensor; the program that is last decides the step.

    What it finds goes to `found` and `row`, from `found_at` and `row_at` on. With RATES 1 or 2 it
    also works out the rates of Adam or SGD, which saves that launch.
    """
    found_ptr += found_at
    row_ptr += row_at
    gather(
        begin_ptr, chunk_counts_ptr, reals_ptr, counts_ptr, found_ptr, chunks, tensors, ORDER, BLOCK
    )
    tl.debug_barrier()  # All of this program's numbers are there before it says so.
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == tensors - 1:
        tl.store(arrived_ptr, 0)
        skipped = _settle(
            found_ptr, rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, streak_ptr, steps_ptr,
            loss_ptr, overflow_ptr, skip_ptr, divisor_ptr, multiplier_ptr, row_ptr, tensors,
            ORDER, CLIP, DYNAMIC, UNSCALED, LOSS, OVERFLOW, DOUBLE, BLOCK,
        )  # fmt: skip
        if skipped == 0:
            lanes = tl.arange(0, BLOCK)
            for place in range(0, tensors, BLOCK):
                if RATES == 1:
                    adam_rates(own_ptr, groups_ptr, settings_ptr, rates_ptr, place + lanes, tensors)
                if RATES == 2:
                    sgd_rates(own_ptr, groups_ptr, settings_ptr, rates_ptr, place + lanes, tensors)


@triton.jit
def _settle(
    found_ptr, rules_ptr,
    scale_ptr, tracker_ptr, hysteresis_ptr, streak_ptr, steps_ptr, loss_ptr, overflow_ptr,
    skip_ptr, divisor_ptr, multiplier_ptr, row_ptr, tensors,
    ORDER: tl.constexpr, CLIP: tl.constexpr, DYNAMIC: tl.constexpr, UNSCALED: tl.constexpr,
    LOSS: tl.constexpr, OVERFLOW: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decides one step and moves the scale on; returns whether it is skipped.

    `found`: as `gather` leaves it.
    `rules`: largest norm, roof, growth, backoff, interval, min, max, hysteresis.
    `row`: skip, scale, norm, limit, clipped, step, loss not finite, NaN, Inf, and the tracker, the
    hysteresis and the streak as they were.
    """
    lanes = tl.arange(0, BLOCK)
    units = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    for place in range(0, tensors, BLOCK):
        at = place + lanes
        inside = at < tensors
        norms = tl.load(found_ptr + at, mask=inside, other=0.0)
        units = tl.maximum(units, tl.where(norms == norms, norms, 0.0))
        nans += tl.load(found_ptr + 3 * tensors + at, mask=inside, other=0.0)
        infs += tl.load(found_ptr + 4 * tensors + at, mask=inside, other=0.0)
    nan = tl.sum(nans)
    inf = tl.sum(infs)
    largest = tl.max(units)
    usable = (largest > 0.0) & (largest < float("inf"))
    unit = tl.where(usable, largest, 1.0)
    sums = tl.zeros([BLOCK], tl.float64)
    for place in range(0, tensors, BLOCK):
        at = place + lanes
        norms = tl.load(found_ptr + at, mask=at < tensors, other=0.0) / unit
        sums += norms * norms if ORDER == 2 else norms
    norm = tl.sum(sums)
    if ORDER == 2:
        norm = tl.sqrt(norm)
    norm = tl.where(usable, norm * unit, largest)
    if ORDER == 0:
        norm = largest
    if DOUBLE == 0:  # Rounded once, as `reference.rounded` does it.
        fits = (norm >= 1.1754943508222875e-38) & (norm <= 3.4028234663852886e38)
        norm = tl.where(fits, norm.to(tl.float32).to(tl.float64), norm)
    norm = tl.where(nan > 0.0, float("nan"), norm)
    broken = (nan + inf) > 0.0
    if OVERFLOW:
        broken = broken | (tl.load(overflow_ptr) > 0.0)

    stored = tl.load(scale_ptr)
    scale = stored.to(tl.float64)
    carried = scale * 0.0 + 1.0 if UNSCALED else scale
    true_norm = norm / carried
    coefficient = carried * 0.0 + 1.0
    limit = tl.load(rules_ptr)
    if CLIP:
        finite = tl.where(true_norm > 1.7976931348623157e308, 1.7976931348623157e308, true_norm)
        coefficient = limit / (finite + 1e-6)
        coefficient = tl.where(coefficient < 1.0, coefficient, 1.0)
        coefficient = tl.where(broken, 1.0, coefficient)
    multiplier = coefficient / carried
    roof = tl.load(rules_ptr + 1)
    too_large = (multiplier > 1.0) & (norm * multiplier > roof)
    usable_multiplier = multiplier < float("inf")
    skipped = broken | too_large | (usable_multiplier == 0)
    clipped = (coefficient < 1.0) & (skipped == 0)
    multiplier = tl.where(skipped, 1.0, multiplier)
    # As the fused optimizers take it: float32, and infinite only for a multiplier of 0.
    divisor = 1.0 / tl.where(multiplier > 0.0, multiplier, 1.0)
    divisor = tl.where(divisor > 3.4028234663852886e38, 3.4028234663852886e38, divisor)
    divisor = tl.where(multiplier > 0.0, divisor, float("inf"))
    skip = tl.where(skipped, 1.0, 0.0)
    tl.store(skip_ptr, skip.to(tl.float32))
    tl.store(divisor_ptr, divisor.to(tl.float32))
    tl.store(multiplier_ptr, multiplier)

    tracker = tl.load(tracker_ptr)
    hysteresis = tl.load(hysteresis_ptr)
    streak = tl.load(streak_ptr)
    steps = tl.load(steps_ptr) + 1
    if LOSS:
        value = tl.load(loss_ptr).to(tl.float64)
        loss = tl.where(tl.abs(value) < float("inf"), 0.0, 1.0)
    else:
        loss = scale * 0.0
    tl.store(row_ptr, skip)
    tl.store(row_ptr + 1, scale)
    tl.store(row_ptr + 2, true_norm)
    tl.store(row_ptr + 3, limit)
    tl.store(row_ptr + 4, tl.where(clipped, 1.0, 0.0))
    tl.store(row_ptr + 5, steps.to(tl.float64))
    tl.store(row_ptr + 6, loss)
    tl.store(row_ptr + 7, nan)
    tl.store(row_ptr + 8, inf)
    tl.store(row_ptr + 9, tracker.to(tl.float64))
    tl.store(row_ptr + 10, hysteresis.to(tl.float64))
    tl.store(row_ptr + 11, streak.to(tl.float64))
    tl.store(streak_ptr, tl.where(skipped, streak + 1, 0))
    tl.store(steps_ptr, steps)
    if DYNAMIC:
        _advance(rules_ptr + 2, scale_ptr, tracker_ptr, hysteresis_ptr, skipped)
    return skipped.to(tl.int32)


@unspecialized
def advance_kernel(skip_ptr, rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr):
    """Moves a dynamic scale on after a step that was taken or skipped."""
    _advance(rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, tl.load(skip_ptr) > 0.0)


@triton.jit
def _advance(rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr, skipped):
    """The rule of `DynamicScale`; `rules`: growth, backoff, interval, min, max, hysteresis."""
    growth = tl.load(rules_ptr)
    backoff = tl.load(rules_ptr + 1)
    interval = tl.load(rules_ptr + 2)
    lowest = tl.load(rules_ptr + 3)
    highest = tl.load(rules_ptr + 4)
    refill = tl.load(rules_ptr + 5)
    scale = tl.load(scale_ptr).to(tl.float64)
    tracker = tl.load(tracker_ptr)
    hysteresis = tl.load(hysteresis_ptr)
    remaining = tl.where(skipped, hysteresis - 1, hysteresis)
    counted = tl.where(skipped, 0, tracker + 1)
    full = counted.to(tl.float64) >= interval
    grown = tl.where(scale * growth <= highest, scale * growth, scale)
    moved = tl.where(skipped & (remaining <= 0), scale * backoff, scale)
    moved = tl.where(full, grown, moved)
    moved = tl.where(moved < lowest, lowest, tl.where(moved > highest, highest, moved))
    tl.store(scale_ptr, moved.to(tl.float32))
    tl.store(tracker_ptr, tl.where(full, 0, counted))
    tl.store(hysteresis_ptr, tl.where(full, refill.to(tl.int32), remaining))
