"""An experiment's summary and its runs → one page: three bears, pictures, numbers, settings.

What enters is plain data, as in ``summary.json`` of the demo, and a Track for each run; the page
says what they say. A claim that does not hold is shown as one that does not hold.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from statistics import fmean
from typing import Any

from gradilocks.report.document import document
from gradilocks.report.experiment_figures import (
    CLIPPING,
    SCALING,
    Drawn,
    clipping_figures,
    place_of,
    scaling_figures,
)
from gradilocks.report.experiment_tables import finals, runs_of, settings, swatch
from gradilocks.report.figures import Figure
from gradilocks.report.formatting import clean, duration, percent

__all__ = ["experiment_page"]

Plain = Mapping[str, Any]

# The three bears: how large they are, in pixels, and the arm whose colour they have.
BEARS = {
    "too small": (34, "too-small"),
    "too large": (64, "too-large"),
    "just right": (48, "just-right"),
}
COMPARED = {
    "format": "format that products are stored in",
    "scaled": "loss scale",
    "optimizer": "optimizer",
    "rate": "learning rate",
    "clip": "limit on the gradient norm",
}
KINDS = {True: "good", False: "problem", None: "note"}
WORDS = {True: "✓ Claim holds", False: "✕ Claim does not hold", None: "Not judged"}


def experiment_page(
    summary: Plain, drawn: Sequence[Drawn], *, pages: Mapping[str, str], generator: str
) -> str:
    """Returns the page.

    Args:
        summary: the experiment, as in ``summary.json``.
        drawn: its runs, with their tracks.
        pages: arms → the file of their own report, beside this page.
        generator: what the page says it was made by.
    """
    scaling, clipping = scaling_figures(drawn), clipping_figures(drawn)
    return document(
        title="The Goldilocks experiment · Gradilocks",
        marks={"generator": generator, "gradilocks-runs": _identity(summary)},
        header=_header(summary),
        main=[
            _bears(summary),
            _scaling(summary, scaling),
            _clipping(summary, clipping),
            finals(summary),
            settings(summary),
            _own_reports(summary, pages),
        ],
        plots={figure.key: figure.plot for figure in (*scaling, *clipping)},
        styles=("page.css", "experiment.css"),
    )


def _identity(summary: Plain) -> str:
    told = json.dumps([summary["started"], summary["command"]])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _header(summary: Plain) -> str:
    moment = datetime.fromtimestamp(summary["started"], tz=timezone.utc)
    setup, versions = summary["setup"], summary["versions"]
    short = " · ".join(
        [
            f"{moment:%Y-%m-%d %H:%M} UTC",
            f"took {duration(summary['seconds'])}",
            f"{setup['steps']:,} steps",
            f"{'seed' if len(summary['seeds']) == 1 else 'seeds'} "
            f"{', '.join(map(str, summary['seeds']))}",
            *(f"{clean(name)} {clean(version)}" for name, version in versions.items()),
        ]
    )
    return (
        '<header><div><p class="kind">Gradilocks demo</p><h1>The Goldilocks experiment</h1>'
        f'<p class="ran-short"><code>{escape(clean(shlex.join(summary["command"])))}</code><br>'
        f"{escape(short)}</p></div>"
        '<button type="button" id="theme" hidden>Dark</button></header>\n'
        '<noscript><p class="noscript">The plots need JavaScript, which is switched off here. '
        "Verdicts and numbers are complete without it.</p></noscript>"
    )


def _bears(summary: Plain) -> str:
    cards = []
    for verdict in summary["verdicts"]:
        kind, name = KINDS[verdict["holds"]], verdict["name"]
        cards.append(
            f'<article class="bear {kind}"><div class="bear-head">{_bear(*BEARS[name])}'
            f"<h2>{escape(name.capitalize())}</h2></div>"
            f"<p>{escape(verdict['sentence'])}</p>"
            f'<p class="claim"><strong>{WORDS[verdict["holds"]]}:</strong> '
            f"{escape(verdict['claim'])}.</p></article>"
        )
    return f'<section class="bears" aria-label="What came of it">{"".join(cards)}</section>'


def _bear(size: int, arm: str) -> str:
    """A bear's head, in the colour of its arm."""
    return (
        f'<svg width="{size}" height="{size}" viewBox="0 0 64 64" aria-hidden="true" '
        f'fill="var(--run{place_of(arm)})">'
        '<circle cx="14" cy="16" r="11"/><circle cx="50" cy="16" r="11"/>'
        '<circle cx="32" cy="36" r="26"/><g fill="var(--card)"><circle cx="14" cy="16" r="5"/>'
        '<circle cx="50" cy="16" r="5"/><ellipse cx="32" cy="46" rx="12" ry="9.5"/>'
        '<circle cx="22" cy="31" r="3.4"/><circle cx="42" cy="31" r="3.4"/></g>'
        '<ellipse cx="32" cy="42" rx="4.6" ry="3.4"/></svg>'
    )


def _scaling(summary: Plain, figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    lost = [
        (arm, fmean(shares))
        for arm in summary["arms"]
        if arm["name"] in ("too-small", "just-right")
        and (shares := [run["lost"] for run in runs_of(summary, arm) if run["lost"] is not None])
    ]
    bars = "".join(
        f"<div><dt><span>{swatch(arm)}{escape(arm['title'])}, "
        f"{'scaled' if arm['scaled'] else 'not scaled'}</span><b>{percent(share)}</b></dt>"
        f'<dd class="bar"><i style="width:{100 * share:.2f}%;'
        f'background:var(--run{place_of(arm["name"])})"></i></dd></div>'
        for arm, share in lost
    )
    rounded = (
        '<figure class="plot wide"><figcaption><h3>Rounded to zero at the first step</h3>'
        "<p>Of the non-zero gradients that enter the last layer, those that fp16 rounds to zero."
        f'</p></figcaption><dl class="bars">{bars}</dl></figure>'
        if bars
        else ""
    )
    return _plots("Scaling", _lead(summary, SCALING), figures, rounded)


def _clipping(summary: Plain, figures: Sequence[Figure]) -> str:
    return _plots("Clipping", _lead(summary, CLIPPING), figures) if figures else ""


def _plots(title: str, lead: str, figures: Sequence[Figure], more: str = "") -> str:
    return (
        f'<section class="plots"><h2>{title}</h2><p class="lead">{escape(lead)}</p>'
        f'<div class="grid">{"".join(map(_figure, figures))}{more}</div></section>'
    )


def _lead(summary: Plain, names: Sequence[str]) -> str:
    """What the arms of a comparison have in common, and what they differ in, of those that ran."""
    arms = [arm for arm in summary["arms"] if arm["name"] in names and runs_of(summary, arm)]
    if len(arms) == 1:
        return f"One arm, {arms[0]['title']}: there is nothing to compare it with."
    same, other = ["model", "data"], list[str]()
    for key, words in COMPARED.items():
        (same if len({arm[key] for arm in arms}) == 1 else other).append(words)
    differs = f" What differs is the {_all_of(other)}." if other else ""
    return f"The same {_all_of(same)}.{differs}"


def _all_of(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _figure(figure: Figure) -> str:
    wide = " wide" if figure.wide else ""
    return (
        f'<figure class="plot{wide}"><figcaption><h3>{escape(figure.title)}</h3>'
        f"<p>{escape(figure.reading)}</p></figcaption>"
        f'<div class="canvas" id="{figure.key}" style="height:{figure.height}px" role="img" '
        f'aria-label="{escape(f"Plot: {figure.title}. {figure.reading}")}"></div></figure>'
    )


def _own_reports(summary: Plain, pages: Mapping[str, str]) -> str:
    items = []
    for arm in summary["arms"]:
        runs = runs_of(summary, arm)
        if not runs:
            continue
        page = pages.get(arm["name"])
        title = escape(arm["title"])
        linked = f'<a href="{escape(page)}">{title}</a>' if page else title
        files = "".join(f"<code>{escape(clean(run['path']))}</code> " for run in runs)
        items.append(
            f'<li><span class="what">{swatch(arm)}{linked}</span><span>{files}</span></li>'
        )
    seeds = "" if len(summary["seeds"]) == 1 else f" (of seed {min(summary['seeds'])})"
    return (
        f'<section><h2>Each arm on its own</h2><p class="lead">Its report{seeds}: findings, loss, '
        "norm, scale and every layer. Another: <code>gradilocks report RUN.jsonl</code>.</p>"
        f'<ul class="own">{"".join(items)}</ul></section>'
    )
