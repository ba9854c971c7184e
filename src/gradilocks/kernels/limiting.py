"""A norm and the coefficient that bounds it, in two launches: what `clip_grad_norm_` needs.

The kernel that settles a step does it, with a scale of 1 that does not move. What it writes besides
is kept a stream, so that nothing has to be made for a call but the norm itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.kernels.captured import capturing, keep_if_captured
from gradilocks.kernels.fused import (
    CHANGE_CHUNK,
    Standing,
    change_located,
    measure_located,
    scratch_for,
    settle,
)
from gradilocks.kernels.located import DTYPES, Located, all_aligned, kinds_of, placed
from gradilocks.kernels.table import send, stream_of

__all__ = ["Plain", "limit", "multiply_", "plain_gradients"]

_MOST_BOUNDS = 64
_BASE = torch._C.TensorBase


class _Desk:
    """What the kernel reads and writes besides the norm, on one stream."""

    def __init__(self, device: torch.device) -> None:
        def zero(dtype: torch.dtype) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        self.device = device
        self.arrived, self.scale = zero(torch.int32), torch.ones((), device=device)
        self.moving = (zero(torch.int32), zero(torch.int32), zero(torch.int32), zero(torch.int64))
        self.coefficient = zero(torch.float64)
        self.after = (zero(torch.float32), zero(torch.float32), self.coefficient)
        self._rules: dict[float, Tensor] = {}

    def standing(self, bound: float) -> Standing:
        """Everything in the kernel's order, with `bound` as the largest norm."""
        rules = self._rules.get(bound)
        if rules is None:
            if len(self._rules) >= _MOST_BOUNDS:
                self._rules.clear()
            numbers = [bound, torch.finfo(torch.float64).max]
            rules = send(torch.tensor(numbers, dtype=torch.float64, device="cpu"), self.device)
            self._rules[bound] = rules
        return Standing((self.arrived, rules, self.scale, *self.moving), self.after)


_desks: dict[tuple[torch.device, int | None], _Desk] = {}


class Plain(NamedTuple):
    """Gradients that the kernels take as they are, all on one device."""

    tensors: list[Tensor]
    device: torch.device
    addresses: list[int]
    sizes: tuple[int, ...]
    kinds: tuple[tuple[torch.dtype, int] | None, ...]
    double: bool
    """Whether one of them is float64."""

    def located(self, chunk: int | None = None) -> Located:
        """Where they are, in chunks of so many elements."""
        return placed(self.sizes, self.kinds, self.addresses, self.device, chunk=chunk)


def plain_gradients(params: Sequence[Tensor]) -> Plain | None:
    """The gradients of `params` if the kernels take every one as it is, else None.

    Looks at all of them with a few list walks, in a third of the time of the stages.
    """
    tensors = [grad for param in params if (grad := param.grad) is not None]
    if not tensors or set(map(type, tensors)) != {Tensor}:
        return None
    device = tensors[0].device
    if not kernels.is_fused(device) or len(set(map(id, params))) != len(params):
        return None
    dtypes = [tensor.dtype for tensor in tensors]
    different = set(dtypes)
    if not different.issubset(DTYPES) or len(set(map(_BASE.get_device, tensors))) != 1:
        return None
    try:
        if not all(map(_BASE.is_contiguous, tensors)):
            return None
        addresses = list(map(_BASE.data_ptr, tensors))
    except RuntimeError:  # A sparse one has neither.
        return None
    if all_aligned(array("q", addresses)):
        kinds = tuple([(dtype, 16) for dtype in dtypes])
    else:
        kinds = kinds_of(tensors, addresses)  # type: ignore[assignment]
    sizes = tuple(map(_BASE.numel, tensors))
    return Plain(tensors, device, addresses, sizes, kinds, torch.float64 in different)


def limit(plain: Plain, bound: float, order: float) -> tuple[Tensor, Tensor]:
    """The norm of the gradients, and what they are to be multiplied by.

    Args:
        plain: at least one.
        bound: the largest norm.
        order: the p of the norm: 1, 2 or inf.

    Returns:
        Both 0-d float64; the coefficient is good until the next call on this stream.

    Raises:
        KernelFailed: one of the kernels does not compile; nothing has been done.
    """
    located, device = plain.located(), plain.device
    # What a graph makes is there only when it is replayed.
    desk = None if capturing() else _desks.get((device, stream_of(device)))
    if desk is None:
        desk = _Desk(device)
        if not capturing():
            _desks[device, stream_of(device)] = desk
    scratch, standing = scratch_for(located), desk.standing(bound)
    measure_located(located, scratch, order=order)
    found = torch.empty(5, located.layout.count, dtype=torch.float64, device=device)
    row = torch.empty(12, dtype=torch.float64, device=device)
    settle(
        located, scratch, found, row, standing, None, None,
        order=order, clip=True, dynamic=False, unscaled=True,
    )  # fmt: skip
    keep_if_captured(desk, standing)
    return row[2], desk.coefficient


def multiply_(plain: Plain, coefficient: Tensor) -> None:
    """Multiplies every gradient in place; reads nothing if the coefficient is 1.

    Raises:
        KernelFailed: the kernel does not compile; nothing has been written.
    """
    change_located(plain.located(CHANGE_CHUNK), coefficient, clamp=False)
    torch.autograd.graph.increment_version(plain.tensors)
