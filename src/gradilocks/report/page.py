"""A template and what it shows → one HTML file that holds its style, its scripts and its plots.

`report_page`, `audit_page` and `experiment` say what is shown; `templates/` lay it out, each as a
child of `page.html`. Text from a file reaches a page in two ways only: escaped by the templates,
and as JSON in a data block in which no ``<``, ``>`` or ``&`` stands. On top of that the page's own
policy lets the browser run the scripts with these hashes and no other, and fetch nothing. Pages
that lie together may share one copy of plotly.js, from which they then may run scripts on disk.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

import gradilocks.report.formatting as formatting
from gradilocks.errors import GradilocksError
from gradilocks.report.destination import GENERATOR
from gradilocks.report.figures import Section

if TYPE_CHECKING:
    from jinja2 import Environment

FILTERS = ("clean", "duration", "listed", "numeral", "power", "prose", "raised", "sentence_case")
# From here on the digits of a number tell less than its size.
HUGE = 1e9


def to_html(
    template: str,
    *,
    sections: Iterable[Section] = (),
    panels: Iterable[Mapping[str, Any]] = (),
    generator: str = GENERATOR,
    scripts: Iterable[str] = (),
    plotly: str = "",
    **shown: Any,
) -> str:
    """Lays a page out.

    Args:
        template: the name of one in `templates/`.
        sections: plots of runs.
        panels: audits, as `audit_page.panel` makes them.
        generator: what the page says it was made by.
        scripts: names of further ones in `assets/`.
        plotly: where a copy of plotly.js is, seen from the page, which has none in it then.
        shown: what the template asks for; all ask for `title`, `kind`, `heading`, and `identity`,
            by which a later page may replace this one.
    """
    from gradilocks._version import __version__

    assets = files("gradilocks.report") / "assets"
    figures = [figure for section in sections for figure in section.figures]
    figures += [figure for panel in panels for figure in panel.get("figures", ())]
    names = ("page.js", *(("audit.js",) if panels else ()), *scripts)
    texts = [(assets / name).read_text(encoding="utf-8") for name in names]
    if figures and not plotly:
        texts.insert(0, plotly_script())
    shown |= {"sections": sections, "panels": panels, "generator": generator}
    made = _templates().get_template(template)
    return made.render(
        shown,
        plots={figure.key: figure.plot for figure in figures},
        version=__version__,
        scripts=[Markup(script) for script in texts],
        hashes=" ".join([*map(_hash, texts), *(("'self'", "file:") if plotly and figures else ())]),
        plotly=plotly if figures else "",
    )


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("gradilocks.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters |= {name: getattr(formatting, name) for name in FILTERS}
    made.filters["in_digits"] = in_digits
    return made


def in_digits(value: float | int | str) -> str:
    """A number of a finding's evidence: by its digits, by its size if it is huge."""
    if isinstance(value, str):
        return value
    return f"{value:,.4g}" if value % 1 or abs(value) >= HUGE else f"{value:,.0f}"


def plotly_script() -> str:
    """What draws the plots, 4.8 MB.

    Raises:
        GradilocksError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise GradilocksError("plotly is not installed: pip install plotly") from error
    # A script ends at the first "</script", even inside a string of its own.
    return str(get_plotlyjs()).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
