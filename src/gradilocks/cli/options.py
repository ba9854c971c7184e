"""Text from the command line enters; a number leaves, or what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import typer

from gradilocks.cli.completion import run_files


def whole_number(*, smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """Returns the parser of a whole number, for ``typer.Option(parser=...)``."""
    bounds = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            raise typer.BadParameter(f"expected a whole number {bounds}, got {str(text)!r}.")
        return value

    return parse


def run_file(metavar: str, *, help: str) -> Any:
    """Declares an argument that is a run file: one that shells complete as a path."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=run_files)


def number(
    option: str, text: str, *, smallest: float, largest: float, words: tuple[str, ...]
) -> float:
    """Reads a number that may also be one of a few words, which the caller has looked for.

    Args:
        option: the option's name, for the message.
        text: what came.
        smallest: the least it may be.
        largest: the most it may be.
        words: what it could have been instead, for the message.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not smallest <= value <= largest:
        raise typer.BadParameter(
            f"expected {', '.join(words)} or a number from {smallest:.3g} to {largest:.3g}, "
            f"got {text!r}.",
            param_hint=f"'{option}'",
        )
    return value
