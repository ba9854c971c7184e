"""What the drop-ins need, in two launches: a look while unscaling, or a norm and its limit.

The kernel that settles a step does it, with a scale of 1 that does not move. What it writes besides
is kept a stream, so that little has to be made for a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks._torch import TensorBase
from gradilocks.kernels import pieces
from gradilocks.kernels.chunks import (
    DTYPES,
    Located,
    all_aligned,
    kinds_of,
    placed,
    rules_for,
    stream_of,
)
from gradilocks.kernels.cuda_graph import capturing, keep_if_captured
from gradilocks.kernels.fused import (
    CHANGE_CHUNK,
    Standing,
    change_located,
    measure_located,
    nonfinite_of,
    scratch_for,
    settle,
)

__all__ = [
    "Plain",
    "Seen",
    "limit",
    "look",
    "multiply_",
    "nonfinite_of",
    "plain_gradients",
]


class _Desk:
    """What the kernel reads and writes besides what it is asked for, on one stream."""

    def __init__(self, device: torch.device) -> None:
        def zero(dtype: torch.dtype) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        self.arrived = zero(torch.int32)
        self.scale = torch.ones((), dtype=torch.float32, device=device)
        self.moving = (zero(torch.int32), zero(torch.int32), zero(torch.int32), zero(torch.int64))
        self.skip, self.divisor = zero(torch.float32), zero(torch.float32)


_desks: dict[tuple[torch.device, int | None], _Desk] = {}
_ROOF = torch.finfo(torch.float64).max


class Plain(NamedTuple):
    """Gradients that the kernels take as they are, all on one device."""

    tensors: list[Tensor]
    device: torch.device
    addresses: list[int]
    sizes: tuple[int, ...]
    kinds: tuple[tuple[torch.dtype, int] | None, ...]
    dtypes: set[torch.dtype]

    def located(self, chunk: int | None = None) -> Located:
        """Where they are, in chunks of so many elements."""
        return placed(self.sizes, self.kinds, self.addresses, self.device, chunk=chunk)


def plain_gradients(params: Sequence[Tensor]) -> Plain | None:
    """The gradients of `params` if the kernels take every one as it is, else None.

    Looks at all of them with a few list walks, in half the time of the stages.
    """
    tensors = [grad for param in params if (grad := param.grad) is not None]
    if not tensors or set(map(type, tensors)) != {Tensor}:
        return None
    device = tensors[0].device
    if not kernels.is_fused(device) or len(set(map(id, params))) != len(params):
        return None
    dtypes = [tensor.dtype for tensor in tensors]
    different = set(dtypes)
    if not different.issubset(DTYPES) or len(set(map(TensorBase.get_device, tensors))) != 1:
        return None
    try:
        if not all(map(TensorBase.is_contiguous, tensors)) and not all(
            map(pieces.is_dense, tensors)
        ):
            return None
        addresses = list(map(TensorBase.data_ptr, tensors))
    except RuntimeError:  # A sparse one has neither.
        return None
    if all_aligned(array("q", addresses)):
        kinds = tuple([(dtype, 16) for dtype in dtypes])
    else:
        kinds = kinds_of(tensors, addresses)  # type: ignore[assignment]
    sizes = tuple(map(TensorBase.numel, tensors))
    return Plain(tensors, device, addresses, sizes, kinds, different)


class Seen(NamedTuple):
    """What one pass over the gradients found, on the device."""

    located: Located
    scratch: tuple[Tensor, Tensor]
    found: Tensor
    """As `gather_kernel` leaves it."""
    skip: Tensor
    """float32, 0-d: exactly 1 if an element is NaN or Inf, else exactly 0."""


def look(plain: Plain, multiplier: Tensor | None) -> Seen:
    """Multiplies the gradients in place and looks at the result, in two launches.

    Args:
        plain: the gradients.
        multiplier: 0-d, on their device; None to look without multiplying.

    Raises:
        KernelFailed: one of the kernels does not compile; nothing has been done.
    """
    located, device = plain.located(), plain.device
    found = torch.empty(5, located.layout.count, dtype=torch.float64, device=device)
    skip = torch.empty((), dtype=torch.float32, device=device)
    seen = Seen(located, scratch_for(located), found, skip)
    if "looked" not in located.layout.launches:  # Nothing is multiplied if that cannot be launched.
        _settled(seen, 2.0, None, skip=skip, prepare_only=True)
        located.layout.launches["looked"] = []
    measure_located(located, seen.scratch, multiplier=multiplier)
    if multiplier is not None:
        torch.autograd.graph.increment_version(plain.tensors)
    _settled(seen, 2.0, None, skip=skip)
    return seen


def limit(plain: Plain, bound: float, order: float) -> tuple[Tensor, Tensor]:
    """The norm of the gradients, and what they are to be multiplied by, in two launches.

    Args:
        plain: at least one.
        bound: the largest norm.
        order: the p of the norm: 1, 2 or inf.

    Returns:
        Both 0-d float64.

    Raises:
        KernelFailed: one of the kernels does not compile; nothing has been done.
    """
    located = plain.located()
    found = torch.empty(5, located.layout.count, dtype=torch.float64, device=plain.device)
    seen = Seen(located, scratch_for(located), found, found)
    measure_located(located, seen.scratch, order=order)
    return _settled(seen, order, bound)


def _settled(
    seen: Seen,
    order: float,
    bound: float | None,
    *,
    skip: Tensor | None = None,
    prepare_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm, and the coefficient for `bound` if there is one."""
    device = seen.located.device
    # What a graph makes is there only when it is replayed.
    desk = None if capturing() else _desks.get((device, stream_of(device)))
    if desk is None:
        desk = _Desk(device)
        if not capturing():
            _desks[device, stream_of(device)] = desk
    rules = rules_for((_ROOF if bound is None else bound, _ROOF), device)
    row = torch.empty(12, dtype=torch.float64, device=device)
    coefficient = torch.empty((), dtype=torch.float64, device=device)
    standing = Standing(
        (desk.arrived, rules, desk.scale, *desk.moving),
        (desk.skip if skip is None else skip, desk.divisor, coefficient),
    )
    settle(
        seen.located, seen.scratch, seen.found, row, standing, None, None, order=order,
        clip=bound is not None, dynamic=False, unscaled=True, prepare_only=prepare_only,
    )  # fmt: skip
    keep_if_captured(desk, standing, seen)
    return row[2], coefficient


def multiply_(plain: Plain, coefficient: Tensor) -> None:
    """Multiplies every gradient in place; reads nothing if the coefficient is 1.

    Raises:
        KernelFailed: the kernel does not compile; nothing has been written.
    """
    change_located(plain.located(CHANGE_CHUNK), coefficient, clamp=False)
    torch.autograd.graph.increment_version(plain.tensors)
