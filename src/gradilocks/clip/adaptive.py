"""AdaptiveClip: every unit's gradient bounded by the size of its weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import sparse_indices
from gradilocks.clip.clip_policy import (
    NOTHING,
    ClipPolicy,
    Memory,
    scene_of,
    without_coefficient,
)
from gradilocks.policy import check_positive
from gradilocks.values import ClipLimit, Measurement, wide

__all__ = ["AdaptiveClip"]

_AT_ONCE = 1 << 22
"""Elements whose norm is taken at once: a copy of 32 MiB."""


@dataclass(frozen=True)
class AdaptiveClip(ClipPolicy):
    """Bounds the gradient of each unit by a share of the norm of the unit's weights.

        for each unit:  limit = clipping * max(norm of its weights, eps)
                        factor = min(1, limit / max(norm of its gradient, 1e-6))

    A unit is a row of a matrix or an output channel of a convolution; a vector or a number is one
    unit. One more read of weights and gradients, and a pass over those gradients that have units.

    Args:
        clipping: the share; the authors use 0.01 for batches of 4096 and more for smaller ones.
        eps: for weights that are zero, as they are at the start.
        exclude: patterns of parameter names, as in a shell, that are left alone: the authors leave
            out the last layer, here `exclude=("head.*",)`.

    Example:
        >>> AdaptiveClip(0.01, exclude=("head.*",)).clipping
        0.01

    Reference: Brock et al., "High-Performance Large-Scale Image Recognition Without
    Normalization", ICML 2021. Use it for networks without normalisation and large batches.
    """

    clipping: float = 0.01
    eps: float = 1e-3
    exclude: tuple[str, ...] = ()
    apart = True
    by_unit = True

    def __post_init__(self) -> None:
        check_positive("clipping", self.clipping)
        check_positive("eps", self.eps)
        given: Any = self.exclude
        patterns = tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (None,)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"exclude must be a tuple of patterns, got {given!r}.")
        object.__setattr__(self, "exclude", patterns)

    def misfits(
        self, names: Sequence[str], groups: Sequence[tuple[int, str | None]]
    ) -> dict[str | int, str]:
        return {
            pattern: f"exclude: {pattern!r} fits no parameter. There are parameters such as "
            f"{', '.join(names[:3])}."
            for pattern in self.exclude
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
        }

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        scene = scene_of(measurement, self)
        names = scene.names() if self.exclude else ()
        norms = measurement.tensors.norms
        units: list[Tensor | None] = []
        after: list[Tensor] = []
        clipped = torch.zeros_like(measurement.norm, dtype=torch.bool)
        for k, (param, grad) in enumerate(zip(scene.params, scene.tensors, strict=True)):
            name = names[scene.places[k]] if names else ""
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude):
                units.append(None)
                after.append(norms[k])
                continue
            lengths = _lengths(grad) / scale
            bound = self.clipping * _lengths(_weights(param)).clamp(min=self.eps)
            over = (lengths > bound) & (measurement.nonfinite == 0)
            factor = torch.where(over, bound / lengths.clamp(min=1e-6), torch.ones_like(lengths))
            units.append(factor)
            after.append(torch.linalg.vector_norm(lengths * factor).to(norms.dtype) * scale)
            clipped = clipped | over.any()
        left = torch.stack(after) if after else norms
        return without_coefficient(measurement, clipped, units=units, norms=left)


def _weights(param: Tensor) -> Tensor:
    """The weights that the gradient's elements belong to: of a sparse one, the rows it has."""
    weights = param.detach()
    grad = param.grad
    if grad is not None and grad.layout is torch.sparse_coo:
        weights = weights[sparse_indices(grad)[0]]
    return weights


def _lengths(tensor: Tensor) -> Tensor:
    """The norm of each unit, so shaped that it broadcasts to the tensor."""
    dtype = wide(tensor.device)  # The square of a float32 may be more than float32 holds.
    if tensor.dim() <= 1:
        parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in _parts(tensor)]
        whole: Tensor = torch.linalg.vector_norm(torch.stack(parts)) if parts[1:] else parts[0]
        return whole
    dims = tuple(range(1, tensor.dim()))
    rows = [
        torch.linalg.vector_norm(part, dim=dims, keepdim=True, dtype=dtype)
        for part in _parts(tensor)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Runs of units: torch makes a copy of what it takes the norm of in a wider type."""
    if tensor.numel() <= _AT_ONCE:
        return (tensor,)
    return torch.split(tensor, max(1, _AT_ONCE * tensor.shape[0] // tensor.numel()))
