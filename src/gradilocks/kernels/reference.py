"""The kernels in plain torch, for every device and as the reference of the tests.

CPU tensors are read by the host whenever that is faster; on other devices the host reads nothing.

A finite norm proves that no element is NaN or Inf, so on a CPU a healthy tensor is read once. torch's own CPU norm adds
float32 squares in float32: 4e-4 off for 10 M normal values, 4e-3 if one of them is 10,000. In float64 10 M values take
11 ms on two cores, so squares are summed in float32 within rows of 128 elements, and the rows in float64: 1.1 ms,
within 6e-7 for any data (rows of 1,024: 4e-6). Tensors up to 32,768 elements are not divided into rows. Their own norms
are float64; the norm of all tensors together, which a step needs, takes theirs in float32, 234 us for 148 tensors
instead of 488: within 4e-7 for normally distributed values, within 3e-5 for any data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from gradilocks.torch_private import foreach_mul_, foreach_norm

STATISTICS = ("norm", "largest", "zeros", "nan", "inf")
"""Rows of the tensor that `measure` returns."""

LOW_ADDRESS = 1 << 40
"""`data_ptr()` of a tensor whose storage was freed is its offset, below this bound. Few valid addresses are."""
_HALF = (torch.float16, torch.bfloat16)
_dtype_of = attrgetter("dtype")
_ROW = 128
_MAX_SMALL = 1 << 15  # Elements of a tensor that is not divided into rows.
_NO_ENDS = torch.zeros(2, dtype=torch.float64, device="cpu")
# Below these mean squares, squares are subnormal or zero and their sum is inexact.
_TINY_MEAN_SQUARE = {torch.float32: 1.2e-31, torch.float64: 1e-290}


@torch.no_grad()
def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = True) -> Tensor:
    """See `gradilocks.kernels.measure`."""
    if tensors[0].device.type != "cpu" or order not in (2.0, math.inf):
        return torch.stack([_statistics(tensor, order) for tensor in tensors], dim=1)
    norms = _largest(tensors) if order == math.inf else _norms_on_cpu(tensors)
    largest = norms if order == math.inf else _largest(tensors) if detail else [math.nan] * len(tensors)
    zeros = [float(t.numel() - torch.count_nonzero(t)) if detail else math.nan for t in tensors]
    none = [0.0] * len(tensors)
    table = torch.tensor([norms, largest, zeros, none, none], dtype=torch.float64, device="cpu")
    for index, norm in enumerate(norms):
        if not math.isfinite(norm):
            table[:, index] = _statistics(tensors[index], order)
    return table


def norm(tensors: Sequence[Tensor], order: float) -> Tensor | float:
    """See `gradilocks.kernels.norm`."""
    if tensors[0].device.type != "cpu":
        return total_norm(measure(tensors, order=order, detail=False)[0], order)
    if order == 2.0:
        sizes = list(map(Tensor.numel, tensors))
        total = _norm_on_cpu(tensors, sizes)
        if sum(sizes) * _TINY_MEAN_SQUARE[torch.float32] <= total * total < math.inf:
            return total
    return total_norm_on_host(measure(tensors, order=order, detail=False)[0].tolist(), order)


@torch.no_grad()
def multiply_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """See `gradilocks.kernels.multiply_`."""
    if isinstance(factor, Tensor) and factor.dim():
        for tensor, own_factor in zip(tensors, factor.unbind(), strict=True):
            multiply_([tensor], own_factor)
        return
    if isinstance(factor, Tensor) and factor.device.type == "cpu":
        factor = factor.item()
    if isinstance(factor, float) and factor == 1.0:
        return
    dtypes = set(map(_dtype_of, tensors))
    for dtype in dtypes:
        same = list(tensors) if len(dtypes) == 1 else [tensor for tensor in tensors if tensor.dtype is dtype]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        if isinstance(factor, float):
            foreach_mul_(same, torch.tensor(factor, dtype=wide, device="cpu"))
        elif dtype in _HALF:
            for tensor in same:  # A 0-d factor would be rounded to half precision first.
                tensor.copy_(tensor.float() * factor.to(wide))
        else:
            foreach_mul_(same, factor.to(wide))


@torch.no_grad()
def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """See `gradilocks.kernels.clamp_`."""
    if bound.device.type == "cpu" and bound.item() == math.inf:
        return
    for tensor in tensors:
        limit = torch.where(bound > torch.finfo(tensor.dtype).max, math.inf, bound).to(tensor.dtype)
        tensor.clamp_(-limit, limit)


@torch.no_grad()
def unscale_(tensors: Sequence[Tensor], inverse_scale: Tensor) -> Tensor:
    """See `gradilocks.kernels.unscale_`."""
    multiply_(tensors, inverse_scale)
    if inverse_scale.device.type == "cpu":
        is_finite = all(map(_is_finite_on_cpu, tensors))
        return torch.tensor(0.0 if is_finite else 1.0, dtype=torch.float32, device="cpu")
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors])
    return finite.all().logical_not().to(torch.float32)


def total_norm(norms: Tensor, order: float) -> Tensor:
    """Computes the norm of several tensors from the norm of each, without overflow.

    Args:
        norms: 1-d float64.
        order: p of the norms, above 0.

    Returns:
        0-d, of the same dtype. 0 for no norms.
    """
    if not norms.numel():
        return norms.new_zeros(())
    largest = norms.amax()
    usable = (largest > 0) & torch.isfinite(largest)
    unit = torch.where(usable, largest, 1.0)  # In units of the largest norm no power exceeds 1.
    return torch.where(usable, unit * torch.linalg.vector_norm(norms / unit, order), largest)


def total_norm_on_host(norms: Sequence[float], order: float) -> float:
    """`total_norm` in Python numbers: 148 norms in 3 us instead of 20."""
    largest = max(norms, default=0.0)
    if not all(map(math.isfinite, norms)):
        return sum(norms)  # NaN if one is NaN, else inf.
    if order == 2.0:
        return math.hypot(*norms)
    if order == math.inf or largest == 0.0:
        return largest
    power: float = sum([(norm / largest) ** order for norm in norms])
    return largest * math.pow(power, 1.0 / order)


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill one range of memory without gaps or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def without_address(tensors: Sequence[Tensor], addresses: Sequence[int]) -> list[int]:
    """Returns the indices of tensors that have elements but no address, as wrapper subclasses of Tensor do.

    Args:
        tensors: of any kind.
        addresses: their `data_ptr()`.

    Raises:
        RuntimeError: the storage of a tensor was freed.
    """
    low = [i for i, address in enumerate(addresses) if address < LOW_ADDRESS and tensors[i].numel()]
    for i in low:
        if not tensors[i].untyped_storage().nbytes():
            raise RuntimeError(f"a tensor of shape {tuple(tensors[i].shape)} has no memory: its storage was freed.")
    return [i for i in low if addresses[i] == 0]


def _statistics(tensor: Tensor, order: float) -> Tensor:
    """Computes the column of one tensor for any order, value and device, in several passes."""
    dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
    is_nan = torch.isnan(tensor)
    nan, inf = is_nan.sum(), torch.isinf(tensor).sum()
    magnitude = tensor.to(dtype).abs().masked_fill(is_nan, 0.0)
    largest = magnitude.amax() if tensor.numel() else magnitude.sum()
    usable = (largest > 0) & torch.isfinite(largest)
    unit = torch.where(usable, largest, 1.0)
    norm = largest
    if order != math.inf:
        norm = torch.where(usable, unit * torch.linalg.vector_norm(magnitude / unit, order), largest)
    norm = torch.where(nan > 0, math.nan, norm)
    zeros = tensor.numel() - torch.count_nonzero(tensor)
    return torch.stack([norm, largest, *(count.to(dtype) for count in (zeros, nan, inf))])


def _norms_on_cpu(tensors: Sequence[Tensor]) -> list[float]:
    """2-norms; NaN where elements are non-finite, or so large or small that the sum of squares is inexact."""
    small = [tensor for tensor in tensors if tensor.numel() <= _MAX_SMALL]
    small_norms = map(Tensor.item, foreach_norm(small, 2.0, torch.float64) if small else ())
    norms = [next(small_norms) if tensor.numel() <= _MAX_SMALL else _norm_of_rows(tensor) for tensor in tensors]
    for index, (tensor, norm) in enumerate(zip(tensors, norms, strict=True)):
        is_small = tensor.numel() <= _MAX_SMALL and tensor.dtype is not torch.float64
        # Squares of float32 neither overflow nor vanish in float64.
        least = 0.0 if is_small else tensor.numel() * _TINY_MEAN_SQUARE.get(tensor.dtype, 1.2e-31)
        if not least <= norm * norm < math.inf:
            norms[index] = math.nan
    return norms


def _norm_on_cpu(tensors: Sequence[Tensor], sizes: Sequence[int]) -> float:
    """2-norm of all elements of CPU tensors of these sizes; inexact if squares overflow or vanish in float32."""
    if set(map(_dtype_of, tensors)) != {torch.float32}:
        return math.hypot(*_norms_on_cpu(tensors))
    small = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= _MAX_SMALL]
    norms = list(map(Tensor.item, foreach_norm(small, 2.0, torch.float32))) if small else []
    norms += [_norm_of_rows(tensor) for tensor, size in zip(tensors, sizes, strict=True) if size > _MAX_SMALL]
    return math.hypot(*norms)


def _norm_of_rows(tensor: Tensor) -> float:
    """2-norm of a CPU tensor; inexact if squares overflow or vanish in float32."""
    size = tensor.numel()
    if tensor.dtype is torch.float64 or size <= _MAX_SMALL:
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    flat = tensor.as_strided((size,), (1,)) if is_dense(tensor) else tensor.reshape(-1)
    rest = size % _ROW
    rows = torch.linalg.vector_norm(flat[: size - rest].view(-1, _ROW), dim=1, dtype=torch.float32)
    norm = float(torch.linalg.vector_norm(rows, dtype=torch.float64))
    return math.hypot(norm, float(torch.linalg.vector_norm(flat[-rest:], dtype=torch.float64))) if rest else norm


def _largest(tensors: Sequence[Tensor]) -> list[float]:
    """Largest magnitudes; NaN for a tensor with NaN. `aminmax` is four times faster than an inf-norm on a CPU."""
    ends = [torch.stack(torch.aminmax(t)).double() if t.numel() else _NO_ENDS for t in tensors]
    largest: list[float] = torch.stack(ends).abs().amax(dim=1).tolist()
    return largest


def _is_finite_on_cpu(tensor: Tensor) -> bool:
    # A sum is twenty times faster than `isfinite().all()` (1 M float32: 47 us instead of 1 ms), but may overflow.
    total = tensor.sum(dtype=torch.float32 if tensor.dtype in _HALF else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
