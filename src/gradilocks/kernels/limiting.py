"""A norm and the coefficient that bounds it, in two launches: what `clip_grad_norm_` needs.

The kernel that settles a step does it, with a scale of 1 that does not move. What it writes besides
is kept a stream, so that nothing has to be made for a call but the norm itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradilocks.kernels.captured import capturing, keep_if_captured
from gradilocks.kernels.fused import ORDERS, Standing, measure_located, scratch_for, settle
from gradilocks.kernels.located import locate
from gradilocks.kernels.table import send, stream_of

__all__ = ["limit"]

_MOST_BOUNDS = 64


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


def limit(tensors: Sequence[Tensor], bound: float, order: float) -> tuple[Tensor, Tensor] | None:
    """The norm of tensors of one device, and what they are to be multiplied by.

    Args:
        tensors: at least one.
        bound: the largest norm.
        order: the p of the norm.

    Returns:
        Both 0-d float64; the coefficient is good until the next call on this stream. None if the
        kernels cannot take every tensor, or not this order.

    Raises:
        KernelFailed: one of them does not compile; nothing has been done.
    """
    located = locate(tensors)
    if located.rest or order not in ORDERS:
        return None
    device = located.device
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
