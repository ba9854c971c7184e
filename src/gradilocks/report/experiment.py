"""An experiment's summary and its runs → the report on several runs, with three bears on top.

What enters is plain data, as in ``summary.json`` of the demo, and a report on each run; the page
says what they say. A claim that does not hold is shown as one that does not hold. Settings are read
from the summary, which has them from the arms and from what was measured; an arm that was not run
stands nowhere.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from gradilocks.report.figures import Curve, Section, curve_figures
from gradilocks.report.formatting import clean, duration, number, percent, power
from gradilocks.report.page import Bear, Page, Row, RunPart, Table, to_html
from gradilocks.report.run_report import Reported

__all__ = ["Drawn", "comparisons", "experiment_page"]

Plain = Mapping[str, Any]

# Each arm has a colour of its own, whatever arms are there.
COLOURS = {"fp32": 0, "too-small": 1, "just-right": 2, "too-large": 3, "clipped": 4}
# Which arms are drawn over each other, and whether their first steps matter most.
COMPARISONS = {
    "Scaling": (("fp32", "too-small", "just-right"), False),
    "Clipping": (("too-large", "clipped"), True),
}
# The three bears: how large they are, in pixels, and the arm whose colour they have.
BEARS = {
    "too small": (34, "too-small"),
    "too large": (64, "too-large"),
    "just right": (48, "just-right"),
}
OUTCOMES = {
    True: ("good", "✓ Claim holds"),
    False: ("problem", "✕ Claim does not hold"),
    None: ("note", "Not judged"),
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
    seeds = summary["seeds"]
    seed = "" if len(seeds) == 1 else f" with seed {min(seeds)}"
    told = json.dumps([summary["started"], summary["command"]])
    return to_html(
        Page(
            title="The Goldilocks experiment · Gradilocks",
            kind="Gradilocks demo",
            heading="The Goldilocks experiment",
            identity=hashlib.sha256(told.encode()).hexdigest()[:16],
            generator=generator,
            command=clean(shlex.join(summary["command"])),
            about=_about(summary),
            bears=[_bear(verdict) for verdict in summary["verdicts"]],
            numbers=[_final_losses(summary)],
            sections=comparisons(summary, drawn),
            runs=[
                RunPart(
                    one.reported.label,
                    one.reported.health,
                    COLOURS[one.arm],
                    link=pages.get(one.arm, ""),
                    files=[clean(run["path"]) for run in _runs_of(summary, one.arm)],
                )
                for one in drawn
                if one.seed == min(seeds)
            ],
            runs_lead=f"What was found{seed}. A name leads to the arm's own report, with the plots "
            "of every layer; `gradilocks report RUN.jsonl` makes that of another run.",
            settings=[_settings(summary)],
            facts=[("", None, [(name, clean(value)) for name, value in _facts(summary)])],
            facts_title="Exactly what was computed",
        )
    )


def comparisons(summary: Plain, drawn: Sequence[Drawn]) -> list[Section]:
    """The plots: a section for each comparison, all seeds of an arm in one colour."""
    made = []
    for title, (names, early) in COMPARISONS.items():
        curves = [
            Curve(
                one.reported.label,
                COLOURS[one.arm],
                track,
                _style(one, summary["seeds"], broad=one.arm == "fp32"),
            )
            for one in drawn
            if one.arm in names
            for track in one.reported.tracks
        ]
        if curves:
            figures = tuple(curve_figures(title.lower(), curves, early=early))
            made.append(Section(title, figures, _lead(summary, names, early=early)))
    return made


def _style(one: Drawn, seeds: Sequence[int], *, broad: bool) -> dict[str, Any]:
    """One line in the legend for all seeds; fp32 is a band, so that what lies on it is seen too."""
    seed = "" if len(seeds) == 1 else f", seed {one.seed}"
    first = one.seed == min(seeds)
    return {
        "legendgroup": one.arm,
        "showlegend": first,
        "opacity": 0.35 if broad else 1.0 if first else 0.6,
        "hovertemplate": f"%{{y:.4g}}<extra>%{{fullData.name}}{seed}</extra>",
        "line": {"width": 6} if broad else {},
    }


def _lead(summary: Plain, names: Sequence[str], *, early: bool) -> str:
    """What the arms of a comparison have in common, and what they differ in, of those that ran."""
    arms = [arm for arm in _arms(summary) if arm["name"] in names]
    if len(arms) == 1:
        return f"One arm, {arms[0]['title']}: there is nothing to compare it with."
    same, other = ["model", "data"], list[str]()
    for key, words in COMPARED.items():
        (same if len({arm[key] for arm in arms}) == 1 else other).append(words)
    differs = f" What differs is the {_all_of(other)}." if other else ""
    band = " The broad band is fp32." if any(arm["name"] == "fp32" for arm in arms) else ""
    axis = " Steps have a logarithmic axis, so that the first can be told apart." if early else ""
    return f"The same {_all_of(same)}.{differs}{band}{axis}"


def _all_of(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _about(summary: Plain) -> str:
    moment = datetime.fromtimestamp(summary["started"], tz=timezone.utc)
    seeds = summary["seeds"]
    return " · ".join(
        [
            f"{moment:%Y-%m-%d %H:%M} UTC",
            f"took {duration(summary['seconds'])}",
            f"{summary['setup']['steps']:,} steps",
            f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}",
            *(f"{clean(name)} {clean(version)}" for name, version in summary["versions"].items()),
        ]
    )


def _bear(verdict: Plain) -> Bear:
    size, arm = BEARS[verdict["name"]]
    kind, outcome = OUTCOMES[verdict["holds"]]
    return Bear(
        verdict["name"], size, COLOURS[arm], kind, outcome, verdict["claim"], verdict["sentence"]
    )


def _arms(summary: Plain) -> list[Plain]:
    """The arms that were run."""
    return [arm for arm in summary["arms"] if _runs_of(summary, arm["name"])]


def _runs_of(summary: Plain, arm: str) -> list[Plain]:
    return [run for run in summary["runs"] if run["arm"] == arm]


def _final_losses(summary: Plain) -> Table:
    """What every arm ended with, seed by seed."""
    several = len(summary["seeds"]) > 1
    heads = ["arm", "first loss", *(f"final, seed {seed}" for seed in summary["seeds"])]
    heads += ["mean", "deviation"] if several else []
    heads += ["steps", "skipped", "clipped", "last scale", "largest norm"]
    rounds = any(run["lost"] is not None for run in summary["runs"])
    heads += ["lost at first"] if rounds else []
    rows = []
    for arm in _arms(summary):
        runs = _runs_of(summary, arm["name"])
        finals = {
            run["seed"]: "NaN" if run["final_loss"] is None else f"{run['final_loss']:.4f}"
            for run in runs
        }
        cells = [_range(runs, "first_loss", "{:.2f}".format)]
        cells += [finals.get(seed, "–") for seed in summary["seeds"]]
        if several:
            spread = [arm["final_loss"][key] for key in ("mean", "deviation")]
            cells += ["–" if value is None else f"{value:.4f}" for value in spread]
        cells += [_range(runs, name, "{:,}".format) for name in ("steps", "skipped", "clipped")]
        cells.append(_range(runs, "scale_last", power))
        cells.append(_range(runs, "norm_largest", number))
        cells += [_range(runs, "lost", percent)] if rounds else []
        rows.append(Row(arm["title"], COLOURS[arm["name"]], cells))
    window = max((run["window"] for run in summary["runs"]), default=0)
    return Table(
        "Final losses",
        heads,
        rows,
        f"The mean of the last {window} steps, or of a sixth of them if that is less. NaN if one "
        "of those losses was not finite."
        + (
            " Lost at first: of the non-zero gradients that enter the last layer at the first "
            "step, those that fp16 rounds to zero."
            if rounds
            else ""
        ),
        unbroken=True,
    )


def _settings(summary: Plain) -> Table:
    """What the arms differ in."""
    heads = ["arm", "stored in", "loss scale", "limit", "optimizer", "learning rate", "warm-up"]
    rows = []
    for arm in _arms(summary):
        runs = _runs_of(summary, arm["name"])
        least = min(run["rate_least"] for run in runs)
        largest = max(run["rate_largest"] for run in runs)
        # A warm-up is there if the first step had a smaller rate than a later one.
        first = min(run["rate_first"] for run in runs)
        warm = any(run["rate_first"] != run["rate_largest"] for run in runs)
        cells = [
            arm["format"] if arm["format"] == "fp32" else f"{arm['format']} (emulated)",
            f"dynamic, from {_range(runs, 'scale_first', power)}" if arm["scaled"] else "none",
            "none" if arm["clip"] is None else number(arm["clip"]),
            arm["optimizer"],
            number(largest) if least == largest else f"{number(least)} – {number(largest)}",
            f"from {number(first)}" if warm else "none",
        ]
        rows.append(Row(arm["title"], COLOURS[arm["name"]], cells))
    hint = "What the arms differ in is in this table, and nothing else."
    return Table("Settings", heads, rows, hint, unbroken=True)


def _range(runs: Sequence[Plain], name: str, words: Callable[[Any], str]) -> str:
    """One number, or the least and the most of several seeds."""
    known = sorted(run[name] for run in runs if run[name] is not None)
    if not known:
        return "–"
    least, most = words(known[0]), words(known[-1])
    return least if least == most else f"{least} – {most}"


def _facts(summary: Plain) -> Iterator[tuple[str, str]]:
    setup, arms = summary["setup"], _arms(summary)
    parameters = max((run["parameters"] for run in summary["runs"]), default=0)
    yield (
        "model",
        f"GPT, {setup['layers']} layers, width {setup['width']}, {setup['heads']} heads, "
        f"{setup['length']} positions, {parameters:,} parameters, all in float32.",
    )
    yield "text", f"Python's own documentation, {setup['text']}, character by character."
    yield "batch", setup["computed"]
    if any(arm["format"] == "fp16" for arm in arms):
        yield (
            "fp16",
            "gradilocks.emulate(torch.float16): matrix products and attention store what goes in, "
            "what comes out and their gradients in fp16, and compute in fp32, as a tensor core "
            "does.",
        )
    dynamic = " and of DynamicScale" if any(arm["scaled"] for arm in arms) else ""
    yield (
        "the same",
        "seed by seed, in all arms: the model, its first parameters and the batches. All defaults "
        f"of torch's optimizers{dynamic}, but for what the table says.",
    )
    yield from {f"{a['optimizer']} at {number(a['rate'])}": a["source"] for a in arms}.items()
    for arm in arms:
        ended: dict[str, list[str]] = {}
        for run in _runs_of(summary, arm["name"]):
            if run["stopped"] is not None:
                where = f"seed {run['seed']} after step {run['steps']:,}"
                ended.setdefault(run["stopped"], []).append(where)
        for why, seeds in ended.items():
            yield "ended early", f"{arm['title']}, {', '.join(seeds)}: {why}"
