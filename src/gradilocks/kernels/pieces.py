"""A tensor's elements as one-dimensional pieces small enough for the cache, without a copy.

Whoever works on a piece twice finds it in the cache the second time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["READ", "WRITE", "has_memory", "in_float", "is_dense", "of"]

READ = 1 << 20
"""Elements a piece when it is only read: large, so that calls are few; half precision is widened
a piece at a time."""
WRITE = 1 << 19
"""Elements a piece when it is worked on twice: two cores keep 1 MiB of float32 each in their L2."""


def of(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yields the elements of `tensor` in pieces of at most `size`; views if it is dense."""
    if tensor.numel() <= size:
        if tensor.numel():
            yield _flat(tensor) if is_dense(tensor) else tensor.reshape(-1).contiguous()
    elif is_dense(tensor):
        yield from torch.split(_flat(tensor), size)
    else:
        # A strided view: split its longest dimension until a copy of the rest is small.
        longest = max(range(tensor.dim()), key=tensor.size)
        half = tensor.size(longest) // 2
        for part in torch.split(tensor, [half, tensor.size(longest) - half], dim=longest):
            yield from of(part, size)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each place once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def has_memory(tensor: Tensor) -> bool:
    """Whether all of its elements are there: storage may have been freed, or made smaller.

    As by `untyped_storage().resize_(0)`. True of one that has no storage, as some subclasses.
    """
    if not tensor.numel():
        return True
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + sum((size - 1) * stride for size, stride in strides) + 1
    try:
        there: int = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return True
    return end * tensor.element_size() <= there


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def in_float(part: Tensor) -> Tensor:
    """The piece in a dtype that norms can be summed in: float32, or float64 for float64."""
    if part.is_complex():
        return part.to(torch.complex128).abs()
    return part if part.dtype in (torch.float32, torch.float64) else part.float()
