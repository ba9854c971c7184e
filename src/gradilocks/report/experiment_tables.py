"""An experiment's summary → its tables: what every arm ended with, and how each was set.

Settings are read from the summary, which has them from the arms and from what was measured; an arm
that was not run is in neither table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gradilocks.report.experiment_figures import place_of
from gradilocks.report.formatting import clean, number, power

__all__ = ["finals", "runs_of", "settings", "swatch"]

Plain = Mapping[str, Any]


def finals(summary: Plain) -> str:
    """What every arm ended with, seed by seed."""
    several = len(summary["seeds"]) > 1
    heads = ["arm", "first loss", *(f"final, seed {seed}" for seed in summary["seeds"])]
    heads += ["mean", "deviation"] if several else []
    heads += ["steps", "skipped", "clipped", "last scale", "largest norm"]
    rows = []
    for arm in summary["arms"]:
        runs = runs_of(summary, arm)
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
        label = f"{swatch(arm)}{escape(arm['title'])}"
        rows.append(f'<tr><th scope="row">{label}</th>{"".join(cells)}</tr>')
    window = max((run["window"] for run in summary["runs"]), default=0)
    return _table(
        "Final losses",
        f"The mean of the last {window} steps, or of a sixth of them if that is less. NaN if one "
        "of those losses was not finite.",
        heads,
        rows,
    )


def settings(summary: Plain) -> str:
    """What the arms that were run differ in, as a table, and what was computed, in words."""
    heads = ["arm", "stored in", "loss scale", "limit", "optimizer", "learning rate", "warm-up"]
    rows = []
    for arm in summary["arms"]:
        runs = runs_of(summary, arm)
        if not runs:
            continue
        first = _range(runs, "scale_first", power)
        cells = [
            arm["format"] if arm["format"] == "fp32" else f"{arm['format']} (emulated)",
            f"dynamic, from {first}" if arm["scaled"] else "none",
            _or_dash(arm["clip"], number, "none"),
            arm["optimizer"],
            _rate(runs),
            _warm_up(runs),
        ]
        label = f"{swatch(arm)}{escape(arm['title'])}"
        rows.append(f'<tr><th scope="row">{label}</th>{"".join(map(_cell, cells))}</tr>')
    told = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(clean(value))}</dd></div>"
        for name, value in _facts(summary)
    )
    words = "What the arms differ in is in this table, and nothing else."
    return (
        _table("Settings", words, heads, rows)
        + f'<section class="ran"><h2>Exactly what was computed</h2><dl class="facts">{told}</dl>'
        "</section>"
    )


def _facts(summary: Plain) -> list[tuple[str, str]]:
    setup = summary["setup"]
    arms = [arm for arm in summary["arms"] if runs_of(summary, arm)]
    parameters = max((run["parameters"] for run in summary["runs"]), default=0)
    facts = [
        ("model", f"GPT, {setup['layers']} layers, width {setup['width']}, {setup['heads']} heads, "
         f"{setup['length']} positions, {parameters:,} parameters, all in float32."),
        ("text", f"Python's own documentation, {setup['text']}, character by character."),
        ("batch", setup["computed"]),
    ]  # fmt: skip
    if any(arm["format"] == "fp16" for arm in arms):
        facts.append(
            ("fp16", "gradilocks.emulate(torch.float16): matrix products and attention store what "
             "goes in, what comes out and their gradients in fp16, and compute in fp32, as a "
             "tensor core does.")
        )  # fmt: skip
    dynamic = " and of DynamicScale" if any(arm["scaled"] for arm in arms) else ""
    facts.append(
        ("the same", "seed by seed, in all arms: the model, its first parameters and the batches. "
         f"All defaults of torch's optimizers{dynamic}, but for what the table says.")
    )  # fmt: skip
    sources = {f"{arm['optimizer']} at {number(arm['rate'])}": arm["source"] for arm in arms}
    facts += sources.items()
    for arm in arms:
        ended: dict[str, list[str]] = {}
        for run in runs_of(summary, arm):
            if run["stopped"] is not None:
                told = f"seed {run['seed']} after step {run['steps']:,}"
                ended.setdefault(run["stopped"], []).append(told)
        facts += [
            ("ended early", f"{arm['title']}, {', '.join(where)}: {why}")
            for why, where in ended.items()
        ]
    return facts


def _rate(runs: Sequence[Plain]) -> str:
    least = min(run["rate_least"] for run in runs)
    largest = max(run["rate_largest"] for run in runs)
    return number(largest) if least == largest else f"{number(least)} – {number(largest)}"


def _warm_up(runs: Sequence[Plain]) -> str:
    """Whether the first step had a smaller rate than a later one."""
    if all(run["rate_first"] == run["rate_largest"] for run in runs):
        return "none"
    return f"from {number(min(run['rate_first'] for run in runs))}"


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
    shown = re.sub(r"2\^(-?\d+)", r"2<sup>\1</sup>", escape(value))
    return f"<td>{shown}</td>"


def _range(runs: Sequence[Plain], name: str, words: Any) -> str:
    """One number, or the least and the most of several seeds."""
    known = sorted(run[name] for run in runs if run[name] is not None)
    if not known:
        return "–"
    least, most = words(known[0]), words(known[-1])
    return str(least) if least == most else f"{least} – {most}"


def runs_of(summary: Plain, arm: Plain) -> list[Plain]:
    """The runs of an arm."""
    return [run for run in summary["runs"] if run["arm"] == arm["name"]]


def swatch(arm: Plain) -> str:
    """A spot in the colour of an arm."""
    place = place_of(arm["name"])
    return f'<span class="swatch" data-run="{place}" aria-hidden="true"></span>'


def _or_dash(value: float | None, words: Any, nothing: str = "–") -> str:
    return nothing if value is None else str(words(value))


def _loss(value: float) -> str:
    return f"{value:.4f}"


def _count(value: int) -> str:
    return f"{value:,}"
