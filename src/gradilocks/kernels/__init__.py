"""The implementations behind `measure` and `update`, chosen by device in one table.

Every implementation is a module with the functions of `reference`, same names and signatures.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from gradilocks.eager import users_line
from gradilocks.kernels import reference
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.values import NonFinite, Statistics

__all__ = ["KernelFailed", "Kernels", "by_device", "describe", "for_device", "give_up", "is_fused"]


class KernelFailed(RuntimeError):
    """A kernel does not compile here. It has not run; plain torch serves the device from now on.

    Raised to whoever launches, who then takes the other way; no user sees it.
    """


class Kernels(Protocol):
    """What an implementation offers. All tensors of one call lie on one device."""

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
    ) -> NonFinite:
        """Multiplies every tensor in place and says how much of the result is NaN or Inf."""

    def clamp_(self, tensors: Sequence[Tensor], bound: Tensor) -> None:
        """Bounds the magnitude of every element in place; NaN stays NaN."""


# Device type -> implementation. A device that is not listed is served by the reference.
_TABLE = {"cpu": "reference", "cuda": "fused"}

_chosen: dict[str, tuple[Kernels, str]] = {}


def for_device(device: torch.device) -> Kernels:
    """The implementation that serves `device`; chosen on first use."""
    kind = device.type
    if kind not in _chosen:
        if _TABLE.get(kind) == "fused" and capturing():
            raise RuntimeError(
                "the kernels cannot be tried out while a CUDA graph is captured. Run a step or two "
                "before the capture, as for torch's own optimizers."
            )
        _chosen[kind] = _choose(kind)
    return _chosen[kind][0]


def is_fused(device: torch.device) -> bool:
    """Whether the kernels in Triton serve `device`."""
    return for_device(device) is not cast("Kernels", reference)


def give_up(device: torch.device, what: str, error: Exception) -> None:
    """Serves `device` with plain torch from here on, and says so once.

    Args:
        device: of the kind that is given up.
        what: has failed.
        error: how.
    """
    if device.type in _chosen and is_fused(device):
        why = _reason(what, error)
        _chosen[device.type] = cast("Kernels", reference), f"reference: {why}"
        _warn(device.type, why)


def describe() -> dict[str, str]:
    """Which implementation each device takes, and why.

    Example:
        >>> describe()["cpu"]
        'reference: plain torch serves cpu'
    """
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for kind in kinds:
        for_device(torch.device(kind))
    return {kind: why for kind, (_, why) in _chosen.items()}


def _choose(kind: str) -> tuple[Kernels, str]:
    plain = cast("Kernels", reference)
    if _TABLE.get(kind) != "fused":
        return plain, f"reference: plain torch serves {kind}"
    try:
        fused = importlib.import_module("gradilocks.kernels.fused")
    except Exception as error:  # A Triton of another time may fail in any way.
        return plain, f"reference: Triton cannot be imported ({error})"
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
        why = _reason(f"Triton's kernels do not run on {kind}", error)
        _warn(kind, why)
        return plain, f"reference: {why}"
    finally:
        if before:
            torch.cuda.set_sync_debug_mode(before)
    return cast("Kernels", fused), f"fused: Triton's kernels run on {kind}"


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
    if len({tensor.device for tensor in tensors}) == 1:
        return {tensors[0].device: list(range(len(tensors)))}
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return places
