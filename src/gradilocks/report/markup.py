"""Numbers, sentences and figures → the pieces of HTML of which pages are made."""

from __future__ import annotations

import re
from html import escape

from gradilocks.report.figures import Figure

__all__ = ["drawing", "numeral", "prose", "sentence_case", "swatch"]


def drawing(figure: Figure) -> str:
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
    raised = re.sub(r"\b2\^(-?\d+)", r"2<sup>\1</sup>", escape(value))
    return re.sub(r" \((.+)\)$", r" <small>\1</small>", raised)


def prose(sentence: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence))


def sentence_case(words: str) -> str:
    return escape(words[:1].upper() + words[1:])


def swatch(number: int) -> str:
    return f'<span class="swatch" data-run="{number}" aria-hidden="true"></span>'
