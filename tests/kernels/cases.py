"""Tensors of every kind, and comparisons, for the tests of kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
KINDS = ["normal", "zero", "negative zero", "subnormal", "tiny", "huge", "mixed", "nan", "inf", "all three"]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def values(kind: str, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor of one kind of values, the same at every call.

    Args:
        kind: one of KINDS.
        size: number of elements.
        dtype: of the elements.
    """
    info = torch.finfo(dtype)
    normal = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    constants = {
        "zero": 0.0,
        "negative zero": -0.0,
        "subnormal": info.smallest_normal * info.eps * 3,
        "tiny": info.smallest_normal,
        "huge": info.max,
    }
    if kind in constants:
        return torch.full_like(normal, constants[kind])
    if kind == "mixed":
        return torch.where(normal > 0, *(torch.full_like(normal, constants[name]) for name in ("huge", "subnormal")))
    planted = {"normal": [], "nan": [NAN], "inf": [-INF], "all three": [INF, NAN, -INF]}[kind][:size]
    for place, value in enumerate(planted):
        normal[(size // 2 + 7 * place) % size] = value
    return normal


def layouts(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of every layout by name."""
    base = torch.randn(12, 10, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    return {
        "contiguous": base,
        "transposed": base.transpose(0, 3),
        "permuted": base.permute(2, 0, 3, 1),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "every second row": base[::2],
        "every third column": base[..., ::3],
        "slice": base[1:-1, 2:5, 1:, 3:7],
        "unaligned view": base.view(-1)[7:5001],
        "dimensions of size 1": base.view(-1, 1, 40).transpose(0, 1),
        "0-d": base[0, 0, 0, 0],
        "empty": base[:0],
        "empty and strided": base[::2, :, :0],
    }


OVERLAPPING = {
    "expanded": torch.randn(3, 1, generator=torch.Generator().manual_seed(2)).expand(3, 4),
    "overlapping windows": torch.randn(100, generator=torch.Generator().manual_seed(3)).unfold(0, 5, 1),
}
"""Layouts that can only be read."""


def strided_copy(tensor: Tensor, device: str) -> Tensor:
    """A copy of a tensor and of the whole storage it is a view of."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(room, dtype=tensor.dtype, device=device).copy_(tensor.as_strided((room,), (1,), 0))
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def exact_norm(tensor: Tensor, order: float) -> float:
    """The norm in float64, rounded about once: NaN if there is a NaN, else inf if there is an Inf."""
    magnitudes = tensor.double().abs().flatten()
    if magnitudes.isnan().any():
        return NAN
    largest = magnitudes.max().item() if magnitudes.numel() else 0.0
    if largest in (0.0, INF) or order == INF:
        return largest
    return largest * math.fsum((magnitudes / largest).pow(order).tolist()) ** (1.0 / order)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if all elements are equal with their signs of zero; any NaN equals any NaN."""
    kind = _BITS[one.element_size()]
    equal = one.cpu().contiguous().view(kind) == other.cpu().contiguous().view(kind)
    return one.dtype == other.dtype and bool((equal | (one.cpu().isnan() & other.cpu().isnan())).all())


def product(tensor: Tensor, factor: float) -> Tensor:
    """The documented product: formed in float32 (float64 for float64) and rounded once."""
    if tensor.dtype is torch.float64:
        return tensor * factor
    return (tensor.float() * torch.tensor(factor, dtype=torch.float32)).to(tensor.dtype)
