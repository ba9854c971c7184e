"""Parameters before and after a step → the norm of each, and how far the step has moved it.

A tensor of up to 65,536 elements is looked at whole. Of a larger one 4,096 runs of 16 elements are
taken at even distances, the same ones before and after: the ratio is then an estimate, and the copy
stays small whatever the size of the model. Runs, because a cache line holds 16 elements and is read
whole anyway; an odd distance, because an even one would see the same few columns of a matrix again
and again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradilocks import _torch, kernels
from gradilocks.kernels import pieces
from gradilocks.ranks.layout import is_distributed
from gradilocks.values import moved

__all__ = ["MOST", "Weights"]

MOST = 65_536
_RUN = 16
_RUNS = MOST // _RUN


class Weights:
    """What a few parameters are before a step."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = [_local(param) for param in params]
        self._absent = [param.is_meta for param in self._params]
        if any(self._absent):  # Nothing is known of what is on the meta device.
            nothing = torch.zeros(1, device="cpu")
            self._params = [nothing if p.is_meta else p for p in self._params]
        with torch.no_grad():
            self._before = [_copy(param) for param in self._params]

    def moved_by_step(self, home: torch.device) -> tuple[Tensor, Tensor]:
        """The norms before the step, and ‖change‖ / ‖before‖; both 1-d, on `home`, no wait.

        0 where nothing has changed, whatever the norm.
        """
        count = len(self._params)
        norms = torch.zeros(2, count, dtype=torch.float32, device=home)
        with torch.no_grad():
            for places in kernels.by_device(self._before).values():
                before = [self._before[place] for place in places]
                change = [_copy(self._params[place]) for place in places]
                _torch.sub_(change, before)
                both = _torch.norms(before) + _torch.norms(change)
                found = torch.stack([norm.to(torch.float32) for norm in both])
                found = moved(found.view(2, len(places)), home)
                if len(places) == count:
                    norms = found
                else:
                    at = torch.tensor(places, device="cpu").to(home, non_blocking=True)
                    norms.index_copy_(1, at, found)
            weight, change_norm = norms.unbind()
            still = change_norm == 0
            update = torch.where(still, torch.zeros_like(weight), change_norm / weight)
            if any(self._absent):
                gap = [math.nan if absent else 0.0 for absent in self._absent]
                gaps = moved(torch.tensor(gap, dtype=torch.float32, device="cpu"), home)
                weight, update = weight + gaps, update + gaps
            return weight * moved(self._factors(), home), update

    def _factors(self) -> Tensor:
        """By what the norm of each sample is multiplied to estimate that of its tensor."""
        pairs = zip(self._params, self._before, strict=True)
        ratios = [math.sqrt(max(p.numel(), 1) / max(b.numel(), 1)) for p, b in pairs]
        return torch.tensor(ratios, dtype=torch.float32, device="cpu")


def _local(param: Tensor) -> Tensor:
    if is_distributed(param):
        param = cast("Tensor", cast("Any", param).to_local())
    param = param.detach()
    return torch.view_as_real(param) if param.is_complex() else param


def _copy(tensor: Tensor) -> Tensor:
    """The sample of a tensor, in float32 or wider, as one dimension of its own memory."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return _sample(tensor).to(dtype, copy=True).reshape(-1)


def _sample(tensor: Tensor) -> Tensor:
    count = tensor.numel()
    if count <= MOST:
        return tensor
    if not pieces.is_dense(tensor):
        tensor = tensor.contiguous()
    distance = (count - _RUN) // (_RUNS - 1)
    distance -= 1 - distance % 2
    return torch.as_strided(tensor, (_RUNS, _RUN), (distance, 1), tensor.storage_offset())
