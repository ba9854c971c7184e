"""AdaptiveClip: every unit's gradient bounded by the size of its weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
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
from gradilocks.values import ClipLimit, Measurement, Scene, wide

__all__ = ["AdaptiveClip", "unit_norms", "weights_of"]

_AT_ONCE = 1 << 22
"""Elements whose norm is taken at once: a copy of 32 MiB."""


@dataclass(frozen=True)
class AdaptiveClip(ClipPolicy):
    """Bounds the gradient of each unit by a share of the norm of the unit's weights.

        for each unit:  limit = clipping * max(norm of its weights, eps)
                        if norm of its gradient > limit:
                            gradient *= limit / max(norm of its gradient, 1e-6)

    A unit is a row of a matrix or an output channel of a convolution; a vector or a number is one
    unit. Of complex numbers the magnitudes count. One more read of weights and gradients, and a
    pass over those gradients that have units. Units that several ranks hold parts of are measured
    over all of them, in one more collective of two numbers a unit.

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

    def unit_count(self, name: str, shape: Sequence[int]) -> int:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude):
            return 0
        return shape[0] if len(shape) > 1 else 1

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        scene = scene_of(measurement, self)
        norms = measurement.tensors.norms
        units: list[Tensor | None] = []
        after: list[Tensor] = []
        clipped = torch.zeros_like(measurement.norm, dtype=torch.bool)
        for k, found in enumerate(scene.lengths or self._lengths_here(scene)):
            if found is None:
                units.append(None)
                after.append(norms[k])
                continue
            lengths = found[0] / scale
            bound = self.clipping * found[1].clamp(min=self.eps)
            over = (lengths > bound) & (measurement.nonfinite == 0)
            factor = torch.where(over, bound / lengths.clamp(min=1e-6), torch.ones_like(lengths))
            units.append(factor)
            after.append(torch.linalg.vector_norm(lengths * factor).to(norms.dtype) * scale)
            clipped = clipped | over.any()
        left = torch.stack(after) if after else norms
        return without_coefficient(measurement, clipped, units=units, norms=left)

    def _lengths_here(self, scene: Scene) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Of each parameter, as its elements lie here: the norms of its units, scaled, and of
        their weights, so shaped that they broadcast to the gradient; None for one left alone."""
        names = scene.names() if self.exclude else ()
        for place, param, grad in zip(scene.places, scene.params, scene.tensors, strict=True):
            assert param is not None
            assert grad is not None
            if not self.unit_count(names[place] if names else "", param.shape):
                yield None
                continue
            shape = (-1, *(1,) * (grad.dim() - 1)) if grad.dim() > 1 else ()
            yield unit_norms(grad).reshape(shape), unit_norms(weights_of(param)).reshape(shape)


def weights_of(param: Tensor) -> Tensor:
    """The weights that the gradient's elements belong to: of a sparse one, the rows it has."""
    weights = param.detach()
    grad = param.grad
    if grad is not None and grad.layout is torch.sparse_coo:
        weights = weights[sparse_indices(grad)[0]]
    return weights


def unit_norms(tensor: Tensor) -> Tensor:
    """1-d: the norm of each unit, a row or, of a vector or a number, all of it."""
    dtype = wide(tensor.device)  # The square of a float32 may be more than float32 holds.
    if tensor.is_complex():
        dtype = dtype.to_complex()
    if tensor.dim() <= 1:
        parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in _parts(tensor)]
        whole: Tensor = torch.linalg.vector_norm(torch.stack(parts)) if parts[1:] else parts[0]
        return whole.reshape(1)
    dims = tuple(range(1, tensor.dim()))
    rows = [torch.linalg.vector_norm(part, dim=dims, dtype=dtype) for part in _parts(tensor)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Runs of units: torch makes a copy of what it takes the norm of in a wider type."""
    if tensor.numel() <= _AT_ONCE:
        return (tensor,)
    return torch.split(tensor, max(1, _AT_ONCE * tensor.shape[0] // tensor.numel()))
