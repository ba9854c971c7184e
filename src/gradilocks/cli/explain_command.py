"""``gradilocks explain``: a number enters; what each format makes of it is shown, bit by bit."""

from __future__ import annotations

import json
import math
import operator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradilocks.cli.options import checked, flag
from gradilocks.cli.terminal import forgive_encoding

if TYPE_CHECKING:
    from gradilocks.lab.formats import Stored

NUMBERS: dict[str, Any] = {"ignore_unknown_options": True}  # -1e-8 is a number, not an option.


def _number(text: str) -> float:
    try:
        value = _worked_out(text)
    except OverflowError:
        value = math.inf
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(
            f"expected a number such as 6e-8, 2^-25 or 1/3, got {text!r}."
        ) from None
    if not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {text!r}.")
    return value


def _worked_out(text: str) -> float:
    """A number, a power or a quotient of two."""
    for sign, of in (("**", math.pow), ("^", math.pow), ("/", operator.truediv)):
        left, found, right = text.partition(sign)
        if found:
            minus = left.startswith("-") and sign != "/"  # As people and Python read -2**4.
            size = float(of(float(left.removeprefix("-") if minus else left), float(right)))
            return -size if minus else size
    return float(text)


def explain(
    value: Annotated[float, typer.Argument(parser=_number, metavar="NUMBER", help="The number.")],
    scale: Annotated[
        float | None,
        typer.Option(
            parser=checked(_number, lambda scale: scale > 0, "a scale above 0"),
            metavar="SCALE",
            help="Multiply by this first, as a loss is.",
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print it as JSON.")] = False,
) -> None:
    """Show what a number becomes in each format, bit by bit.

    \b
    Examples:
      gradilocks explain 6e-8
      gradilocks explain 6e-8 --scale 32768
      gradilocks explain 2^-25
      gradilocks explain -1e-9 --scale 65536 --json
    """
    forgive_encoding()
    from gradilocks.lab.formats import describe

    try:
        shown = [describe(value)] + ([describe(value, scale)] if scale is not None else [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps([_plain(each) for table in shown for each in table], indent=1))
        return
    for table in shown:
        print(_heading(table[0]))
        for row in _rows(table):
            print(row.rstrip())
        print()
    print(_conclusion(shown))


def _heading(first: Stored) -> str:
    if first.scale == 1.0:
        return f"{first.value:g} as it is"
    return f"{first.value:g} times {first.scale:g} is {first.value * first.scale:g}"


def _rows(table: list[Stored]) -> list[str]:
    cells = [("format", "sign exponent mantissa", "stored", "left of it", "")]
    cells += [
        (each.format.name, each.bits, f"{each.stored:.6g}", f"{each.back:.6g}", _words(each))
        for each in table
    ]
    widths = [*(max(map(len, column)) for column in list(zip(*cells, strict=True))[:4]), 0]
    return [
        "  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        for row in cells
    ]


def _words(each: Stored) -> str:
    off = f"off by {100 * each.error:.2g} %"
    bits = "1 bit" if each.precision == 1 else f"{each.precision} bits"
    return {
        "exact": "exact",
        "overflow": f"too large: above {each.format.largest:g}",
        "zero": f"lost: no more than half of {each.format.smallest_subnormal:.3g}",
        "subnormal": f"subnormal, {bits}, {off}",
    }.get(each.fate, off)


def _conclusion(shown: list[list[Stored]]) -> str:
    before, *scaled = (each for table in shown for each in table if each.format.name == "fp16")
    first = f"In fp16 it is {_told(before)}."
    if before.fate == "subnormal":
        first = (
            f"Under 6.1e-5 fp16 loses precision, not the number: here it keeps {before.precision} "
            "of 11 bits."
        )
    return " ".join([first, *(f"With the scale it is {_told(each)}." for each in scaled)])


def _told(each: Stored) -> str:
    return {
        "exact": "exact",
        "rounded": "stored with all 11 bits",
        "subnormal": f"stored with {each.precision} of 11 bits",
        "zero": "rounded to zero",
        "overflow": "too large, and becomes Inf",
    }[each.fate]


def _plain(each: Stored) -> dict[str, Any]:
    plain = {
        "format": each.format.name,
        "value": each.value,
        "scale": each.scale,
        "stored": each.stored,
        "left": each.back,
        "bits": each.bits,
        "fate": each.fate,
        "significant_bits": each.precision,
        "relative_error": each.error,
    }
    # JSON knows no Inf.
    return {k: None if v in (math.inf, -math.inf) or v != v else v for k, v in plain.items()}
