"""Number formats: what each can hold, and what becomes of a number that is stored in it.

A number is rounded exactly, in integers, to the nearest value of the format, ties to even, as
hardware does. Below the smallest normal number the distance between values stays the same, so
precision is lost bit by bit, and only what is at most half the smallest subnormal becomes zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["FORMATS", "Format", "Stored", "describe", "format_named"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: a sign, an exponent, a mantissa.

    Example:
        >>> FORMATS["fp16"].largest, FORMATS["fp16"].smallest_subnormal
        (65504.0, 5.960464477539063e-08)
    """

    name: str
    dtype: str
    """What torch calls it; '' if it has none."""
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    infinite: bool
    """Whether it has infinities; if not, what is too large becomes the largest, as torch has it."""
    nan: bool = True
    words: str = ""
    """Where it is used."""

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all its bits of precision."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def edges(self) -> tuple[float, float, float]:
        """As log2: what is not above the first rounds to zero, what is below the second is
        subnormal, what is above the third overflows."""
        lost = math.log2(self.smallest_subnormal) - 1  # A tie goes to the even one, which is zero.
        return lost, math.log2(self.smallest_normal), math.log2(self.largest)

    def round(self, value: float | Fraction) -> float:
        """The value as it is stored: to nearest, ties to even."""
        if isinstance(value, float) and not math.isfinite(value):
            return value if math.isnan(value) else self._too_large(value)
        if value == 0:
            return float(value)
        exact = abs(Fraction(value))
        exponent = max(_exponent(exact), 1 - self.bias)
        quantum = Fraction(2) ** (exponent - self.mantissa_bits)
        stored = round(exact / quantum) * quantum  # Python rounds halves to even.
        if stored > Fraction(self.largest):
            return self._too_large(-1.0 if value < 0 else 1.0)
        return math.copysign(float(stored), -1.0 if value < 0 else 1.0)

    def bits(self, stored: float) -> str:
        """A stored number as it lies in memory: sign, exponent and mantissa, apart by spaces."""
        sign = "1" if math.copysign(1.0, stored) < 0 else "0"
        ones = (1 << self.exponent_bits) - 1
        if math.isnan(stored):
            if not self.nan:
                return "no NaN"
            return self._joined("0", ones, (1 << self.mantissa_bits) - 1)
        if math.isinf(stored):
            return self._joined(sign, ones, 0)
        if stored == 0.0:
            return self._joined(sign, 0, 0)
        exponent = max(math.frexp(stored)[1] - 1, 1 - self.bias)
        steps = int(abs(Fraction(stored)) / Fraction(2) ** (exponent - self.mantissa_bits))
        normal = steps >> self.mantissa_bits  # 1, or 0 for a subnormal.
        field = exponent + self.bias if normal else 0
        return self._joined(sign, field, steps - (normal << self.mantissa_bits))

    def _joined(self, sign: str, exponent: int, mantissa: int) -> str:
        return f"{sign} {exponent:0{self.exponent_bits}b} {mantissa:0{self.mantissa_bits}b}"

    def _too_large(self, value: float) -> float:
        return math.copysign(math.inf if self.infinite else self.largest, value)


def _exponent(exact: Fraction) -> int:
    """The exponent of a positive number: the largest power of two that is not above it."""
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= exact else exponent - 1


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("fp32", "float32", 8, 23, 127, (2 - 2.0**-23) * 2.0**127, True, words="the default"),
        Format("tf32", "", 8, 10, 127, (2 - 2.0**-10) * 2.0**127, True, words="inside matmuls"),
        Format("bf16", "bfloat16", 8, 7, 127, (2 - 2.0**-7) * 2.0**127, True, words="fp32's range"),
        Format("fp16", "float16", 5, 10, 15, 65504.0, True, words="needs a loss scale"),
        Format("fp8 e5m2", "float8_e5m2", 5, 2, 15, 57344.0, True, words="gradients"),
        Format("fp8 e4m3", "float8_e4m3fn", 4, 3, 7, 448.0, False, words="weights, activations"),
        Format("fp4 e2m1", "", 2, 1, 1, 6.0, False, nan=False, words="under a scale a block"),
    )
}


@dataclass(frozen=True)
class Stored:
    """What becomes of a number in a format, times a scale and divided by it again."""

    format: Format
    value: float
    """The number that was given."""
    scale: float
    stored: float
    """What is stored of value × scale."""
    bits: str
    back: float
    """Stored / scale: what is left of the value."""

    @property
    def error(self) -> float:
        """How far off it is, as a share of the value; inf or NaN if it is."""
        if self.value == 0.0:
            return 0.0
        return abs(self.back / self.value - 1.0)

    @property
    def fate(self) -> str:
        """'exact', 'rounded', 'subnormal', 'zero' or 'overflow'."""
        if not math.isfinite(self.stored) or self._saturated():
            return "overflow"
        if self.stored == 0.0:
            return "zero" if self.value != 0.0 else "exact"
        if abs(self.stored) < self.format.smallest_normal:
            return "subnormal"
        return "exact" if Fraction(self.stored) == self._meant() else "rounded"

    @property
    def precision(self) -> int:
        """How many significant bits the stored number has room for; 0 for zero."""
        if self.stored == 0.0 or not math.isfinite(self.stored):
            return 0
        steps = abs(Fraction(self.stored)) / Fraction(self.format.smallest_subnormal)
        return min(int(steps).bit_length(), self.format.mantissa_bits + 1)

    def _saturated(self) -> bool:
        """Whether it is the largest number only because there is no larger one."""
        top = Fraction(self.format.largest)
        half = Fraction(2) ** (math.frexp(float(top))[1] - 2 - self.format.mantissa_bits)
        return not self.format.infinite and abs(self._meant()) > top + half

    def _meant(self) -> Fraction:
        return Fraction(self.value) * Fraction(self.scale)


def describe(value: float, scale: float = 1.0) -> list[Stored]:
    """What `value` becomes in every format, multiplied by `scale` first.

    Args:
        value: a finite number.
        scale: positive and finite.

    Returns:
        One entry a format, in the order of FORMATS.

    Example:
        >>> {s.format.name: s.back for s in describe(6e-8)}["fp16"]
        5.960464477539063e-08
    """
    value, scale = _number("value", value), _number("scale", scale)
    if not math.isfinite(value):
        raise ValueError(f"value must be a finite number, got {value}.")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}.")
    if not math.isfinite(value * scale):
        raise ValueError(f"{value} times {scale} is beyond every format. Take a smaller scale.")
    scaled = Fraction(value) * Fraction(scale)  # Exact: rounded once, by the format.
    made = []
    for each in FORMATS.values():
        # A product of zero keeps the sign of the value.
        stored = each.round(scaled) if scaled else value
        made.append(Stored(each, value, scale, stored, each.bits(stored), stored / scale))
    return made


def _number(name: str, given: float) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name} must be a number, got {given!r}.")
    try:
        return float(given)
    except OverflowError:
        raise ValueError(f"{name} must be a number that float64 holds, got a larger one.") from None


def format_named(format: object) -> Format:
    """The format that is meant: a Format, a torch.dtype, 'fp16', 'float16', 'half', 'e4m3', ...

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(format, Format):
        return format
    wanted = str(format).lower().removeprefix("torch.").replace("_", " ").strip()
    for each in FORMATS.values():
        dtype = each.dtype.replace("_", " ")
        names = {each.name, dtype, each.name.split()[-1], dtype.split(" ")[-1]}
        names |= {"fp16": {"half"}, "fp4 e2m1": {"fp4"}}.get(each.name, set())
        if wanted in names - {""}:
            return each
    known = ", ".join(FORMATS)
    raise ValueError(f"there is no format {str(format)!r}. Known are {known}; e5m2 alone will do.")
