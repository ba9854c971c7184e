"""The gradients of a list of parameters, found again at every step for a few list walks.

A step must notice whatever has changed: a parameter frozen, replaced, moved or given other storage,
a gradient with another address, size or layout. What has not changed since the last step (the table
of chunks, the optimizer's own pointers, the names) is not worked out again. 2,000 parameters with
new gradients take one to two milliseconds of the host's time.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradilocks import kernels
from gradilocks._torch import TensorBase, tensor_guards
from gradilocks.kernels.chunks import DTYPES, Located, all_aligned, kinds_of, placed, send
from gradilocks.kernels.cuda_graph import capturing, keep_if_captured
from gradilocks.ranks.layout import is_distributed
from gradilocks.step.gradients import roof_of

__all__ = ["Called", "Roll", "ends_of", "split"]

_address = TensorBase.data_ptr


class Called:
    """Plain gradients on one device: what stays from step to step, and this step's addresses."""

    def __init__(self, params: list[Tensor], grads: list[Tensor], addresses: list[int]) -> None:
        self.params = params
        self.device = grads[0].device
        self.kinds = kinds_of(grads, addresses)
        self.dtypes = [grad.dtype for grad in grads]
        self.sizes = [grad.numel() for grad in grads]
        self.homes = [param.data_ptr() for param in params]
        self._make = [_make_of(tensor) for tensor in params + grads]
        self._guard = tensor_guards(params + grads)
        self.aligned = all(address % 16 == 0 for address in addresses)
        self.roof = roof_of(grads)
        self.grads = grads
        self.addresses = addresses
        self.ends: list[int] | None = None
        """Where each optimizer's gradients end, once whoever has several of them has found out."""
        self._located: Located | None = None
        self._fleeting = capturing()

    def renew(self, grads: list[Tensor], addresses: list[int]) -> bool:
        """Takes this step's gradients if they are of the same make as the last step's."""
        if list(map(_address, self.params)) != self.homes or not self._alike(grads):
            return False
        if addresses != self.addresses or self._fleeting:
            if not self.aligned:
                return False
            numbers = array("q", addresses)
            if not all_aligned(numbers):
                return False
            self.addresses = addresses
            self._fleeting = capturing()  # What a graph sends is there only when it is replayed.
            if self._located is not None:
                self._located = self._located._replace(pointers=send(numbers, self.device))
        self.grads = grads
        return True

    def _alike(self, grads: list[Tensor]) -> bool:
        tensors = self.params + grads
        if self._guard is not None and self._guard.check(*tensors):
            return True
        if [_make_of(tensor) for tensor in tensors] != self._make:
            return False
        # Under autocast, or with requires_grad turned off, the guard sees what is none of ours.
        self._guard = tensor_guards(tensors)
        return True

    @property
    def refs(self) -> list[weakref.ref[Tensor]]:
        """The parameters; not kept, as torch.utils.swap_tensors refuses a tensor with weakrefs."""
        return [weakref.ref(param) for param in self.params]

    def release(self) -> None:
        """Lets go of the gradients, whose memory the next forward pass may need."""
        self.grads = []

    @property
    def located(self) -> Located:
        """The gradients as the kernels see them."""
        if self._located is None:
            self._located = placed(tuple(self.sizes), self.kinds, self.addresses, self.device)
        keep_if_captured(self._located)
        return self._located


class Roll:
    """Calls the roll of one list of parameters."""

    def __init__(self) -> None:
        self._groups: list[list[Tensor]] = []
        self._single: list[tuple[int, int]] = []
        self._lacking: list[Tensor] = []
        self._called: Called | None = None
        self.captured: list[object] = []
        """What the CUDA graphs of its optimizer's steps need."""

    def __reduce__(self) -> Any:
        return Roll, ()  # A copy looks for itself: it is over other parameters.

    def forget(self) -> None:
        """Looks at everything again next time."""
        self._called = None

    def call(self, groups: list[list[Tensor]]) -> Called | None:
        """The gradients of lists of parameters, or None if one of them is not plain.

        Plain is: dense, of a dtype that the kernels know, on the device of its parameter, and all
        on one device that the kernels serve. The same object comes back as long as nothing but
        addresses has changed.
        """
        called = self._called
        if called is not None and kernels.is_fused(called.device) and self._same(groups):
            try:
                grads = [param.grad for param in called.params]
                addresses = list(map(_address, grads))
            except (TypeError, RuntimeError):  # None, or a gradient without an address.
                pass
            else:
                if called.renew(grads, addresses):  # type: ignore[arg-type]
                    return called
        self._called = self._look(groups)
        return self._called

    def _same(self, groups: list[list[Tensor]]) -> bool:
        # Comparing lists is by far the fastest: where both hold the same object, Python asks no
        # further. Where they do not, tensors are compared: several elements raise, and so does a
        # lazy parameter; one element may be equal by chance and is looked at again.
        try:
            if self._groups != groups:
                return False
        except (RuntimeError, ValueError):
            return False
        known = self._groups
        return all(known[g][k] is groups[g][k] for g, k in self._single) and all(
            param.grad is None for param in self._lacking
        )

    def _look(self, groups: list[list[Tensor]]) -> Called | None:
        params = [param for group in groups for param in group]
        if not params or not kernels.is_fused(params[0].device):
            return None
        having: list[Tensor] = []
        grads: list[Tensor] = []
        lacking: list[Tensor] = []
        for param in params:
            grad = param.grad
            if grad is None:
                if is_distributed(param):  # Its gradient may be on another rank.
                    return None
                lacking.append(param)
            elif not _plain(param, grad) or grad.device != (grads or [grad])[0].device:
                return None
            else:
                having.append(param)
                grads.append(grad)
        self._groups, self._lacking = [list(group) for group in groups], lacking
        self._single = [
            (g, k)
            for g, group in enumerate(groups)
            for k, param in enumerate(group)
            if is_lazy(param) or param.numel() == 1
        ]
        if not having or not kernels.is_fused(grads[0].device):
            return None
        addresses = [grad.data_ptr() for grad in grads]
        called = Called(having, grads, addresses)
        return called if all(kind is not None for kind in called.kinds) else None


def _plain(param: Tensor, grad: Tensor) -> bool:
    return (
        type(grad) in (Tensor, torch.nn.Parameter)
        and grad.layout is torch.strided
        and grad.dtype in DTYPES
        and grad.device == param.device
        and grad.shape == param.shape
        and not grad.is_meta
        and not grad.is_neg()  # Its memory holds the opposite.
        and not is_distributed(param)
    )


def _make_of(tensor: Tensor) -> tuple[object, ...]:
    """All that a kernel's tables depend on, but for the address."""
    shape, stride = tensor.shape, tensor.stride()
    return type(tensor), tensor.dtype, tensor.device, shape, stride, tensor.is_neg()


def ends_of(called: Called, optimizers: Sequence[Any]) -> list[int]:
    """Where each optimizer's gradients end among all of them."""
    ends, place = [], 0
    having = {id(param) for param in called.params}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            place += sum(id(param) in having for param in group["params"])
        ends.append(place)
    return ends


def split(tensors: list[Tensor], ends: Sequence[int] | None) -> list[Sequence[Tensor]]:
    """What belongs to each optimizer; None says that there is one."""
    if ends is None or len(ends) == 1:
        return [tensors]
    return [tensors[a:b] for a, b in zip([0, *ends], ends, strict=False)]
