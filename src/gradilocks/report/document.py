"""Parts of a page → one HTML file that needs nothing else: style, scripts, plots and data inside.

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

__all__ = ["GENERATOR", "document", "embedded", "headed"]

GENERATOR = "gradilocks report"


def document(
    *,
    title: str,
    marks: Mapping[str, str],
    header: str,
    main: Sequence[str],
    plots: Mapping[str, Any],
    styles: Sequence[str] = ("page.css",),
    scripts: Sequence[str] = ("page.js",),
) -> str:
    """Returns the page.

    Args:
        title: of the window.
        marks: ``meta`` elements by name, by which a later run knows the page.
        header: what stands above ``main``, as HTML.
        main: its parts, as HTML.
        plots: what page.js draws, by the id of the element to draw it in.
        styles: assets with style sheets.
        scripts: assets to run once plotly.js is there.
    """
    run = [_plotly(), *map(_asset, scripts)]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"img-src data: blob:; script-src {' '.join(map(_hash, run))}"
    )
    named = "".join(f'<meta name="{name}" content="{escape(v)}">\n' for name, v in marks.items())
    style = "".join(map(_asset, styles))
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{named}"
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{style}</style>\n</head>\n"
    )
    body = "\n".join(
        [
            "<body>",
            header,
            "<main>",
            *main,
            "</main>",
            _footer(),
            f'<script type="application/json" id="plots">{embedded(plots)}</script>',
            *(f"<script>{script}</script>" for script in run),
            "</body>\n</html>\n",
        ]
    )
    return head + body


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
