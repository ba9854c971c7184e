"""An experiment's summary and its runs → the report on several runs, with three bears on top.

What enters is plain data, as in ``summary.json`` of the demo, and a report on each run; the page
says what they say. A claim that does not hold is shown as one that does not hold. Settings are read
from the summary, which has them from the arms and from what was measured; an arm that was not run
stands nowhere.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from gradilocks.report.destination import identity_of
from gradilocks.report.figures import Curve, Section, curve_figures, filled
from gradilocks.report.formatting import clean, listed, number, percent, power
from gradilocks.report.page import to_html
from gradilocks.report.run_report import Reported

Plain = Mapping[str, Any]
Arms = Sequence[Plain]
Runs = Mapping[str, Sequence[Plain]]
"""By the name of an arm, its runs."""
Rows = list[tuple[str, int, Sequence[str]]]
"""Of a table: the heads, then an arm each with its colour and its cells."""

# Each arm has a colour of its own, whatever arms are there.
COLOURS = {"fp32": 0, "too-small": 1, "just-right": 2, "too-large": 3, "clipped": 4}
# Which arms are drawn over each other, and whether their first steps matter most.
COMPARISONS = {
    "Scaling": (("fp32", "too-small", "just-right"), False),
    "Clipping": (("too-large", "clipped"), True),
}
COMPARED = {
    "format": "format that products are stored in",
    "scaled": "loss scale",
    "optimizer": "optimizer",
    "rate": "learning rate",
    "clip": "limit on the gradient norm",
}


@dataclass(frozen=True)
class Drawn:
    """The run of an arm with a seed, and the report on it."""

    arm: str
    seed: int
    reported: Reported


def experiment_page(
    summary: Plain, drawn: Sequence[Drawn], *, pages: Mapping[str, str], generator: str
) -> str:
    """Returns the page.

    Args:
        summary: the experiment, as in ``summary.json``.
        drawn: its runs. What was found in a run is told for the first seed of each arm.
        pages: arms → the file of their own report, beside this page.
        generator: what the page says it was made by.
    """
    started = datetime.fromtimestamp(summary["started"], tz=timezone.utc)
    arms, runs = _ran(summary)
    return to_html(
        "experiment.html",
        title="The Goldilocks experiment · Gradilocks",
        kind="Gradilocks demo",
        heading="The Goldilocks experiment",
        identity=identity_of(json.dumps([summary["started"], summary["command"]])),
        generator=generator,
        command=clean(shlex.join(summary["command"])),
        started=f"{started:%Y-%m-%d %H:%M} UTC",
        sections=comparisons(summary, drawn),
        summary=summary,
        arms=arms,
        runs=runs,
        drawn=drawn,
        pages=pages,
        colours=COLOURS,
        losses=_table(arms, lambda arm: _final_losses(summary, arm, runs[arm["name"]])),
        settings=_table(arms, lambda arm: _settings(arm, runs[arm["name"]])),
        facts=[
            *{f"{a['optimizer']} at {number(a['rate'])}": a["source"] for a in arms}.items(),
            *(("ended early", words) for words in _ended_early(arms, runs)),
        ],
    )


def comparisons(summary: Plain, drawn: Sequence[Drawn]) -> list[Section]:
    """The plots: a section for each comparison, all seeds of an arm in one colour."""
    made = []
    for title, (names, early) in COMPARISONS.items():
        curves = [
            Curve(one.reported.label, COLOURS[one.arm], track, _style(one, summary["seeds"]))
            for one in drawn
            if one.arm in names
            for track in one.reported.tracks
        ]
        if curves:
            figures = filled(curve_figures(title.lower(), curves, early=early))
            made.append(Section(title, figures, _lead(summary, names, early=early)))
    return made


def _ran(summary: Plain) -> tuple[Arms, Runs]:
    """The arms that were run, and the runs of each."""
    runs: dict[str, list[Plain]] = {}
    for run in summary["runs"]:
        runs.setdefault(run["arm"], []).append(run)
    return [arm for arm in summary["arms"] if arm["name"] in runs], runs


def _style(one: Drawn, seeds: Sequence[int]) -> dict[str, Any]:
    """One line in the legend for all seeds; fp32 is a band, so that what lies on it is seen too."""
    seed = "" if len(seeds) == 1 else f", seed {one.seed}"
    first, broad = one.seed == min(seeds), one.arm == "fp32"
    return {
        "legendgroup": one.arm,
        "showlegend": first,
        "opacity": 0.35 if broad else 1.0 if first else 0.6,
        "hovertemplate": f"%{{y:.4g}}<extra>%{{fullData.name}}{seed}</extra>",
        "line": {"width": 6} if broad else {},
    }


def _lead(summary: Plain, names: Sequence[str], *, early: bool) -> str:
    """What the arms of a comparison have in common, and what they differ in, of those that ran."""
    arms = [arm for arm in _ran(summary)[0] if arm["name"] in names]
    if len(arms) == 1:
        return f"One arm, {arms[0]['title']}: there is nothing to compare it with."
    same, other = ["model", "data"], list[str]()
    for key, words in COMPARED.items():
        (same if len({arm[key] for arm in arms}) == 1 else other).append(words)
    differs = f" What differs is the {listed(other, most=len(COMPARED))}." if other else ""
    band = " The broad band is fp32." if any(arm["name"] == "fp32" for arm in arms) else ""
    axis = " Steps have a logarithmic axis, so that the first can be told apart." if early else ""
    return f"The same {listed(same, most=2 + len(COMPARED))}.{differs}{band}{axis}"


def _table(arms: Arms, cells: Callable[[Plain], Mapping[str, str]]) -> Rows:
    rows = [(arm["title"], COLOURS[arm["name"]], cells(arm)) for arm in arms]
    heads = ("arm", 0, [*rows[0][2]])
    return [heads, *((title, colour, [*row.values()]) for title, colour, row in rows)]


def _final_losses(summary: Plain, arm: Plain, runs: Sequence[Plain]) -> dict[str, str]:
    """What an arm ended with, seed by seed."""
    finals = {run["seed"]: run["final_loss"] for run in runs}
    row = {"first loss": _range(runs, "first_loss", "{:.2f}".format)}
    for seed in summary["seeds"]:
        final = finals.get(seed)
        unknown = "NaN" if seed in finals else "–"
        row[f"final, seed {seed}"] = unknown if final is None else f"{final:.4f}"
    if len(summary["seeds"]) > 1:
        for name in ("mean", "deviation"):
            value = arm["final_loss"][name]
            row[name] = "–" if value is None else f"{value:.4f}"
    for name in ("steps", "skipped", "clipped"):
        row[name] = _range(runs, name, "{:,}".format)
    row["last scale"] = _range(runs, "scale_last", power)
    row["largest norm"] = _range(runs, "norm_largest", number)
    if any(run["lost"] is not None for run in summary["runs"]):
        row["lost at first"] = _range(runs, "lost", percent)
    return row


def _settings(arm: Plain, runs: Sequence[Plain]) -> dict[str, str]:
    """What the arms differ in."""
    # A warm-up is there if the first step had a smaller rate than a later one.
    warm = any(run["rate_first"] != run["rate_largest"] for run in runs)
    rates = [run[name] for run in runs for name in ("rate_least", "rate_largest")]
    return {
        "stored in": arm["format"] if arm["format"] == "fp32" else f"{arm['format']} (emulated)",
        "loss scale": f"dynamic, from {_range(runs, 'scale_first', power)}"
        if arm["scaled"]
        else "none",
        "limit": "none" if arm["clip"] is None else number(arm["clip"]),
        "optimizer": arm["optimizer"],
        "learning rate": _span(rates, number),
        "warm-up": f"from {number(min(run['rate_first'] for run in runs))}" if warm else "none",
    }


def _range(runs: Sequence[Plain], name: str, words: Callable[[Any], str]) -> str:
    known = [run[name] for run in runs if run[name] is not None]
    return _span(known, words) if known else "–"


def _span(values: Sequence[Any], words: Callable[[Any], str]) -> str:
    """One number, or the least and the most of several."""
    return " – ".join(dict.fromkeys(map(words, (min(values), max(values)))))


def _ended_early(arms: Arms, runs: Runs) -> Iterator[str]:
    """Which seeds of an arm ended before their last step, and why."""
    for arm in arms:
        ended: dict[str, list[str]] = {}
        for run in runs[arm["name"]]:
            if run["stopped"] is not None:
                where = f"seed {run['seed']} after step {run['steps']:,}"
                ended.setdefault(run["stopped"], []).append(where)
        for why, seeds in ended.items():
            yield f"{arm['title']}, {', '.join(seeds)}: {why}"
