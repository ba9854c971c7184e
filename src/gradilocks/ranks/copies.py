"""Plain gradients of a rank in, a few numbers out that agree between ranks just if all are copies.

A plain tensor beside DTensors says nothing of who else holds it. Norms alone do not tell copies
from parts: experts of one size have equal norms by the law of large numbers. So each gradient is
projected on four fixed pseudo-random directions, which follow from its place and shape, and the
logarithm of its norm is added beside. Copies agree in all of these but for rounding; the
projections of others are of the size of 1 and differ by as much.

It costs a few passes over each gradient, until it has been compared with one that is not zero.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks.kernels.totals import total_norm
from gradilocks.values import moved, wide

__all__ = ["MARKS", "Fingerprint", "are_copies", "fingerprint"]

_DIRECTIONS = 4
_PIECE = 1 << 18  # Elements at a time: a large embedding must not need its size again in float64.
_HASHED = (1 << 31) - 1

_ROUNDING = 1e-3
"""By how much the numbers of one copy may differ: kernels that add in any order."""
_HALF_ROUNDING = 1e-2
"""The same in half precision: a bfloat16 that was rounded the other way is off by 0.8 %."""
_MOST = 0.1
"""And by how much those of all copies together: one tensor that is none differs by about 1."""

MARKS = (
    "norm",
    "shown",
    "allowed",
    *(f"projection {number}" for number in range(_DIRECTIONS)),
    *(f"logarithm {number}" for number in range(_DIRECTIONS)),
)
"""What a rank tells of its plain gradients: their norm, for the message; how many are finite and
not zero; the square of the rounding that is allowed between copies; and what is compared."""


class Fingerprint(NamedTuple):
    """What stands for a list of gradients."""

    marks: Tensor
    """1-d: the numbers that MARKS names."""
    shown: Tensor
    """For each gradient, 1 if it is finite and not zero, so that it was compared, else 0."""


@torch.no_grad()
def fingerprint(
    tensors: Sequence[Tensor],
    *,
    places: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    norms: Tensor,
) -> Fingerprint:
    """The fingerprint of gradients; nothing waits.

    Args:
        tensors: plain gradients' elements; may be empty.
        places: for each, the place of its parameter among the plain ones.
        shapes: for each, the shape of its parameter.
        norms: 1-d, their Euclidean norms, where the numbers are brought together.
    """
    home = norms.device
    shown = (norms > 0) & torch.isfinite(norms)
    marks = norms.new_zeros(len(MARKS))
    for number, tensor in enumerate(tensors):
        seeds = [
            zlib.crc32(repr((places[number], tuple(shapes[number]), column)).encode()) & _HASHED
            for column in range(2 * _DIRECTIONS)
        ]
        norm = norms[number]
        projected = _projected(tensor, moved(norm, tensor.device), seeds[:_DIRECTIONS])
        weights = [0.5 + seed / _HASHED for seed in seeds[_DIRECTIONS:]]
        logarithms = torch.tensor(weights, dtype=norms.dtype, device="cpu")
        allowed = _HALF_ROUNDING if tensor.dtype.itemsize == 2 else _ROUNDING
        row = torch.cat(
            [
                torch.zeros_like(norm).reshape(1),
                torch.ones_like(norm).reshape(1),
                torch.full_like(norm, allowed**2).reshape(1),
                moved(projected, home),
                moved(logarithms, home) * norm.log(),
            ]
        )
        marks = marks + torch.where(shown[number], row, torch.zeros_like(row))
    marks[0] = total_norm(torch.where(shown, norms, torch.zeros_like(norms)), 2.0)
    return Fingerprint(marks, shown.to(norms.dtype))


def are_copies(rows: Sequence[Sequence[float]]) -> bool:
    """Whether the ranks' gradients are the same but for rounding.

    Args:
        rows: the marks of each rank, of finite gradients.
    """
    _, shown, allowed, *compared = zip(*rows, strict=True)
    if len(set(shown)) > 1:
        return False
    most = min(math.sqrt(max(allowed)), _MOST)
    return all(max(column) - min(column) <= most for column in compared)


def _projected(tensor: Tensor, norm: Tensor, seeds: Sequence[int]) -> Tensor:
    """The products of `tensor`, divided by its norm, with pseudo-random numbers of variance 1."""
    real = wide(tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    values = tensor.reshape(-1)
    starts = torch.tensor(seeds, dtype=torch.int64, device="cpu").reshape(-1, 1)
    starts = moved(starts, tensor.device)
    total = torch.zeros(len(seeds), dtype=real, device=tensor.device)
    for begin in range(0, values.numel(), _PIECE):
        piece = values[begin : begin + _PIECE].to(real) / norm.to(real)
        total = total + (_random(begin, piece.numel(), starts).to(real) * piece).sum(dim=1)
    return total


def _random(begin: int, count: int, starts: Tensor) -> Tensor:
    """Numbers of variance 1 between -1.73 and 1.73, a row a start: a hash of the element's index.

    In whole numbers below 2^62, so that every device computes the same.
    """
    index = torch.arange(begin, begin + count, dtype=torch.int64, device=starts.device)
    mixed = ((index & _HASHED) * 1_013_904_223 + starts) & _HASHED
    for shift, factor in ((15, 1_597_334_677), (13, 747_796_405)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _HASHED
    mixed = (mixed ^ (mixed >> 16)) & 0xFFFF
    return (mixed.to(torch.float32) / 0x8000 - 1.0) * math.sqrt(3.0)
