"""Numbers, names and durations → the words in which a report speaks.

Whatever a run file brings (names, commands, error texts) passes `clean` before anybody sees it: a
control character could move a terminal's cursor, half a surrogate pair cannot be written at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from markupsafe import Markup, escape


def clean(text: object) -> str:
    r"""Returns a text with every character that cannot be printed as its escape.

    Example:
        >>> clean("a\x1b[31mb")
        'a\\x1b[31mb'
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def shortened(text: str, most: int) -> str:
    """Returns a text of at most `most` characters: its two ends, which tell names apart.

    Example:
        >>> shortened("blocks.11.attention.query.weight", 20)
        'blocks.11…ery.weight'
    """
    if len(text) <= most:
        return text
    front = (most - 1) // 2
    return f"{text[:front]}…{text[len(text) - (most - 1 - front) :]}"


def short_name(name: str, most: int) -> str:
    """Returns a parameter's or module's name in at most `most` characters.

    What tells a block from its neighbours stays: its number, and the end of the name. Words before
    them are cut to their first letters, from the left, as many as must be.

    Example:
        >>> short_name("transformer.h.11.attn.c_attn.weight", 28)
        't.h.11.attn.c_attn.weight'
        >>> short_name("transformer.h.11.attn.c_attn.weight", 18)
        't.h.11.a.c.weight'
        >>> short_name("model.encoder.stages.2.blocks.11.attention.query.weight", 14)
        '…2.b.11.a.q.w'
    """
    return short_names([name], most)[0]


def short_names(names: Sequence[str], most: int) -> list[str]:
    """Returns names that stand below each other, all of them cut alike, and no two to the same."""
    depth = max((name.count(".") for name in names), default=0)
    cut = list(names)
    for place in range(depth + 1):
        # Those of one or two words have no letters to spare, and are cut by themselves.
        if all(len(name) <= most for name in cut if name.count(".") > 1):
            break
        # The last word gives way as well, where there are others.
        shorter = [_first_letters(name, place + 1) for name in names]
        if len({*shorter}) < len({*names}):
            break
        cut = shorter
    left = [name if len(name) <= most else _without_first(name, most) for name in cut]
    if len({*left}) < len({*names}):
        # What tells two layers apart often stands before the last word, which says only "weight".
        last = [name if len(name) <= most else _last_but_one(name, most) for name in names]
        left = last if len({*last}) == len({*names}) else _numbered(left, names, most)
    return left


def _first_letters(name: str, words: int) -> str:
    parts = name.split(".")
    if len(parts) < 3:
        return name
    return ".".join(
        part if place >= words or part.isdigit() else part[:1] for place, part in enumerate(parts)
    )


def _without_first(name: str, most: int) -> str:
    """A name of first letters without those before the first number, and after it if need be."""
    parts = name.split(".")
    while len(parts) > 2 and len("…" + ".".join(parts)) > most:
        letters = [place for place, part in enumerate(parts[:-1]) if not part.isdigit()]
        if not letters:
            break
        del parts[letters[0]]
    kept = "…" + ".".join(parts)
    return kept if len(kept) <= most else shortened(name, most)


def _last_but_one(name: str, most: int) -> str:
    """A name of first letters but for the last word but one, from the first number on at worst."""
    parts = name.split(".")
    whole = len(parts) - 2
    short = [p if p.isdigit() or place == whole else p[:1] for place, p in enumerate(parts)]
    kept = ".".join(short)
    while len(kept) > most and len(short) > 2 and not short[0].isdigit():
        del short[0]
        kept = "…" + ".".join(short)
    return kept if len(kept) <= most else shortened(name, most)


def _numbered(short: Sequence[str], names: Sequence[str], most: int) -> list[str]:
    """Short names of which those that would stand for several are told apart by a number."""
    found: dict[str, str] = {}
    used: set[str] = set()
    for each, name in zip(short, names, strict=True):
        told, times = each, 1
        while name not in found and told in used:
            times += 1
            told = f"{each[: most - len(str(times)) - 3]} ({times})"
        used.add(found.setdefault(name, told))
    return [found[name] for name in names]


def number(value: float) -> str:
    """Returns a number in three significant digits.

    Example:
        >>> number(1234.5), number(0.00012), number(3)
        ('1,230', '0.00012', '3')
    """
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        rounded = float(f"{value:.3g}")
        return f"{rounded:,.0f}" if rounded == int(rounded) else f"{rounded:,.6g}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def power(value: float) -> str:
    """Returns a scale: as a power of two if it is one.

    Example:
        >>> power(65536.0), power(1000.0), power(1.0)
        ('2^16', '1,000', '1')
    """
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and not 0 <= exponent - 1 <= 3:
        return f"2^{exponent - 1}"
    return number(value)


def percent(share: float) -> str:
    """Returns a share as a percentage; one that is not 0 never reads as 0.

    Example:
        >>> percent(0.0), percent(0.00004), percent(0.123)
        ('0 %', '< 0.01 %', '12.3 %')
    """
    if 0 < share < 0.0001:
        return "< 0.01 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{float(f'{share * 100:.2g}') if share < 0.1 else round(share * 100, 1):g} %"


def count(how_many: int, noun: str) -> str:
    """Returns a number with its noun.

    Example:
        >>> count(1, "step"), count(12000, "step")
        ('1 step', '12,000 steps')
    """
    return f"{how_many:,} {noun}{'' if how_many == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns a duration in its two largest units.

    Example:
        >>> duration(3.21), duration(75), duration(7322), duration(200000)
        ('3.2 s', '1 min 15 s', '2 h 2 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, name, smaller, other in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {other}"
    raise AssertionError(seconds)


def size(bytes: float) -> str:
    """Returns an amount of memory.

    Example:
        >>> size(512 * 1024), size(3 * 2**30)
        ('512 KiB', '3 GiB')
    """
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if bytes >= unit:
            return f"{number(bytes / unit)} {name}"
    return f"{number(bytes / 2**10)} KiB"


def sentence_case(words: str) -> str:
    """Returns words with a capital at the beginning, the rest as it was."""
    return words[:1].upper() + words[1:]


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """Returns a few names, and how many more there are.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    shown = [clean(name) for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join(shown) if len(shown) < 3 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def prose(sentence: str) -> Markup:
    """Returns a sentence as HTML; what stands in backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(sentence))))


def raised(words: str) -> Markup:
    """Returns words as HTML, powers of two as type has them."""
    return Markup(re.sub(r"\b2\^(-?\d+)", r"2<sup>\1</sup>", str(escape(words))))


def numeral(words: str) -> Markup:
    """Returns a number as HTML: a power raised, a share in brackets small.

    Example:
        >>> print(numeral("35 (11.7 %)"), numeral("2^16"))
        35 <small>11.7 %</small> 2<sup>16</sup>
    """
    return Markup(re.sub(r" \((.+)\)$", r" <small>\1</small>", str(raised(words))))
