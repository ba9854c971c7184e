"""The representation of one number in each format, with and without a loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradilocks.checks import check_number
from gradilocks.formats import FORMATS, Format
from gradilocks.view.text import align

__all__ = ["StoredNumber", "explain", "to_text"]


@dataclass(frozen=True)
class StoredNumber:
    """A number, multiplied by a scale, stored in a format and divided by the scale again."""

    format: Format
    value: float
    scale: float
    stored: float
    """value × scale, rounded to the format."""
    bits: str
    """Sign, exponent and mantissa of `stored`."""
    recovered: float
    """stored / scale."""
    result: str
    """"exact", "rounded", "subnormal" (fewer significant bits), "underflow" (became zero) or "overflow"."""
    significant_bits: int
    """Number of significant bits of `stored`; 0 for zero and Inf."""

    @property
    def relative_error(self) -> float:
        """|recovered - value| / |value|; inf after an overflow to Inf."""
        return abs(self.recovered - self.value) / abs(self.value) if self.value else 0.0

    def describe(self) -> str:
        """The result in a few words."""
        error = f"error {100 * self.relative_error:.2g}%"
        if self.result == "subnormal":
            full = self.format.mantissa_bits + 1
            error = "exact" if self.recovered == self.value else error
            return f"subnormal: {self.significant_bits} of {full} significant bits, {error}"
        return {
            "exact": "exact",
            "rounded": error,
            "underflow": f"underflow: magnitudes up to {self.format.smallest_subnormal / 2:.3g} become 0",
            "overflow": f"overflow: the largest number is {self.format.largest:.6g}",
        }[self.result]


def explain(value: float, *, scale: float | None = None) -> list[StoredNumber]:
    """Shows how a number is stored in each format.

    Args:
        value: a finite number.
        scale: a loss scale, above 0. The product value × scale is computed in float64.

    Returns:
        One row per format without a scale, then one row per format with `scale` if it is given. `to_text` formats the
        rows as tables.

    Examples:
        >>> rows = {row.format.name: row for row in explain(6e-8)}
        >>> rows["fp16"].recovered, rows["fp16"].significant_bits
        (5.960464477539063e-08, 1)
        >>> rows["fp8_e5m2"].result
        'underflow'
    """
    check_number("value", value, below=math.inf)
    if value == -math.inf:
        raise ValueError("value must be finite, got -inf.")
    if scale is not None:
        check_number("scale", scale, above=0.0, below=math.inf)
    scales = (1.0,) if scale is None else (1.0, float(scale))
    return [_store(format, float(value), factor) for factor in scales for format in FORMATS.values()]


def _store(format: Format, value: float, scale: float) -> StoredNumber:
    product = value * scale
    stored = format.round(product)
    if format.overflows(product):
        result = "overflow"
    elif stored == 0.0 and value != 0.0:
        result = "underflow"
    elif 0.0 < abs(stored) < format.smallest_normal:
        result = "subnormal"
    else:
        result = "exact" if stored == product else "rounded"
    bits, significant_bits = format.bits(stored), format.significant_bits(stored)
    return StoredNumber(format, value, scale, stored, bits, stored / scale, result, significant_bits)


def to_text(rows: list[StoredNumber]) -> str:
    """Tables of the rows of `explain`, one per scale."""
    tables = []
    for scale in dict.fromkeys(row.scale for row in rows):
        chosen = [row for row in rows if row.scale == scale]
        value = chosen[0].value
        title = f"{value:g}" if scale == 1.0 else f"{value:g} × {scale:g} = {value * scale:.4g}"
        cells = [("format", "sign exponent mantissa", "stored", "recovered", "result")]
        cells += [(r.format.name, r.bits, f"{r.stored:.6g}", f"{r.recovered:.6g}", r.describe()) for r in chosen]
        tables.append("\n  ".join([title, *align(cells).splitlines()]))
    return "\n\n".join(tables)
