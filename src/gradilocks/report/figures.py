"""Series → figures: what plotly.js draws, each with a title and one line on how to read it.

A figure says what is drawn, not in which colour: a trace carries the number of its run in
``meta``, and the page's script colours it for the theme that is on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gradilocks.report.formatting import power, shortened
from gradilocks.report.run_report import Reported
from gradilocks.report.series import (
    Heat,
    Line,
    clipped_share,
    heat,
    line,
    skip_marks,
    staircase,
)
from gradilocks.report.tracks import Tensor, Track

__all__ = ["Figure", "Section", "sections"]

Trace = dict[str, Any]
Followed = Sequence[tuple[int, str, Track]]
Lines = Callable[[Track], Line | None]

HEIGHT = 300
ROW_HEIGHT, LOWEST, HIGHEST = 16, 220, 860
LONGEST_LABEL = 30
MOST_LABELS = 45
# Enough ticks to read a power of two, not so many that they touch.
TICKS = 7
# A loss so many times the median leaves a twentieth of the height for half of the others.
WIDE_APART = 20.0


@dataclass(frozen=True)
class Figure:
    """One plot: `plot` is what plotly.js draws, the rest is words around it."""

    key: str
    title: str
    reading: str
    plot: dict[str, Any]
    height: int = HEIGHT
    wide: bool = False
    remark: str = ""
    """Says so if not every point is there."""


@dataclass(frozen=True)
class Section:
    """The plots of one optimizer, of every run that has it."""

    title: str
    figures: tuple[Figure, ...]


def sections(reports: Sequence[Reported]) -> list[Section]:
    """Lays out the plots: a section for each optimizer, in it all runs over each other."""
    indices = sorted({track.optimizer.index for one in reports for track in one.tracks})
    maps = 3 * max(1, sum(len(one.tracks) for one in reports))
    made = []
    for index in indices:
        followed = [
            (number, one.label, track)
            for number, one in enumerate(reports)
            for track in one.tracks
            if track.optimizer.index == index
        ]
        title = _title(index, followed, alone=len(indices) == 1)
        figures = (*_curves(f"s{index}", followed), *_heats(f"s{index}", followed, maps))
        made.append(Section(title, figures))
    return made


def _title(index: int, followed: Followed, *, alone: bool) -> str:
    """Whose plots they are: one kind of optimizer, or each run's own."""
    kinds = {track.optimizer.kind for _, _, track in followed}
    if len(kinds) > 1:
        each = ", ".join(f"{track.optimizer.kind} in {label}" for _, label, track in followed)
        return f"{'Plots' if alone else f'Optimizer {index}'}: {each}"
    return "" if alone else f"Optimizer {index} ({kinds.pop()})"


def text(words: str) -> str:
    """Escapes what plotly.js would take for markup; it reads a small part of HTML in labels."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _curves(prefix: str, followed: Followed) -> Iterator[Figure]:
    several = len({number for number, _, _ in followed}) > 1
    losses = _traces(followed, lambda track: line(track, track.loss), several=several, name="loss")
    if losses.traces:
        wide_apart = _wide_apart(followed)
        y: dict[str, Any] = {"title": "loss"}
        if wide_apart:
            y = {"title": "loss, logarithmic", **_logarithmic(losses)}
        yield Figure(
            f"{prefix}-loss",
            "Loss",
            "Should fall and flatten. A jump that does not come back is divergence; a gap is a "
            "step whose loss was NaN or Inf, or not known."
            + (" The axis is logarithmic: the losses lie far apart." if wide_apart else ""),
            _plot(losses.traces, followed, y),
            remark=losses.remark,
        )
    norms = _traces(followed, lambda track: line(track, track.norm), several=several, name="norm")
    limits = _traces(
        followed,
        lambda track: staircase(track, track.limit),
        several=several,
        name="limit",
        style={"dash": "dash", "width": 1.5, "shape": "hv"},
    )
    if norms.traces:
        limited = ", dashed the limit above which it is clipped" if limits.traces else ""
        yield Figure(
            f"{prefix}-norm",
            "Gradient norm",
            f"The norm of all gradients, before clipping{limited}. Spikes stand out; a gap is a "
            "step whose gradients were NaN or Inf.",
            _plot(
                [*norms.traces, *limits.traces],
                followed,
                {"title": "norm", **_logarithmic(norms)},
            ),
            remark=norms.remark,
        )
    yield from _scales(f"{prefix}-scale", followed, several=several)
    shares = _traces(
        followed, clipped_share, several=several, name="clipped", style={"shape": "hv"}
    )
    if shares.traces:
        yield Figure(
            f"{prefix}-clipped",
            "Share of clipped steps",
            "Of the steps that were taken, window by window. Near 100 % the limit sets every "
            "step's length; at 0 % it only stands guard.",
            _plot(
                shares.traces,
                followed,
                {"title": "clipped", "tickformat": ".0%", "range": [-0.03, 1.03]},
            ),
        )


def _scales(key: str, followed: Followed, *, several: bool) -> Iterator[Figure]:
    scales = _traces(
        followed,
        lambda track: staircase(track, track.scale),
        several=several,
        name="scale",
        style={"shape": "hv"},
    )
    unscaled = all(value == 1 or math.isnan(value) for _, _, t in followed for value in t.scale)
    if not scales.traces or (unscaled and not any(track.skipped for _, _, track in followed)):
        return
    marks = []
    for number, label, track in followed:
        skips = skip_marks(track)
        if skips is not None:
            marks.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": text(f"skipped, {label}" if several else "skipped"),
                    "x": skips.x,
                    "y": [_log2(value) for value in skips.y],
                    "text": [text(words) for words in skips.words],
                    "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
                    "meta": {"run": number, "role": "skip"},
                }
            )
    for trace in scales.traces:
        trace["text"] = [None if value is None else power(value) for value in trace["y"]]
        trace["y"] = [_log2(value) for value in trace["y"]]
        trace["hovertemplate"] = "%{text}<extra>%{fullData.name}</extra>"
    heights = [v for trace in (*scales.traces, *marks) for v in trace["y"] if v is not None]
    low, high = math.floor(min(heights, default=0)) - 1, math.ceil(max(heights, default=0)) + 1
    yield Figure(
        key,
        "Skipped steps" if unscaled else "Loss scale",
        "Crosses are skipped steps. There was no loss scale that could have overflowed."
        if unscaled
        else "Steps up are tries, steps down follow an overflow. Crosses are skipped steps: a few "
        "are usual, a row of them is not.",
        _plot(
            [*scales.traces, *marks],
            followed,
            {
                "title": "scale",
                "tickprefix": "2<sup>",
                "ticksuffix": "</sup>",
                "tick0": 0,
                "dtick": max(1, round((high - low) / TICKS)),
                "range": [low, high],
            },
        ),
        remark=scales.remark,
    )


def _heats(prefix: str, followed: Followed, maps: int) -> Iterator[Figure]:
    several = len({number for number, _, _ in followed}) > 1
    for kind in _KINDS:
        for number, label, track in followed:
            made = heat(track, kind.field, maps=maps)
            if made is not None:
                of = f", {label}" if several else ""
                yield _heat(f"{prefix}-{kind.key}-{number}", kind, made, of)


@dataclass(frozen=True)
class _Kind:
    key: str
    field: Callable[[Tensor], Sequence[float]]
    title: str
    reading: str
    meta: dict[str, Any]
    hover: str


_KINDS = (
    _Kind(
        "norms",
        lambda tensor: tensor.norm,
        "Gradient norm, layer by layer",
        "One row a tensor, in the model's order; bright is large. A row that turns dark is "
        "vanishing, a bright column is a spike, a hole is a missing or non-finite gradient.",
        {"scale": "log"},
        "norm %{customdata:.3g}",
    ),
    _Kind(
        "zeros",
        lambda tensor: tensor.zeros,
        "Share of zeros in the gradients, layer by layer",
        "Faint is none, strong orange is all: values that the format rounded away, dead units, or, "
        "in an embedding, rows that no input asked for.",
        {"scale": "share"},
        "%{customdata:.1%} zeros",
    ),
    _Kind(
        "updates",
        lambda tensor: tensor.update,
        "Update-to-weight ratio, layer by layer",
        "How much a step changes a tensor, as a part of itself. Faint is the usual 0.001, orange "
        "is faster, blue slower; a hole is a skipped step, or a tensor that was zero.",
        {"scale": "ratio"},
        "changed by %{customdata:.3g} of itself",
    ),
)


def _heat(key: str, kind: _Kind, made: Heat, of: str) -> Figure:
    every = max(1, math.ceil(len(made.rows) / MOST_LABELS))
    remarks = []
    if made.thinned:
        remarks.append(
            f"Each column shows the largest of several of the {made.thinned:,} recorded steps."
        )
    if made.folded:
        remarks.append(f"Each row shows the largest of several of the {made.folded:,} tensors.")
    return Figure(
        key,
        f"{kind.title}{of}",
        kind.reading,
        {
            "traces": [
                {
                    "type": "heatmap",
                    "x": made.edges,
                    "y": [text(row) for row in made.rows],
                    "z": made.z,
                    "meta": {**kind.meta, "columns": made.columns},
                    "hovertemplate": f"<b>%{{y}}</b><br>%{{text}}<br>{kind.hover}<extra></extra>",
                }
            ],
            "x": {"title": "step"},
            "y": {
                "type": "category",
                "autorange": "reversed",
                "tickmode": "array",
                # Names, not places: a tensor may be called "2", and plotly.js looks for that first.
                "tickvals": [text(row) for row in made.rows[::every]],
                "ticktext": [text(shortened(r, LONGEST_LABEL)) for r in made.rows[::every]],
            },
            "heat": True,
        },
        height=max(LOWEST, min(HIGHEST, 120 + ROW_HEIGHT * len(made.rows))),
        wide=True,
        remark=" ".join(remarks),
    )


@dataclass(frozen=True)
class _Traces:
    traces: list[Trace]
    remark: str


def _traces(
    followed: Followed,
    make: Lines,
    *,
    several: bool,
    name: str,
    style: dict[str, Any] | None = None,
) -> _Traces:
    traces: list[Trace] = []
    longest = 0
    for number, label, track in followed:
        made = make(track)
        if made is None:
            continue
        longest = max(longest, made.thinned)
        told_apart = f"{name}, {label}" if name == "limit" else label
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": text(told_apart if several else name),
                "x": made.x,
                "y": made.y,
                "line": style or {},
                "hovertemplate": "%{y:.4g}<extra>%{fullData.name}</extra>",
                "meta": {"run": number, "role": name},
                "showlegend": not (several and name == "limit"),  # Dashes tell it well enough.
            }
        )
    return _Traces(
        traces,
        f"{longest:,} steps are more than a screen shows: of each group of neighbours the smallest "
        "and the largest are drawn."
        if longest
        else "",
    )


def _plot(traces: list[Trace], followed: Followed, y: dict[str, Any]) -> dict[str, Any]:
    places = any(track.renumbered for _, _, track in followed)
    return {
        "traces": traces,
        "x": {"title": "steps recorded" if places else "step"},
        "y": y,
        "legend": len(traces) > 1,
    }


def _wide_apart(followed: Followed) -> bool:
    """Whether losses are positive, and the largest so large that all others would lie flat."""
    known = [value for _, _, track in followed for value in track.loss if not math.isnan(value)]
    return bool(known) and min(known) > 0 and max(known) > WIDE_APART * median(known)


def _logarithmic(lines: _Traces) -> dict[str, Any]:
    return {"type": "log", "exponentformat": "power", **_decades(lines)}


def _decades(lines: _Traces) -> dict[str, Any]:
    """How far apart the ticks of a logarithmic axis are: 1, 2 and 5, or whole decades."""
    values = [y for trace in lines.traces for y in trace["y"] if y]
    span = math.log10(max(values) / min(values)) if values else 0.0
    if span < 0.7:  # Too little for 1, 2, 5: plotly finds something.
        return {"nticks": 6}
    if span < 3:
        return {"dtick": "D2", "tickformat": "~g"}  # Without a format, 0.5 would read "5".
    return {"dtick": max(1, round(span / TICKS))}


def _log2(value: float | None) -> float | None:
    return None if value is None or value <= 0 else round(math.log2(value), 4)
