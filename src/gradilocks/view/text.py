"""Numbers, durations and names as text, for terminals and pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

__all__ = ["align", "clean", "count", "duration", "moment", "number", "percent", "scale_text", "shorten", "some_of"]


def align(rows: Sequence[Sequence[str]]) -> str:
    """The lines of a table, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def clean(text: object) -> str:
    r"""Text on one line, with unprintable characters escaped, so that names in a file cannot control the terminal.

    Examples:
        >>> clean("a\x1b[31mb\n\tc")
        'a\\x1b[31mb c'
    """
    shown = " ".join(str(text).split())
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def number(value: float) -> str:
    """A number with four significant digits.

    Examples:
        >>> number(12345.6), number(0.000012), number(3.0), number(float("nan"))
        ('12,350', '1.2e-05', '3', 'NaN')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == 0:
        return "0"
    rounded = float(f"{value:.4g}")
    if 1e-4 <= abs(rounded) < 1e6:
        return f"{rounded:,.0f}" if rounded == int(rounded) else f"{rounded:,.10g}"
    return f"{value:.4g}"


def scale_text(value: float) -> str:
    """A loss scale; powers of two other than 1, 2, 4 and 8 are written as 2^n.

    Examples:
        >>> scale_text(65536.0), scale_text(1000.0), scale_text(4.0)
        ('2^16', '1,000', '4')
    """
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and not 0 <= exponent - 1 <= 3:
        return f"2^{exponent - 1}"
    return number(value)


def percent(share: float) -> str:
    """A share as a percentage; 0% and 100% are shown only for exactly 0 and 1.

    Examples:
        >>> percent(0.0), percent(0.00004), percent(0.123), percent(0.9999)
        ('0%', '< 0.01%', '12.3%', '> 99.9%')
    """
    if 0 < share < 0.0001:
        return "< 0.01%"
    if 0.9995 <= share < 1:
        return "> 99.9%"
    return f"{float(f'{share * 100:.2g}') if share < 0.1 else round(share * 100, 1):g}%"


def count(quantity: int, noun: str) -> str:
    """A number and a noun, singular or plural.

    Examples:
        >>> count(1, "step"), count(12000, "step")
        ('1 step', '12,000 steps')
    """
    return f"{quantity:,} {noun}{'' if quantity == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration in seconds, or in its two largest units.

    Examples:
        >>> duration(3.21), duration(75), duration(7322), duration(200000)
        ('3.2 s', '1 min 15 s', '2 h 2 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(seconds: float) -> str:
    """Local date and time of a Unix time; "" for a number that is not a time.

    Examples:
        >>> moment(1e18), moment(float("nan"))
        ('', '')
    """
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if 0 < seconds < 1e11 else ""


def shorten(name: str, length: int) -> str:
    """A name of at most `length` characters: its beginning and its end.

    Examples:
        >>> shorten("blocks.11.attention.query.weight", 20)
        'blocks.1…uery.weight'
    """
    if len(name) <= length:
        return name
    front = (length - 1) * 2 // 5 + 1
    return f"{name[:front]}…{name[len(name) - (length - 1 - front) :]}"


def some_of(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, and how many more there are.

    Examples:
        >>> some_of(["a", "b", "c", "d", "e"]), some_of(["a", "b"])
        ('a, b, c and 2 more', 'a and b')
    """
    shown = [clean(name) for name in names[:limit]]
    if len(names) > limit:
        return f"{', '.join(shown)} and {len(names) - limit:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
