"""The HTML around what a page shows: style, scripts, plots and data are inside, nothing is fetched.

Text from a file reaches a page in two ways only: through `html.escape`, and as JSON in a data block
in which no ``<``, ``>`` or ``&`` stands. On top of that the page's own policy lets the browser run
the scripts with these hashes and no other, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from gradilocks.errors import GradilocksError

__all__ = ["GENERATOR", "embedded", "framed", "headed"]

GENERATOR = "gradilocks report"


def framed(
    title: str,
    parts: Sequence[str],
    plots: Mapping[str, Any],
    *,
    identity: str,
    audited: bool = False,
) -> str:
    """Returns a whole page.

    Args:
        title: for the browser's tab.
        parts: the body's HTML, one after another.
        plots: what plotly.js draws, by the id of the place.
        identity: names what the page is about, so that a newer page on the same may replace it.
        audited: whether an audit's panel is on it, which has its own style and script.
    """
    assets = ("page", "audit") if audited else ("page",)
    scripts = [_plotly(), *(_asset(f"{name}.js") for name in assets)]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"img-src data: blob:; script-src {' '.join(map(_hash, scripts))}"
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{GENERATOR}">\n'
        f'<meta name="gradilocks-runs" content="{identity}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{''.join(_asset(f'{name}.css') for name in assets)}</style>\n</head>\n"
    )
    body = [
        "<body>",
        *parts,
        _footer(),
        f'<script type="application/json" id="plots">{embedded(plots)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>\n</html>\n",
    ]
    return head + "\n".join(body)


def headed(kind: str, title: str, below: str = "") -> str:
    """Returns the top of a page: what it is, of what, and the button for the theme."""
    return (
        f'<header><div><p class="kind">{kind}</p><h1>{escape(title)}</h1>{below}</div>'
        '<button type="button" id="theme" hidden>Dark</button></header>\n'
        '<noscript><p class="noscript">The plots need JavaScript, which is switched off here. '
        "Findings and numbers are complete without it.</p></noscript>"
    )


def embedded(data: Any) -> str:
    """JSON that no HTML parser can take for anything else; ASCII, so also without U+2028."""
    dumped = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _footer() -> str:
    from gradilocks import __version__

    return (
        f"<footer><p>Made by Gradilocks {__version__}. This page is complete: it loads "
        "nothing from anywhere.</p></footer>"
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise GradilocksError("plotly is not installed: pip install plotly") from error
    # A script ends at the first "</script", even inside a string of its own.
    return str(get_plotlyjs()).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return (files("gradilocks.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
