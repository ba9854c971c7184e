"""Floating-point formats: their limits, and the rounding of numbers and tensors to them.

Rounding is to nearest, ties to even, with subnormals, as in hardware. Below the smallest normal number, precision
decreases bit by bit; a magnitude becomes zero only at half the smallest subnormal number or less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FORMATS", "Format", "find_format"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: one sign bit, an exponent and a mantissa.

    Examples:
        >>> fp16 = FORMATS["fp16"]
        >>> fp16.largest, fp16.smallest_normal, fp16.smallest_subnormal
        (65504.0, 6.103515625e-05, 5.960464477539063e-08)
        >>> fp16.round(6e-8)
        5.960464477539063e-08
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    """Number of stored bits; a normal number has one more significant bit."""
    largest: float
    min_exponent: int
    """log2 of the smallest normal number."""
    has_infinity: bool = True
    """False if numbers above `largest` are stored as `largest`, not as Inf."""

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def has_range_of_float32(self) -> bool:
        """True if gradients need no loss scale in this format."""
        return self.exponent_bits >= 8

    def overflows(self, value: float) -> bool:
        """True if a number is Inf or rounds to more than `largest`."""
        return self._to_nearest(abs(value)) > self.largest

    def round(self, value: float) -> float:
        """The stored value of a Python float."""
        if self.overflows(value):
            return math.copysign(math.inf if self.has_infinity else self.largest, value)
        return math.copysign(self._to_nearest(abs(value)), value)

    def round_tensor(self, values: Tensor) -> Tensor:
        """A new float32 tensor with the stored values of a float32 tensor."""
        if not self.has_infinity:
            # Older versions of torch return NaN for a number that is too large.
            values = values.clamp(-self.largest, self.largest)
        return values.to(self.dtype, copy=True).to(torch.float32)

    def bits(self, value: float) -> str:
        """Sign, exponent and mantissa of a stored number, separated by spaces."""
        stored = torch.tensor([self.round(value)], dtype=torch.float32).to(self.dtype)
        bytes_ = stored.view(torch.uint8).tolist()
        text = "".join(f"{byte:08b}" for byte in reversed(bytes_))
        return f"{text[0]} {text[1 : 1 + self.exponent_bits]} {text[1 + self.exponent_bits :]}"

    def significant_bits(self, value: float) -> int:
        """Number of significant bits of a stored number; 0 for zero, Inf and NaN."""
        stored = self.round(value)
        if stored == 0.0 or not math.isfinite(stored):
            return 0
        exponent = math.frexp(stored)[1] - 1
        return 1 + self.mantissa_bits - max(self.min_exponent - exponent, 0)

    def _to_nearest(self, value: float) -> float:
        """The nearest multiple of the distance between adjacent numbers, without an upper limit."""
        if value == 0.0 or not math.isfinite(value):
            return value
        exponent = max(math.frexp(value)[1] - 1, self.min_exponent)
        # A division by a power of two is exact, and Python rounds halves to even.
        spacing = 2.0 ** (exponent - self.mantissa_bits)
        return round(value / spacing) * spacing


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("fp32", torch.float32, 8, 23, (2 - 2.0**-23) * 2.0**127, -126),
        Format("bf16", torch.bfloat16, 8, 7, (2 - 2.0**-7) * 2.0**127, -126),
        Format("fp16", torch.float16, 5, 10, 65504.0, -14),
        Format("fp8_e5m2", torch.float8_e5m2, 5, 2, 57344.0, -14),
        Format("fp8_e4m3", torch.float8_e4m3fn, 4, 3, 448.0, -6, has_infinity=False),
    )
}


def find_format(name: str | torch.dtype) -> Format:
    """The format of a name or dtype: "fp16", "float16", torch.float16.

    Raises:
        ValueError: no such format.
    """
    wanted = str(name).removeprefix("torch.")
    for format in FORMATS.values():
        if wanted in (format.name, str(format.dtype).removeprefix("torch.")):
            return format
    raise ValueError(f"unknown format {wanted!r}. Choose one of {', '.join(FORMATS)}.")
