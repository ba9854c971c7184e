"""The back ends behind the engine, chosen by device in one table.

A back end is a module with the functions of `Backend`, as `reference` has them. One that reaches
tensors by their addresses has those of `SettlingBackend` too. Another one is a module more and a
line in `_TABLE`. The CPU's is C++ that is built on this machine (`native.py`): which one serves is
fixed when the CPU is first used, alike on all ranks, because the kernels may differ from plain
torch in the last bit; a library that is done later serves the next process.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gradilocks.eager import users_line
from gradilocks.kernels import native, reference
from gradilocks.kernels.chunks import ORDERS, AddressedTensors, Chunking
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.kernels.failure import KernelFailed, report_to
from gradilocks.kernels.native import build_native, find_native
from gradilocks.kernels.rank_choice import first_choice, has_company
from gradilocks.values import Decision, NonFinite, ScaleState, Statistics, StepRecord

__all__ = [
    "BACKENDS",
    "ORDERS",
    "Backend",
    "BoundSettling",
    "KernelFailed",
    "OptimizerKernels",
    "Settler",
    "SettlingBackend",
    "agree_with_ranks",
    "build_native",
    "by_device",
    "describe",
    "find_native",
    "give_up",
]


class Backend(Protocol):
    """What an implementation offers. All tensors of one call lie on one device."""

    BY_ADDRESS: bool
    """Whether it reaches tensors by their addresses, and is a SettlingBackend."""

    def measure(
        self, tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False
    ) -> Statistics:
        """Reads every tensor and says what is in it."""

    def multiply_(self, tensors: Sequence[Tensor], multiplier: Tensor) -> None:
        """Multiplies every tensor in place."""

    def multiply_each_(self, tensors: Sequence[Tensor], factors: Tensor) -> None:
        """Multiplies every tensor in place by its own factor."""

    def multiply_and_check_(
        self, tensors: Sequence[Tensor], multiplier: Tensor | None
    ) -> tuple[Tensor, Callable[[], NonFinite]]:
        """Multiplies every tensor in place and says whether the result holds NaN or Inf.

        Returns:
            float32, 0-d: exactly 1 if an element is NaN or Inf, else exactly 0. And what counts
            them, tensor by tensor, if somebody asks.
        """

    def clamp_(self, tensors: Sequence[Tensor], bound: Tensor) -> None:
        """Bounds the magnitude of every element in place; NaN stays NaN."""


class BoundSettling(Protocol):
    """A step that was settled, to be settled again on the same tables, rules and state."""

    def begin(self, stream: int | None) -> bool:
        """Begins to measure; False, and nothing has been done, if that cannot be done from here."""

    def settle(self, stream: int | None, loss: Tensor | None, settings: Tensor) -> StepRecord:
        """Decides, and moves the scale, the streak and the count of steps on.

        Args:
            stream: the device's current one, as `begin` was given it.
            loss: 0-d, of the same dtype as the loss of the step that was settled.
            settings: of the optimizer's groups, which alone of its tables may be another.
        """


class Settler(Protocol):
    """Settles the steps of one engine by the rules of its policies, on the device."""

    device: torch.device
    decision: Decision
    """Of the latest step: the same tensors at every step."""

    def begin(
        self, gradients: AddressedTensors, clip: Any, scale: Any, *, largest_finite: float
    ) -> None:
        """Begins to measure, so that a device is at work while the host prepares the rest.

        Called before each `settle`, with the same gradients and rules.
        """

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
        """Decides, and moves the scale, the streak and the count of steps on."""

    def bound(
        self, *, loss: Tensor | None, unscaled: bool, moves: bool, rating: Any
    ) -> BoundSettling | None:
        """The step that was settled last, to be settled again; None if it cannot be bound.

        Args:
            loss, unscaled, moves, rating: as `settle` was given them, without an overflow.
        """

    def undo(self, record: StepRecord, state: ScaleState, streak: Tensor, steps: Tensor) -> None:
        """Puts back what `settle` has moved on."""


class OptimizerKernels(Protocol):
    """The steps of `gradilocks.optim` on tensors whose addresses are known."""

    def launch_rates(
        self, kernel: str, tables: tuple[Tensor, Tensor, Tensor, Tensor], skip: Tensor | None
    ) -> None:
        """Works out what the elements of each tensor share, and counts the step."""

    def launch_step(
        self,
        kernel: str,
        chunking: Chunking,
        places: Tensor,
        gradients: Tensor,
        rates: Tensor,
        skip: Tensor | None,
        divisor: Tensor | None,
        kept: dict[Hashable, Any],
    ) -> None:
        """Steps every tensor by "adam" or "sgd"; `kept` is what it may keep for the next step."""

    def bound_step(
        self, chunking: Chunking, kept: dict[Hashable, Any]
    ) -> Callable[[int | None], object] | None:
        """The step that `launch_step` took last, to be taken again on a stream.

        Args:
            chunking, kept: as `launch_step` was given them.

        Returns:
            None if it cannot be bound.
        """


class SettlingBackend(Backend, Protocol):
    """What a back end offers besides that reaches tensors by their addresses.

    Each raises KernelFailed if a kernel does not compile; nothing has been written then.
    """

    optimizers: OptimizerKernels

    def try_out(self, device: torch.device) -> None:
        """Runs each kernel on a few numbers; raises if one does not compile or is wrong."""

    def settler(self, device: torch.device) -> Settler:
        """A new Settler on `device`."""

    def limit(self, tensors: AddressedTensors, bound: float, order: float) -> tuple[Tensor, Tensor]:
        """The norm, 0-d float64, and the coefficient that bounds it; `order` is one of ORDERS."""

    def advance(self, state: ScaleState, skip: Tensor, numbers: tuple[float, ...]) -> None:
        """Moves a dynamic scale on after a step that was taken or skipped."""


_logger = logging.getLogger("gradilocks")
_WAIT_FOR_RANKS = 120.0
"""Seconds that a rank waits for its build of a library that another rank computes with."""

# Device type -> the module that serves it, and whose kernels those are. A device that is not listed
# is served by the reference.
_TABLE = {"cpu": ("native_backend", "C++"), "cuda": ("triton_backend", "Triton")}


class _Backends(dict[str, Backend]):
    """Device type → the back end that serves it; chosen on first use."""

    def __missing__(self, kind: str) -> Backend:
        if kind in _TABLE and kind != "cpu" and capturing():
            raise RuntimeError(
                "the kernels cannot be tried out while a CUDA graph is captured. Run a step or two "
                "before the capture, as for torch's own optimizers."
            )
        self[kind], _reasons[kind] = _choose(kind)
        return self[kind]


BACKENDS = _Backends()
_reasons: dict[str, str] = {}


def give_up(device: torch.device, what: str, error: Exception) -> None:
    """Serves `device` with plain torch from here on, and says so once.

    Args:
        device: of the kind that is given up.
        what: has failed.
        error: how.
    """
    kind = device.type
    if kind in BACKENDS and BACKENDS[kind].BY_ADDRESS:
        why = _reason(what, error)
        BACKENDS[kind], _reasons[kind] = cast("Backend", reference), f"reference: {why}"
        _warn(kind, why)


report_to(give_up)


def describe() -> dict[str, str]:
    """Which implementation each device takes, which language walks over the tensors, and why.

    Example:
        >>> describe()["cpu"].partition(":")[0] in ("reference", "fused")
        True
        >>> describe()["walk"].partition(":")[0] in ("C++", "Python")
        True
    """
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    told = {kind: _reasons[kind] for kind in kinds if BACKENDS[kind] is not None}
    return {**told, "walk": native.status()}


def _choose(kind: str) -> tuple[Backend, str]:
    plain = cast("Backend", reference)
    if kind not in _TABLE:
        return plain, f"reference: plain torch serves {kind}"
    module, whose = _TABLE[kind]
    if kind == "cpu":
        without = _without_native()
        if without:
            return plain, f"reference: plain torch serves cpu: {without}"
    try:
        fused: Any = importlib.import_module(f"gradilocks.kernels.{module}")
    except Exception as error:  # A Triton of another time may fail in any way.
        return plain, f"reference: {whose} cannot be imported ({error})"
    before = torch.cuda.get_sync_debug_mode() if kind == "cuda" else 0
    try:
        if before:  # Trying out waits, once, whatever the user has set.
            torch.cuda.set_sync_debug_mode(0)
        fused.try_out(torch.device(kind))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if "out of memory" in str(error):
            raise
        why = _reason(f"{whose}'s kernels do not run on {kind}", error)
        _warn(kind, why)
        return plain, f"reference: {why}"
    finally:
        if before:
            torch.cuda.set_sync_debug_mode(before)
    return cast("Backend", fused), f"fused: {whose}'s kernels run on {kind}"


def agree_with_ranks() -> None:
    """Has the CPU compute as the other ranks do, also if it was first used before they met.

    To be called before gradients are looked at. Once they have agreed, nothing changes any more.
    """
    global _has_agreed
    if _has_agreed or not has_company():
        return
    _has_agreed = True
    chosen = _reasons.get("cpu", "").partition(":")[0]
    if chosen == ("fused" if "cpu" in BACKENDS and BACKENDS["cpu"].BY_ADDRESS else "reference"):
        BACKENDS.pop("cpu", None)  # Chosen again on its next use, by all of them alike.


_has_agreed = False


def _without_native() -> str:
    """Why plain torch serves the CPU; empty if the native library does, on all ranks."""
    library = native.library()
    chosen = first_choice("cpu kernels", "reference" if library is None else "native")
    if chosen == "reference":
        if library is not None:
            return "another rank has begun with plain torch, and all compute alike"
        if native.is_coming():
            return "there was no C++ library yet when it was first used, 'walk' says why"
        return native.status().removeprefix("Python: ")  # As "GRADILOCKS_NATIVE=off".
    if library is None:
        _logger.info("another rank computes with the C++ library; waiting for its build here")
    if native.library_within(_WAIT_FOR_RANKS) is not None:
        return ""
    _warn(
        "cpu",
        "another rank computes with the C++ library, which is not there on this one "
        f"({native.status()}), so copies of a model may differ in the last bit from rank to rank. "
        "Run `gradilocks build` on every machine, or set GRADILOCKS_NATIVE=off for all ranks.",
    )
    return "another rank has a C++ library and this one has none, 'walk' says why"


def _reason(what: str, error: Exception) -> str:
    return f"{what} ({type(error).__name__}: {error})"


def _warn(kind: str, why: str) -> None:
    warnings.warn(
        f"Gradilocks goes on with plain torch on {kind}, which is slower: {why}",
        RuntimeWarning,
        stacklevel=users_line(),
    )


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """The tensors' places in the sequence, device by device."""
    if isinstance(tensors, AddressedTensors):
        return {tensors.at.device: list(range(len(tensors)))}
    if len({tensor.device for tensor in tensors}) == 1:
        return {tensors[0].device: list(range(len(tensors)))}
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return places
