"""A Page → one HTML file that needs nothing else: style, scripts, plots and data inside.

What stands on a page is plain data, made by `report_page`, `audit_page` and `experiment`;
`templates/` lays it out, for all of them alike. Text from a file reaches a page in two ways only:
escaped by the templates, and as JSON in a data block in which no ``<``, ``>`` or ``&`` stands. On
top of that the page's own policy lets the browser run the scripts with these hashes and no other,
and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gradilocks.errors import GradilocksError
from gradilocks.report.destination import GENERATOR
from gradilocks.report.figures import Figure, Section
from gradilocks.report.formatting import listed, numeral, prose, raised, sentence_case
from gradilocks.report.health import Health

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["Bear", "FormatRow", "Page", "Pairs", "Panel", "Row", "RunPart", "Table", "to_html"]

Pairs = Sequence[tuple[str, str]]
"""Names and what to say about each."""

# From here on the digits of a number tell less than its size.
HUGE = 1e9


@dataclass(frozen=True)
class RunPart:
    """What a page says about one run."""

    label: str
    health: Health
    colour: int | None = None
    """The number of its colour; None if the page is about this run alone."""
    tiles: Sequence[tuple[str, Pairs]] = ()
    """A heading ('' for none) and the main numbers of each of its optimizers."""
    link: str = ""
    """Where its own report is, if there is one beside this page."""
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """A row of a table: a run, its colour, and a text for each column but the first."""

    label: str
    colour: int
    cells: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Runs under each other, the same numbers of each beside each other."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Row]
    hint: str = ""
    unbroken: bool = False
    """Whether a cell stays on one line; the table scrolls instead."""


@dataclass(frozen=True)
class FormatRow:
    """A row of the audit's table of formats, each number as it is written there."""

    name: str
    scale: str
    cells: Sequence[str]
    holds: bool
    keep: Sequence[str]
    recommended: bool


@dataclass(frozen=True)
class Panel:
    """What an audit found; if it cannot be read, only why.

    Attributes:
        key: what the ids on the page begin with.
        on_report: whether the panel is a part of a report, and not a page of its own.
        label: the run that was audited, if the page is about several.
        words: the recommendation, sentence by sentence.
        first: the name of the format to show first.
        kinds: which gradients the second picture can show: their view, and what to call them.
        modules: names and classes.
        by_format: what the page's script shows of each format, as JSON.
    """

    key: str
    on_report: bool = False
    label: str = ""
    colour: int | None = None
    unreadable: str = ""
    kind: str = ""
    words: Sequence[str] = ()
    tiles: Pairs = ()
    first: str = ""
    formats: Sequence[FormatRow] = ()
    kinds: Pairs = ()
    figures: Sequence[Figure] = ()
    modules: Pairs = ()
    by_format: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bear:
    """One of the demo's three claims, and what came of it."""

    name: str
    size: int
    colour: int
    kind: str
    """'good' for a claim that holds, 'problem' for one that does not, else 'note'."""
    outcome: str
    claim: str
    sentence: str


@dataclass(frozen=True)
class Page:
    """Everything that stands on a page; parts that are empty are left out.

    Attributes:
        title: of the window.
        identity: of what the page is about, by which a later page may replace it.
        facts: for each run its name ('' if the page is about one), its colour, and what ran.
    """

    title: str
    kind: str
    heading: str
    identity: str
    generator: str = GENERATOR
    command: str = ""
    about: str = ""
    bears: Sequence[Bear] = ()
    numbers: Sequence[Table] = ()
    runs: Sequence[RunPart] = ()
    runs_lead: str = ""
    sections: Sequence[Section] = ()
    panels: Sequence[Panel] = ()
    settings: Sequence[Table] = ()
    facts: Sequence[tuple[str, int | None, Pairs]] = ()
    facts_title: str = "What ran"


def to_html(page: Page) -> str:
    """Lays a page out."""
    from gradilocks._version import __version__

    assets = files("gradilocks.report") / "assets"
    names = ("page.js", "audit.js") if page.panels else ("page.js",)
    scripts = [_plotly(), *((assets / name).read_text(encoding="utf-8") for name in names)]
    parts: list[Section | Panel] = [*page.sections, *page.panels]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"img-src data: blob:; script-src {' '.join(map(_hash, scripts))}"
    )
    return _page_template().render(
        page=page,
        plots={figure.key: figure.plot for part in parts for figure in part.figures},
        version=__version__,
        scripts=[Markup(script) for script in scripts],
        policy=policy,
    )


@cache
def _page_template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("gradilocks.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    for each in (in_digits, listed, numeral, prose, raised, sentence_case):
        made.filters[each.__name__] = each
    return made.get_template("page.html")


def in_digits(value: float | int | str) -> str:
    """A number of a finding's evidence: by its digits, by its size if it is huge."""
    if isinstance(value, str):
        return value
    return f"{value:,.4g}" if value % 1 or abs(value) >= HUGE else f"{value:,.0f}"


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise GradilocksError("plotly is not installed: pip install plotly") from error
    # A script ends at the first "</script", even inside a string of its own.
    return str(get_plotlyjs()).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
