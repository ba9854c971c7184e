"""The gradients of a list of parameters, found again at every step for a few list walks.

A step must notice whatever has changed: a parameter frozen, replaced, moved or given other storage,
a gradient with another address, size or layout. What has not changed since the last step (the table
of chunks, the optimizer's own pointers, the names) is not worked out again. 2,000 parameters with
new gradients take about half a millisecond of the host's time.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gradilocks import kernels
from gradilocks.gradients import is_distributed, roof_of
from gradilocks.kernels.located import DTYPES, Located, kinds_of, placed
from gradilocks.kernels.table import keep_if_captured, send

__all__ = ["Called", "Roll"]

_BASE = torch._C.TensorBase
_address, _numel, _contiguous = _BASE.data_ptr, _BASE.numel, _BASE.is_contiguous


class Called:
    """Plain gradients on one device: what stays from step to step, and this step's addresses."""

    def __init__(self, params: list[Tensor], grads: list[Tensor], addresses: list[int]) -> None:
        self.params = params
        self.refs = [weakref.ref(param) for param in params]
        self.device = grads[0].device
        self.kinds = kinds_of(grads, addresses)
        self.dtypes = [grad.dtype for grad in grads]
        self.sizes = [grad.numel() for grad in grads]
        self.homes = [param.data_ptr() for param in params]
        self.contiguous = [grad.is_contiguous() for grad in grads]
        self.strides = {
            place: grads[place].stride() for place, plain in enumerate(self.contiguous) if not plain
        }
        self.aligned = all(address % 16 == 0 for address in addresses)
        self.roof = roof_of(grads)
        self.grads = grads
        self.addresses = addresses
        self._located: Located | None = None

    def renew(self, grads: list[Tensor], addresses: list[int]) -> bool:
        """Takes this step's gradients if they are of the same make as the last step's."""
        if (
            list(map(_numel, grads)) != self.sizes
            or list(map(_contiguous, grads)) != self.contiguous
            or list(map(_address, self.params)) != self.homes
        ):
            return False
        if any(grads[place].stride() != stride for place, stride in self.strides.items()):
            return False
        if addresses != self.addresses:
            if not self.aligned:
                return False
            host = torch.frombuffer(array("q", addresses), dtype=torch.int64)
            if bool((host & 15).any()):
                return False
            self.addresses = addresses
            if self._located is not None:
                self._located = self._located._replace(pointers=send(host, self.device))
        self.grads = grads
        return True

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
        if called is not None and self._same(groups):
            try:
                grads = [param.grad for param in called.params]
                addresses = list(map(_address, grads))  # type: ignore[arg-type]
            except (TypeError, RuntimeError):  # None, or a gradient without an address.
                pass
            else:
                if called.renew(grads, addresses):  # type: ignore[arg-type]
                    return called
        self._called = self._look(groups)
        return self._called

    def _same(self, groups: list[list[Tensor]]) -> bool:
        # Comparing lists is by far the fastest: where both hold the same object, Python asks no
        # further. Where they do not, tensors are compared: several elements raise, one element
        # may be equal by chance and is looked at again.
        try:
            if self._groups != groups:
                return False
        except RuntimeError:
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
            if param.numel() == 1
        ]
        if not having:
            return None
        addresses = [grad.data_ptr() for grad in grads]
        called = Called(having, grads, addresses)
        return called if all(kind is not None for kind in called.kinds) else None


def _plain(param: Tensor, grad: Tensor) -> bool:
    return (
        type(grad) in _PLAIN_TYPES
        and grad.layout is torch.strided
        and grad.dtype in DTYPES
        and grad.device == param.device
        and not grad.is_meta
    )


_PLAIN_TYPES: Sequence[type] = (Tensor, torch.nn.Parameter)
