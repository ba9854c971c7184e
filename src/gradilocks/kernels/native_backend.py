"""The kernels in C++ for the CPU: many tensors in one call, on torch's own threads.

A `SettlingBackend`, like `triton_backend`. One read yields what `measure` finds; powers are added
in float64 in a fixed order (`cpu_measure.cpp`), so the bits depend neither on the number of threads
nor on the make of the processor. A step that is settled takes one call, and one more the step of
`gradilocks.optim`. What the kernels cannot take, a strided view or an order other than 1, 2 and
inf, goes to `reference`.

The C++ gets addresses. Who calls it holds the tensors until it returns.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import TensorBase
from gradilocks.kernels import native, reference
from gradilocks.kernels.chunks import (
    ORDERS,
    AddressedTensors,
    Chunking,
    Located,
    locate,
    note_written,
)
from gradilocks.kernels.kernel_results import fill_in, nonfinite_of, put_back, statistics_of
from gradilocks.values import Decision, NonFinite, ScaleState, Statistics, StepRecord

__all__ = [
    "advance",
    "chunks_of",
    "clamp_",
    "limit",
    "measure",
    "multiply_",
    "multiply_and_check_",
    "multiply_each_",
    "optimizers",
    "settler",
    "try_out",
]

BY_ADDRESS = True
"""Whether it reaches tensors by their addresses."""
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
"""The dtypes as `cpu_elements.h` counts them."""
OPTIMIZERS = {"adam": 1, "sgd": 2}
"""The optimizers as `cpu_optimizers.h` counts them."""

_library: Any = native.library()
if _library is None:
    raise ImportError("the native library is not there")
_address = TensorBase.data_ptr
# An object, since a device by its name takes torch 0.3 us each time to read.
_CPU = torch.device("cpu")
_FLOAT: Any = {"dtype": torch.float32, "device": _CPU}
_WIDE: Any = {"dtype": torch.float64, "device": _CPU}


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False) -> Statistics:
    """As `reference.measure`; the largest magnitude and the zeros are always found."""
    if order not in ORDERS:
        return reference.measure(tensors, order=order, detail=detail)
    located = locate(tensors)
    found = torch.empty(5, len(tensors), **_WIDE)
    chunks_of(located).measure(_address(located.pointers), ORDERS[order], _address(found))
    if located.rest:
        fill_in(found, [tensors[place] for place in located.rest], located.rest, order)
    return statistics_of(found)


def multiply_and_check_(
    tensors: Sequence[Tensor], multiplier: Tensor | None
) -> tuple[Tensor, Callable[[], NonFinite]]:
    """As `reference.multiply_and_check_`."""
    factor = 1.0 if multiplier is None else float(multiplier)
    located = locate(tensors)
    found = torch.empty(5, len(tensors), **_WIDE)
    broken = chunks_of(located).look(_address(located.pointers), factor, _address(found))
    if located.rest:
        rest = [tensors[place] for place in located.rest]
        if multiplier is not None:
            reference.multiply_(rest, multiplier)
        fill_in(found, rest, located.rest, math.inf)
        broken = bool(found[3:].any())
    if factor != 1.0:
        note_written(tensors)
    return torch.scalar_tensor(float(broken), **_FLOAT), lambda: nonfinite_of(found)


def multiply_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    """As `reference.multiply_`."""
    factor = float(multiplier)
    if factor == 1.0:
        return
    located = locate(tensors)
    chunks_of(located).multiply(_address(located.pointers), factor)
    if located.rest:
        reference.multiply_([tensors[place] for place in located.rest], multiplier)
    note_written(tensors)


def multiply_each_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """As `reference.multiply_each_`, in one call."""
    wide = factors.to(torch.float64).contiguous()
    located = locate(tensors)
    chunks_of(located).multiply_each(_address(located.pointers), _address(wide))
    if located.rest:
        rest = [tensors[place] for place in located.rest]
        reference.multiply_each_(rest, factors[list(located.rest)])
    written = [t for t, factor in zip(tensors, wide.tolist(), strict=True) if factor != 1.0]
    note_written(written)


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """As `reference.clamp_`; a bound of inf reads nothing."""
    value = float(bound)
    if value == math.inf:
        return
    located = locate(tensors)
    chunks_of(located).clamp(_address(located.pointers), value)
    if located.rest:
        reference.clamp_([tensors[place] for place in located.rest], bound)
    note_written(tensors)


def limit(tensors: AddressedTensors, bound: float, order: float) -> tuple[Tensor, Tensor]:
    """The norm of the tensors, and what they are to be multiplied by, in one call.

    Args:
        tensors: at least one.
        bound: the largest norm.
        order: the p of the norm: 1, 2 or inf.

    Returns:
        Both 0-d float64.
    """
    located = tensors.at.located
    out = torch.empty(2, **_WIDE)
    chunks = chunks_of(located)
    chunks.limit(_address(located.pointers), ORDERS[order], bound, _address(out))
    norm, coefficient = out.unbind()
    return norm, coefficient


def advance(state: ScaleState, skip: Tensor, numbers: tuple[float, ...]) -> None:
    """Moves scale, growth tracker and hysteresis on in place.

    Args:
        state: of a DynamicScale.
        skip: 0-d; above 0 if the step was skipped.
        numbers: growth, backoff, interval, min, max, hysteresis.
    """
    moving = (state.scale, state.growth_tracker, state.hysteresis)
    _check(moving, _MOVING[:3])
    _library.cpu_advance(*numbers, *map(_address, moving), float(skip) > 0.0)


class Settler:
    """Settles the steps of one engine, and keeps what a step reads and writes besides.

    Args:
        device: of the gradients and of the state: the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._skip = torch.zeros((), **_FLOAT)
        self._divisor = torch.ones((), **_FLOAT)
        self._multiplier = torch.ones((), **_WIDE)
        self.decision = Decision(self._skip, self._multiplier, divisor=self._divisor)
        self._prepared_for: tuple[object, ...] = ()
        self._checked: tuple[Tensor, ...] = ()
        self._latest: BoundSettling | None = None

    def begin(
        self, gradients: AddressedTensors, clip: Any, scale: Any, *, largest_finite: float
    ) -> None:
        """Takes over the rules; the CPU measures when it settles."""
        if (clip, scale, largest_finite) != self._prepared_for:
            bound = math.inf if clip.max_norm is None else clip.max_norm
            self._rules = torch.tensor([bound, largest_finite, *scale.numbers()], **_WIDE)
            self._prepared_for = clip, scale, largest_finite

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
        """Measures, decides, and moves the scale, the streak and the count of steps on.

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
        moving = (state.scale, state.growth_tracker, state.hysteresis, streak, steps)
        if not self._checked or any(map(operator.is_not, moving, self._checked)):
            _check(moving, _MOVING)
            self._checked = moving
        results = (self._skip, self._divisor, self._multiplier)
        rules = ORDERS[clip.order], clip.max_norm is not None, moves and scale.moves, unscaled
        bound = self._latest = BoundSettling(
            gradients.at.located, rules, (self._rules, *moving, *results), rating
        )
        overflows = overflow is not None and bool(overflow > 0)
        settings = None if rating is None else rating[1][2]
        return self.decision, bound.settle(None, loss, settings, overflows=overflows)

    def bound(
        self, *, loss: Tensor | None, unscaled: bool, moves: bool, rating: Any
    ) -> BoundSettling | None:
        """The step that was settled last, to be settled again.

        Args:
            loss, unscaled, moves, rating: as `settle` was given them.
        """
        return self._latest

    @staticmethod
    def undo(record: StepRecord, state: ScaleState, streak: Tensor, steps: Tensor) -> None:
        """Puts back what `settle` has moved on."""
        put_back(record, state, streak, steps)


class BoundSettling:
    """A step to be settled, as often as one likes, on the same tables, rules and state.

    Args:
        located: the gradients.
        rules: the order of the norm as the kernels call it, whether it is bounded, whether the
            scale may move, and whether the gradients have lost it.
        standing: the rules' numbers, what moves on, and the decision, in the kernel's order.
        rating: "adam" or "sgd", and its tables, for rates to be worked out on the way, or None.
    """

    def __init__(
        self,
        located: Located,
        rules: tuple[int, bool, bool, bool],
        standing: tuple[Tensor, ...],
        rating: tuple[str, tuple[Tensor, Tensor, Tensor, Tensor]] | None,
    ) -> None:
        kernel, tables = (None, ()) if rating is None else rating
        self._held = located, standing, tables  # So that what the addresses say stays there.
        self._count, self._settle = located.chunking.count, chunks_of(located).settle
        self._first = _address(located.pointers), *rules
        self._standing = tuple(map(_address, standing))
        self._skip = standing[-3]
        self._kernel = 0 if kernel is None else OPTIMIZERS[kernel]
        own, groups, _, rates = map(_address, tables) if tables else (0, 0, 0, 0)
        self._own, self._rates = (own, groups), rates

    def begin(self, stream: int | None) -> bool:
        """Does nothing: the CPU measures when it settles."""
        return True

    def settle(
        self,
        stream: int | None,
        loss: Tensor | None,
        settings: Tensor | None,
        *,
        overflows: bool = False,
    ) -> StepRecord:
        """Measures, decides, and moves the scale, the streak and the count of steps on.

        Args:
            stream: None; of a GPU it would be the current one.
            loss: 0-d; to be looked at for NaN and Inf.
            settings: of the optimizer's groups; None where no rates are worked out.
            overflows: whether NaN or Inf were found in the gradients before.
        """
        if loss is not None and loss.dtype not in CODES:
            loss = loss.to(torch.float64)
        found = torch.empty(5, self._count, **_WIDE)
        row = torch.empty(12, **_WIDE)
        tables = () if settings is None else (*self._own, _address(settings), self._rates)
        self._settle(
            *self._first, overflows,
            0 if loss is None else _address(loss), 0 if loss is None else CODES[loss.dtype],
            _address(found), _address(row), *self._standing, self._kernel, *tables,
        )  # fmt: skip
        return StepRecord(row, self._skip, lambda: statistics_of(found), lambda: found[3:].view(-1))


settler = Settler
"""Makes what settles the steps of one engine."""


class _BoundStep:
    """A step of `gradilocks.optim` on what lies where it lay; it holds the tables."""

    def __init__(self, chunks: Any, kernel: str, *tables: Tensor | None) -> None:
        self._step, self._tables = chunks.step, tables
        addresses = [0 if tensor is None else _address(tensor) for tensor in tables]
        self._args = OPTIMIZERS[kernel], *addresses

    def __call__(self, _: int | None) -> None:
        self._step(*self._args)


class Optimizers:
    """The steps of `gradilocks.optim`: `OptimizerKernels`."""

    @staticmethod
    def launch_rates(
        kernel: str, tables: tuple[Tensor, Tensor, Tensor, Tensor], skip: Tensor | None
    ) -> None:
        """Works out what the elements of each tensor share, and counts the step.

        Args:
            kernel: "adam" or "sgd".
            tables: what belongs to each tensor (its step for Adam, for SGD whether its buffer is
                still to be filled), its group, the groups' settings, and where the rates go.
            skip: 0-d float32; None to step whatever comes.
        """
        count = tables[-1].shape[0]
        skipping = 0 if skip is None else _address(skip)
        _library.cpu_rates(OPTIMIZERS[kernel], *map(_address, tables), count, skipping)

    @staticmethod
    def launch_step(
        kernel: str,
        chunking: Chunking,
        places: Tensor,
        gradients: Tensor,
        rates: Tensor,
        skip: Tensor | None,
        divisor: Tensor | None,
        kept: dict[Hashable, Any],
    ) -> None:
        """Steps every tensor.

        Args:
            kernel: "adam" or "sgd".
            chunking: its kinds are (parameter, gradient, state dtype, master, aligned, flags).
            places: addresses of parameters and state, as the kernel wants them.
            gradients: addresses of the gradients.
            rates: as `launch_rates` leaves them.
            skip: 0-d float32; None to step whatever comes.
            divisor: 0-d float32; None to take the gradients as they are.
            kept: what was made for the chunking at an earlier step; of whoever steps.
        """
        chunks = kept.get(chunking)
        if chunks is None:
            chunks = kept[chunking] = _cut(chunking, _step_code)
        chunks.step(
            OPTIMIZERS[kernel], *map(_address, (places, gradients, rates)),
            0 if skip is None else _address(skip), 0 if divisor is None else _address(divisor),
        )  # fmt: skip
        kept["last", chunking] = kernel, places, gradients, rates, skip, divisor

    @staticmethod
    def bound_step(
        chunking: Chunking, kept: dict[Hashable, Any]
    ) -> Callable[[int | None], object] | None:
        """The step that `launch_step` took last, to be taken again.

        Args:
            chunking, kept: as `launch_step` was given them.
        """
        if chunking not in kept:
            return None
        return _BoundStep(kept[chunking], *kept["last", chunking])


optimizers = Optimizers()
"""The steps of `gradilocks.optim`."""


def try_out(device: torch.device) -> None:
    """Runs the kernels on a few numbers; raises if they are wrong."""
    numbers = [torch.tensor([3.0, -4.0], **_FLOAT)]
    multiply_(numbers, torch.full((), 2.0, **_FLOAT))
    clamp_(numbers, torch.full((), 7.0, **_FLOAT))
    flag, _ = multiply_and_check_(numbers, torch.full((), 0.5, **_FLOAT))
    found = measure(numbers)
    norm = math.hypot(3.0, 3.5)
    if flag.item() or abs(found.norms.item() - norm) > 1e-6:
        raise RuntimeError(f"the kernels give {found.norms} where {norm} is right")


_MEASURED = "native"
_MOVING = (torch.float32, torch.int32, torch.int32, torch.int32, torch.int64)
"""Of scale, growth tracker, hysteresis, streak and count of steps."""


def chunks_of(located: Located) -> Any:
    """The chunks of tensors to be measured or changed, made once for tensors of such sizes."""
    chunking = located.chunking
    chunks = chunking.launches.get(_MEASURED)
    if chunks is None:
        chunks = chunking.launches[_MEASURED] = [_cut(chunking, lambda kind: CODES[kind[0]])]
    return chunks[0]


def _cut(chunking: Chunking, code_of: Callable[[Any], int]) -> Any:
    codes = torch.full((chunking.count,), -1, dtype=torch.int64, device="cpu")
    for bucket in chunking.buckets:
        owners = chunking.owner[bucket.first : bucket.first + bucket.chunks].to(torch.int64)
        codes[owners] = code_of(bucket.kind)
    kinds: Any = chunking.kinds
    return _library.CpuChunks(
        _address(chunking.sizes), _address(codes), chunking.count, chunking.chunk,
        any(kind[0] is torch.float64 for kind in kinds if kind),
    )  # fmt: skip


def _step_code(kind: Any) -> int:
    """What `cpu_optimizers.cpp` is to know of a tensor, in bits."""
    param, grad, state, master, _, flags = kind
    code = CODES[param] | CODES[grad] << 3 | CODES[state] << 6 | master << 9
    for place, (_, flag) in enumerate(flags):
        code |= flag << (10 + place)
    return int(code)


def _check(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    # The kernel gets addresses: another dtype would be read as something else.
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        assert tensor.dtype is dtype
        assert tensor.is_cpu
