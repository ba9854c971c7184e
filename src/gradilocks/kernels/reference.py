"""The kernels in plain torch: every device, and the truth that faster kernels are tested against.

On the CPU the host may look at numbers as it likes, since nothing waits there. On other devices
nothing is read back: every number stays where it is.

On the CPU a healthy tensor is read once, and its norm is free of overflow and within 1e-6. It is a
sum of p-th powers in float64, so that it depends neither on the CPU nor on its BLAS library, which
adds in an order of its own: with `torch.dot` ten million normal values were 1.4e-6 off on one CPU
and 1e-6 on another, constant ones 2.1e-4 and 5e-5.

Small tensors are added in float64 throughout. For large ones torch's operations would be too slow
in it (10 M float32 on two cores: over 11 ms, rows 1.1 ms, dot 1.4 ms), so their squares are added
in float32 over rows of 128 elements, and the rows in float64. Rows that short are within 6e-7 for
any data; rows of 1,024 are 4e-6 off on one 1.0 beside 1,023 times 2.43e-4.

A finite sum also proves that no element is NaN or Inf, so only a tensor that looks wrong is read
again.

The norm over all tensors (`summarize`) adds powers in float64 over pieces, tensors and ranks, so it
is the same to some 1e-15 however the elements are spread; it is rounded once to float32, nearly
always to the bit, before limit, coefficient and record see it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks import _torch
from gradilocks._torch import clamp_max_, clamp_min_, mul_, unscale_and_check_
from gradilocks.kernels import pieces
from gradilocks.kernels.chunks import AddressedTensors
from gradilocks.values import Measurement, NonFinite, Statistics, wide

__all__ = [
    "DOUBLE",
    "any_double",
    "clamp_",
    "measure",
    "multiply_",
    "multiply_and_check_",
    "multiply_each_",
    "rounded",
    "rounded_number",
    "summarize",
    "total_norm",
]

BY_ADDRESS = False
"""Whether it reaches tensors by their addresses."""
# Up to this size torch's AMP kernel multiplies a list of float32 tensors faster than its foreach
# kernel does (0.15 ms to 0.45 ms for 148 tensors of 0.7 M elements in all); above, it is slower.
_SMALL = (1 << 16) - 1
_HALF = (torch.float16, torch.bfloat16)
DOUBLE = frozenset((torch.float64, torch.complex128))
_SMALLEST_SINGLE = float(torch.finfo(torch.float32).tiny)
_LARGEST_SINGLE = float(torch.finfo(torch.float32).max)
# Said each time, because the user may have set another default dtype or device.
_FLOAT: Any = {"dtype": torch.float32, "device": "cpu"}
_WIDE: Any = {"dtype": torch.float64, "device": "cpu"}

_Found = tuple[float, int, int]
"""A tensor's norm, how many of its elements are NaN, and how many are Inf."""

# Below this mean square, float32 squares are subnormal or zero and their sum cannot be trusted.
_TINY_MEAN_SQUARE = 1.2e-31
# And float64 squares below this one.
_TINY_IN_DOUBLE = 1e-290
_ROW = 128
# Up to this size float64 throughout: 27 us at most, where rows take 14.
_ADDED_IN_DOUBLE = 1 << 16
_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def measure(tensors: Sequence[Tensor], *, order: float = 2.0, detail: bool = False) -> Statistics:
    """Reads every tensor and says what is in it.

    Args:
        tensors: dense tensors of any floating dtype on one device; at least one.
        order: the norm's p; any float that `torch.linalg.vector_norm` takes.
        detail: also find the largest magnitude and count the zeros.

    Returns:
        One entry a tensor. The norm is NaN if the tensor holds a NaN; else, with a positive order,
        inf if it holds an Inf. Of finite elements it is finite whatever they and the order are,
        unless the norm itself is more than float64 holds, as an order near 0 can make it.
    """
    if tensors[0].device.type != "cpu":
        return _measure_on_device(tensors, order=order, detail=detail)
    statistics = _statistics(_find_all(tensors, order))
    if not detail:
        return statistics
    zeros = [tensor.numel() - int(torch.count_nonzero(tensor)) for tensor in tensors]
    return Statistics(
        statistics.norms,
        statistics.nan,
        statistics.inf,
        largest=torch.tensor([_largest(t) for t in tensors], **_WIDE),
        zeros=torch.tensor(zeros, dtype=torch.int64, device="cpu"),
    )


def multiply_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    """Multiplies every tensor in place, in the tensor's own precision; no pass if it is 1.

    Args:
        tensors: dense tensors on one device.
        multiplier: 0-d, on that device.
    """
    if multiplier.device.type != "cpu":
        _multiply_on_device_(tensors, multiplier)
        return
    factor = multiplier.item()
    if factor == 1.0:
        return
    small, large = _by_size(tensors)
    if small:
        _multiply_small_(small, factor)
    half = [tensor for tensor in large if tensor.dtype in _HALF]
    if half:
        mul_(half, _factor(half[0], factor))
    wide_ones = [tensor for tensor in large if tensor.dtype not in _HALF]
    if wide_ones:
        mul_(wide_ones, factor)


def multiply_each_(tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiplies each tensor in place by its own factor; no pass over one whose factor is 1.

    Args:
        tensors: dense tensors on one device.
        factors: 1-d, on that device, one a tensor.
    """
    if factors.device.type != "cpu":
        for tensor, factor in zip(tensors, factors.unbind(), strict=True):
            _multiply_on_device_([tensor], factor)
        return
    for tensor, factor in zip(tensors, factors.tolist(), strict=True):
        if factor != 1.0:
            tensor.mul_(_factor(tensor, factor))


def multiply_and_check_(
    tensors: Sequence[Tensor], multiplier: Tensor | None
) -> tuple[Tensor, Callable[[], NonFinite]]:
    """Multiplies every tensor in place and looks at the result while it is still in the cache.

    Args:
        tensors: dense tensors on one device.
        multiplier: 0-d, on that device; None to look without multiplying.

    Returns:
        float32, 0-d: exactly 1 if an element is NaN or Inf after the multiplication, else exactly
        0. And what counts them, tensor by tensor.
    """
    if tensors[0].device.type != "cpu":
        if multiplier is not None:
            _multiply_on_device_(tensors, multiplier)
        nan = torch.stack([torch.isnan(tensor).sum() for tensor in tensors])
        inf = torch.stack([torch.isinf(tensor).sum() for tensor in tensors])
        return (nan + inf).any().to(torch.float32), lambda: NonFinite(nan, inf)
    factor = None if multiplier is None else multiplier.item()
    small, _ = _by_size(tensors)
    found: dict[int, tuple[int, int]] = {}
    if small:
        fine = _multiply_small_(small, 1.0 if factor is None else factor)
        found = {id(each): (0, 0) if fine else _count_nonfinite(each) for each in small}
    counts = [found.get(id(tensor)) or _multiply_large_(tensor, factor) for tensor in tensors]
    flag = torch.tensor(float(any(map(any, counts))), **_FLOAT)
    return flag, lambda: NonFinite(*torch.tensor(counts, dtype=torch.int64, device="cpu").unbind(1))


def clamp_(tensors: Sequence[Tensor], bound: Tensor) -> None:
    """Bounds the magnitude of every element in place; NaN stays NaN.

    Args:
        tensors: dense tensors on one device.
        bound: 0-d, on that device, not negative.
    """
    if any(map(Tensor.is_complex, tensors)):
        for tensor in filter(Tensor.is_complex, tensors):
            _bound_complex_(tensor, bound)
        tensors = [tensor for tensor in tensors if not tensor.is_complex()]
    if bound.device.type != "cpu":
        for tensor in tensors:
            limit = bound.to(tensor.dtype)
            torch.clamp(tensor, -limit, limit, out=tensor)
        return
    value = bound.item()
    # A bound that the dtype cannot hold bounds nothing in it, and torch would refuse it.
    bounded = [tensor for tensor in tensors if value <= torch.finfo(tensor.dtype).max]
    if bounded:
        clamp_min_(bounded, -value)
        clamp_max_(bounded, value)


def _bound_complex_(tensor: Tensor, bound: Tensor) -> None:
    """Bounds magnitudes and keeps directions; what has an Inf has none, and stays as it is."""
    exact = wide(tensor.device).to_complex()  # A magnitude may be more than its parts' type holds.
    size = tensor.to(exact).abs()
    over = (size > bound) & torch.isfinite(size)
    tensor.copy_(torch.where(over, tensor.to(exact) * (bound / size), tensor))


def _factor(tensor: Tensor, factor: float) -> float | Tensor:
    """`factor` as torch must get it: a Python number would be rounded to a half dtype first."""
    return torch.tensor(factor, **_FLOAT) if tensor.dtype in _HALF else factor


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    small: list[Tensor] = []
    large: list[Tensor] = []
    for tensor in tensors:
        fits = tensor.dtype is torch.float32 and tensor.numel() <= _SMALL
        (small if fits else large).append(tensor)
    return small, large


def _multiply_small_(tensors: list[Tensor], factor: float) -> bool:
    """Multiplies, and says whether all elements are finite, before and after."""
    flag, by = torch.zeros((), **_FLOAT), torch.tensor(factor, **_FLOAT)
    unscale_and_check_(tensors, flag, by)
    if not abs(factor) <= 1.0:  # The kernel looks before it multiplies; a product can overflow.
        unscale_and_check_(tensors, flag, torch.ones_like(by))
    return not flag.item()


def _multiply_large_(tensor: Tensor, factor: float | None) -> tuple[int, int]:
    """Multiplies piece by piece and looks at each piece before it leaves the cache."""
    by = None if factor is None or factor == 1.0 else _factor(tensor, factor)
    if by is not None and not pieces.is_dense(tensor):
        tensor.mul_(by)
        by = None
    fine = True
    for piece in pieces.of(tensor, pieces.WRITE):
        if by is not None:
            piece.mul_(by)
        fine = fine and _is_finite(piece)
    return (0, 0) if fine else _count_nonfinite(tensor)


def _find_all(tensors: Sequence[Tensor], order: float) -> list[_Found]:
    """The norm of each tensor, with its NaN and Inf counted."""
    if order != 2.0:
        return [_find(tensor, order) for tensor in tensors]
    # One call for the many tensors of a model that are small: every microsecond here is spent
    # once a tensor (150 tensors of 1,000: 0.36 ms, one by one 0.48).
    found: dict[int, _Found] = {}
    small = [
        place
        for place, tensor in enumerate(tensors)
        if tensor.dtype in _SINGLE and tensor.numel() <= _ADDED_IN_DOUBLE
    ]
    if small:
        norms = _torch.norms([tensors[i] for i in small], 2.0, dtype=torch.float64)
        for place, norm in zip(small, torch.stack(norms).tolist(), strict=True):
            if norm < math.inf:  # Squares of float32 neither overflow nor vanish in float64.
                found[place] = norm, 0, 0
    return [found.get(place) or _find(tensor, order) for place, tensor in enumerate(tensors)]


def _find(tensor: Tensor, order: float) -> _Found:
    """The norm of one tensor, with its NaN and Inf counted."""
    if order <= 0.0:  # Not a norm; torch takes it, so it is taken.
        nan, inf = _count_nonfinite(tensor)
        return math.nan if nan and order else _in_units_of_the_smallest(tensor, order), nan, inf
    parts = pieces.of(tensor, pieces.READ)
    if order == 2.0:
        total = _added(map(_square, parts))
        if _trusted(total, tensor):
            return math.sqrt(total), 0, 0
    else:
        measure = _largest_or_nan if order == math.inf else lambda part: _norm(part, order)
        norm = _combine([measure(part) for part in parts], order)
        if math.isfinite(norm) and (order == math.inf or not _powers_vanish(tensor, norm, order)):
            return norm, 0, 0
    return _look_again(tensor, order)


def _in_units_of_the_smallest(tensor: Tensor, order: float) -> float:
    """For negative orders: the smallest element counts most, and powers of all others are below 1.

    Powers of the elements themselves overflow if one is small, and vanish if all are large: of
    [1e30, 1e30] with order -11 float64 has nothing left, and torch's norm is inf.
    """
    if order == 0.0 or not tensor.numel():  # The count of those that are not 0; torch refuses none.
        return _norm(tensor, order)
    parts = list(pieces.of(tensor, pieces.WRITE))
    smallest = min(float(pieces.in_float(part).abs().min()) for part in parts)
    if smallest in (0.0, math.inf) or order == -math.inf:
        return smallest
    found = [_norm(pieces.in_float(part).double() / smallest, order) for part in parts]
    # At least one is 1 or, of many equal ones, a little less; only an order near 0 makes it vanish.
    return (
        smallest * math.fsum(norm**order for norm in found) ** (1.0 / order) if all(found) else 0.0
    )


def _is_finite(part: Tensor) -> bool:
    """Whether all elements are finite, in one read; a sum that overflows is looked at again."""
    # A sum is twenty times faster than `isfinite(...).all()` (1 M float32: 47 us to 1 ms).
    total = part.sum(dtype=torch.float32 if part.dtype in _SINGLE else None)
    return bool(torch.isfinite(total)) or _count_nonfinite(part) == (0, 0)


def _count_nonfinite(tensor: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many are Inf."""
    nan = inf = 0
    for part in pieces.of(tensor, pieces.READ):
        nan += int(torch.isnan(part).sum())
        inf += int(torch.isinf(part).sum())
    return nan, inf


def _combine(norms: Sequence[float], order: float) -> float:
    """The norm of a vector from the norms of its pieces. NaN comes before inf."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    peak = max(norms, default=0.0)
    if order == math.inf or peak in (0.0, math.inf) or len(norms) == 1:
        return peak
    powers = math.fsum((norm / peak) ** order for norm in norms)
    try:
        return peak * float(powers ** (1.0 / order))
    except OverflowError:  # With an order below 1 a norm may be more than float64 holds.
        return math.inf


def _largest(tensor: Tensor) -> float:
    """The largest magnitude, NaN left out; 0 for an empty tensor."""
    return max((_largest_not_nan(p) for p in pieces.of(tensor, pieces.READ)), default=0.0)


def _added(squares: Iterable[float]) -> float:
    try:
        return math.fsum(squares)
    except OverflowError:  # Of finite numbers; NaN and Inf pass through it.
        return math.inf


def _square(part: Tensor) -> float:
    """The sum of squares of one piece: float32 rows of 128, all else in float64."""
    if part.dtype not in _SINGLE:
        return _squared(part)
    whole = part.numel() // _ROW * _ROW
    rows, rest = part[:whole].view(-1, _ROW), part[whole:]
    square = _squared(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))
    return square + _squared(rest) if rest.numel() else square


def _squared(part: Tensor) -> float:
    length = float(torch.linalg.vector_norm(part, dtype=_double(part)))
    return length * length


def _trusted(square: float, tensor: Tensor) -> bool:
    """Whether a sum of squares shows that all is well, and is exact enough to be used."""
    tiny = _TINY_MEAN_SQUARE if tensor.dtype in _SINGLE else _TINY_IN_DOUBLE
    return tensor.numel() * tiny <= square < math.inf


def _powers_vanish(tensor: Tensor, norm: float, order: float) -> bool:
    """Whether p-th powers of typical elements are too small for float64 to be added up in it."""
    return norm == 0.0 or order * math.log10(norm) < math.log10(tensor.numel()) - 290.0


def _look_again(tensor: Tensor, order: float) -> _Found:
    """Counts NaN and Inf; if there are none, the norm again, in float64 and free of overflow."""
    nan, inf = _count_nonfinite(tensor)
    if nan or inf:
        return (math.nan if nan else math.inf), nan, inf
    peak = _largest(tensor)
    if peak == 0.0 or order == math.inf:
        return peak, 0, 0
    rescaled = [
        _norm(pieces.in_float(part).double() / peak, order)
        for part in pieces.of(tensor, pieces.WRITE)
    ]
    return peak * _combine(rescaled, order), 0, 0


def _norm(part: Tensor, order: float) -> float:
    """In float64: torch adds p-th powers in one running sum, off by 1e-5 at 70,000 in float32."""
    return float(torch.linalg.vector_norm(part, order, dtype=_double(part)))


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _largest_or_nan(part: Tensor) -> float:
    """`aminmax` is four times faster than an inf-norm on the CPU (46 ms to 204 ms for 124 M)."""
    if part.is_complex():
        part = pieces.in_float(part)
    low, high = (float(bound) for bound in torch.aminmax(part))
    return math.nan if math.isnan(low) else max(abs(low), abs(high))  # -0.0 is no magnitude.


def _largest_not_nan(part: Tensor) -> float:
    peak = _largest_or_nan(part)
    if math.isnan(peak):
        return _largest_or_nan(pieces.in_float(part).abs().nan_to_num(nan=0.0, posinf=math.inf))
    return peak


def _statistics(found: list[_Found]) -> Statistics:
    table = torch.tensor(found, **_WIDE)  # Counts are exact in it up to 2^53.
    counts = table[:, 1:].to(torch.int64)
    return Statistics(table[:, 0], counts[:, 0], counts[:, 1])


def _multiply_on_device_(tensors: Sequence[Tensor], multiplier: Tensor) -> None:
    factor = multiplier.to(torch.float32)
    for tensor in tensors:
        if tensor.dtype in _HALF:  # In float32, as torch would round the factor to half first.
            tensor.copy_(tensor.float() * factor)
        else:
            tensor.mul_(multiplier if tensor.dtype in DOUBLE else factor)


def _measure_on_device(tensors: Sequence[Tensor], *, order: float, detail: bool) -> Statistics:
    """As the CPU path, in operations that leave every number on the device."""
    dtype = wide(tensors[0].device)
    found, nan, inf, largest, zeros = [], [], [], [], []
    for tensor in tensors:
        nans = torch.isnan(tensor)
        nan.append(nans.sum())
        inf.append(torch.isinf(tensor).sum())
        magnitude = tensor.abs().masked_fill(nans, 0.0) if tensor.numel() else tensor.abs().sum()
        peak = magnitude.amax().to(dtype)
        # What counts most: no power is more than 1 in its units.
        unit = peak if order >= 0.0 else magnitude.amin().to(dtype)
        safe = torch.where((unit > 0) & torch.isfinite(unit), unit, torch.ones_like(unit))
        if order == 0.0:  # Counts, and has no unit.
            safe = torch.ones_like(unit)
        norm = safe * torch.linalg.vector_norm(magnitude.to(dtype) / safe, order)
        found.append(torch.where(nan[-1] > 0, torch.full_like(norm, math.nan), norm))
        if detail:
            largest.append(peak)
            zeros.append(tensor.numel() - torch.count_nonzero(tensor))
    return Statistics(
        torch.stack(found),
        torch.stack(nan),
        torch.stack(inf),
        torch.stack(largest) if detail else None,
        torch.stack(zeros) if detail else None,
    )


def summarize(statistics: Statistics, *, order: float, double: bool) -> Measurement:
    """The Measurement of tensors whose statistics are known; `double` if one is float64."""
    norms = statistics.norms
    if order == 2.0 and not double and norms.dtype is torch.float64:
        # The square of a float32 norm is far from the ends of float64, so the sum needs no care,
        # and it is finite just when every element is. 8 small operations instead of 20.
        norm = rounded(torch.linalg.vector_norm(norms))
        nonfinite = torch.logical_not(norm < math.inf).to(torch.float32)
    else:
        norm = rounded(total_norm(norms, order), double=double)
        nonfinite = ((statistics.nan + statistics.inf).sum() > 0).to(torch.float32)
    return Measurement(
        order=order, tensors=statistics, norm=norm, nonfinite=nonfinite, double=double
    )


def total_norm(norms: Tensor, order: float) -> Tensor:
    """The norm of all tensors as if they were one vector, never overflowing on the way.

    Of order 0 it is, as torch has it, the count of tensors whose own count is not 0.
    """
    if norms.numel() == 0:
        return norms.new_zeros(())
    if order == 0.0:
        total: Tensor = torch.linalg.vector_norm(norms, order)
        return total
    # The norm that counts most: in its units no power is more than 1.
    unit = norms.amax() if order > 0.0 else norms.amin()
    usable = (unit > 0) & torch.isfinite(unit)
    safe = torch.where(usable, unit, torch.ones_like(unit))
    return torch.where(usable, safe * torch.linalg.vector_norm(norms / safe, order), unit)


def rounded(norm: Tensor, *, double: bool = False) -> Tensor:
    """A total rounded to float32, in its own dtype.

    Beyond the normal numbers of float32 it stays as it is: a norm of 1e39 can still be clipped.

    Args:
        norm: 0-d, of all tensors and all ranks.
        double: whether a gradient is float64; then the norm is, too, as torch's clip has it.
    """
    if double or norm.dtype is not torch.float64:
        return norm
    fits = (norm >= _SMALLEST_SINGLE) & (norm <= _LARGEST_SINGLE)
    return torch.where(fits, norm.to(torch.float32).to(torch.float64), norm)


def rounded_number(norm: float) -> float:
    """As `rounded`, of a number of the host's, where no gradient is float64."""
    fits = _SMALLEST_SINGLE <= norm <= _LARGEST_SINGLE
    return array("f", (norm,))[0] if fits else norm


def any_double(tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` is float64."""
    if isinstance(tensors, AddressedTensors):
        return not DOUBLE.isdisjoint(tensors.at.dtypes)
    return not DOUBLE.isdisjoint({tensor.dtype for tensor in tensors})
