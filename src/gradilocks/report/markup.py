"""Numbers, sentences and figures → the pieces of HTML of which pages are made."""

from __future__ import annotations

import re
from html import escape

from gradilocks.report.figures import Figure

__all__ = ["drawing", "numeral", "prose", "raised", "sentence_case", "swatch"]


def drawing(figure: Figure) -> str:
    """A figure with its words, and the place where the script draws it."""
    remark = f'<p class="remark">{escape(figure.remark)}</p>' if figure.remark else ""
    wide = " wide" if figure.wide else ""
    return (
        f'<figure class="plot{wide}"><figcaption><h3>{escape(figure.title)}</h3>'
        f"<p>{escape(figure.reading)}</p>{remark}</figcaption>"
        f'<div class="canvas" id="{figure.key}" style="height:{figure.height}px" role="img" '
        f'aria-label="{escape(f"Plot: {figure.title}. {figure.reading}")}"></div></figure>'
    )


def numeral(value: str) -> str:
    """A number as type has it: a power raised, a share in brackets small."""
    return re.sub(r" \((.+)\)$", r" <small>\1</small>", raised(escape(value)))


def raised(html: str) -> str:
    """Powers of two as type has them."""
    return re.sub(r"\b2\^(-?\d+)", r"2<sup>\1</sup>", html)


def prose(sentence: str) -> str:
    """A sentence; what stands in backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence))


def sentence_case(words: str) -> str:
    return escape(words[:1].upper() + words[1:])


def swatch(number: int) -> str:
    """The colour of a run, beside its name."""
    return f'<span class="swatch" data-run="{number}" aria-hidden="true"></span>'
