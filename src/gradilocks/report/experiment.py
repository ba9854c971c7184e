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
    Drawn,
    clipping_figures,
    place_of,
    scaling_figures,
)
from gradilocks.report.figures import Figure
from gradilocks.report.words import clean, duration, number, percent, power

__all__ = ["experiment_page"]

Plain = Mapping[str, Any]

# The three bears: how large they are, in pixels, and the arm whose colour they have.
BEARS = {
    "too small": (34, "too-small"),
    "too large": (64, "too-large"),
    "just right": (48, "just-right"),
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
            _clipping(clipping),
            _finals(summary),
            _settings(summary),
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
        and (shares := [run["lost"] for run in _runs(summary, arm) if run["lost"] is not None])
    ]
    bars = "".join(
        f"<div><dt><span>{_swatch(arm)}{escape(arm['title'])}, "
        f"{'scaled' if arm['scaled'] else 'not scaled'}</span><b>{percent(share)}</b></dt>"
        f'<dd class="bar"><i style="width:{100 * share:.2f}%;'
        f'background:var(--run{place_of(arm["name"])})"></i></dd></div>'
        for arm, share in lost
    )
    rounded = (
        '<figure class="plot wide"><figcaption><h3>Rounded to zero at the first step</h3>'
        "<p>Of the non-zero gradients that enter the last layer, the share that fp16 cannot hold."
        f'</p></figcaption><dl class="bars">{bars}</dl></figure>'
        if bars
        else ""
    )
    return (
        '<section class="plots"><h2>Too small, and just right</h2><p class="lead">The same model, '
        "data, rate and limit. In fp16 the gradients of a large global batch are too small to hold "
        "unless the loss is scaled.</p>"
        f'<div class="grid">{"".join(map(_figure, figures))}{rounded}</div></section>'
    )


def _clipping(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    return (
        '<section class="plots"><h2>Too large, and clipped</h2><p class="lead">The same model, '
        "data, rate and scale; one of the two has a limit on the norm of its gradients.</p>"
        f'<div class="grid">{"".join(map(_figure, figures))}</div></section>'
    )


def _figure(figure: Figure) -> str:
    wide = " wide" if figure.wide else ""
    return (
        f'<figure class="plot{wide}"><figcaption><h3>{escape(figure.title)}</h3>'
        f"<p>{escape(figure.reading)}</p></figcaption>"
        f'<div class="canvas" id="{figure.key}" style="height:{figure.height}px" role="img" '
        f'aria-label="{escape(f"Plot: {figure.title}. {figure.reading}")}"></div></figure>'
    )


def _finals(summary: Plain) -> str:
    several = len(summary["seeds"]) > 1
    heads = ["arm", "first loss", *(f"final, seed {seed}" for seed in summary["seeds"])]
    heads += ["mean", "deviation"] if several else []
    heads += ["steps", "skipped", "clipped", "last scale", "largest norm"]
    rows = []
    for arm in summary["arms"]:
        runs = _runs(summary, arm)
        if not runs:
            continue
        by_seed = {run["seed"]: run for run in runs}
        cells = [_cell(_range(runs, "first_loss", lambda loss: f"{loss:.2f}"))]
        cells += [_final(by_seed.get(seed)) for seed in summary["seeds"]]
        if several:
            spread = arm["final_loss"]
            cells += [_cell(_or_dash(spread[key], _loss)) for key in ("mean", "deviation")]
        cells += [_cell(_range(runs, name, _count)) for name in ("steps", "skipped", "clipped")]
        cells.append(_cell(_range(runs, "scale_last", power)))
        cells.append(_cell(_range(runs, "norm_largest", number)))
        label = f"{_swatch(arm)}{escape(arm['title'])}"
        rows.append(f'<tr><th scope="row">{label}</th>{"".join(cells)}</tr>')
    window = max((run["window"] for run in summary["runs"]), default=0)
    return _table(
        "Final losses",
        f"The mean of the last {window} steps, or of a sixth of them if that is less. NaN if one "
        "of those losses was not finite.",
        heads,
        rows,
    )


def _settings(summary: Plain) -> str:
    setup = summary["setup"]
    heads = ["arm", "stored in", "loss scale", "limit", "optimizer", "learning rate", "warm-up"]
    rows = []
    for arm in summary["arms"]:
        scale = "dynamic, from 2^16" if arm["scaled"] else "none"
        stored = "fp16 (emulated)" if arm["format"] == "fp16" else arm["format"]
        cells = [stored, scale, _or_dash(arm["clip"], number, "none"), arm["optimizer"]]
        cells += [number(arm["rate"]), "none"]
        label = f"{_swatch(arm)}{escape(arm['title'])}"
        rows.append(f'<tr><th scope="row">{label}</th>{"".join(map(_cell, cells))}</tr>')
    parameters = max((run["parameters"] for run in summary["runs"]), default=0)
    facts = [
        ("model", f"GPT, {setup['layers']} layers, width {setup['width']}, {setup['heads']} heads, "
         f"{setup['length']} positions, {parameters:,} parameters, all in float32."),
        ("text", "Python's own documentation, pydoc_data.topics, character by character."),
        ("batch", setup["computed"]),
        ("fp16", "gradilocks.emulate(torch.float16): matrix products and attention store what goes "
         "in, what comes out and their gradients in fp16, and compute in fp32, as a tensor core "
         "does."),
        ("the same", "model, seed, first parameters, batches and steps in all arms; within a "
         "comparison also the optimizer and the rate. All defaults of torch's optimizers and of "
         "DynamicScale otherwise."),
        ("SGD at 5", "with a limit of 0.25, as PyTorch's own word language model example has it "
         "for its Transformer. A training that GradientControl gave up on, after 100 steps in a "
         "row without a finite gradient, ends there."),
    ]  # fmt: skip
    told = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    words = "What the arms differ in is in this table, and nothing else."
    return (
        _table("Settings", words, heads, rows)
        + f'<section class="ran"><h2>Exactly what was computed</h2><dl class="facts">{told}</dl>'
        "</section>"
    )


def _own_reports(summary: Plain, pages: Mapping[str, str]) -> str:
    items = []
    for arm in summary["arms"]:
        runs = _runs(summary, arm)
        if not runs:
            continue
        page = pages.get(arm["name"])
        title = escape(arm["title"])
        linked = f'<a href="{escape(page)}">{title}</a>' if page else title
        files = "".join(f"<code>{escape(clean(run['path']))}</code> " for run in runs)
        items.append(
            f'<li><span class="what">{_swatch(arm)}{linked}</span><span>{files}</span></li>'
        )
    seeds = "" if len(summary["seeds"]) == 1 else f" (of seed {min(summary['seeds'])})"
    return (
        f'<section><h2>Each arm on its own</h2><p class="lead">Its report{seeds}: findings, loss, '
        "norm, scale and every layer. Another: <code>gradilocks report RUN.jsonl</code>.</p>"
        f'<ul class="own">{"".join(items)}</ul></section>'
    )


def _table(title: str, words: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return (
        f'<section><h2>{title}</h2><p class="hint">{words}</p><div class="scrolls numbers" '
        f'tabindex="0" role="region" aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _final(run: Plain | None) -> str:
    if run is None:
        return _cell("–")
    if run["final_loss"] is None:
        return '<td class="lost">NaN</td>'
    return _cell(_loss(run["final_loss"]))


def _cell(value: str) -> str:
    shown = escape(value)
    if value.startswith("2^") and "–" not in value:
        shown = f"2<sup>{escape(value[2:])}</sup>"
    return f"<td>{shown.replace('2^16', '2<sup>16</sup>')}</td>"


def _range(runs: Sequence[Plain], name: str, words: Any) -> str:
    """One number, or the least and the most of several seeds."""
    known = sorted(run[name] for run in runs if run[name] is not None)
    if not known:
        return "–"
    least, most = words(known[0]), words(known[-1])
    return str(least) if least == most else f"{least} – {most}"


def _runs(summary: Plain, arm: Plain) -> list[Plain]:
    return [run for run in summary["runs"] if run["arm"] == arm["name"]]


def _swatch(arm: Plain) -> str:
    place = place_of(arm["name"])
    return f'<span class="swatch" data-run="{place}" aria-hidden="true"></span>'


def _or_dash(value: float | None, words: Any, nothing: str = "–") -> str:
    return nothing if value is None else str(words(value))


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _count(value: int) -> str:
    return f"{value:,}"
