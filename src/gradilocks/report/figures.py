"""Series → figures: what plotly.js draws, each with a title and one line on how to read it.

A figure says what is drawn, not in which colour: a trace carries the number of its run's colour in
``meta``, and the page's script colours it for the theme that is on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gradilocks.report.formatting import power, shortened
from gradilocks.report.run_report import Reported
from gradilocks.report.series import Line, clipped_share, heat, line, skip_marks, staircase
from gradilocks.report.tracks import Tensor, Track

Trace = dict[str, Any]

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
    """Plots that are zoomed together, under a title ('' for none) and a sentence about them."""

    title: str
    figures: Sequence[Figure]
    lead: str = ""


@dataclass(frozen=True)
class Curve:
    """A track to draw: under which name, and in which colour."""

    label: str
    colour: int
    track: Track
    style: Mapping[str, Any] = field(default_factory=dict)
    """What its lines have beside that, in the words of plotly.js."""


def sections(reports: Sequence[Reported]) -> list[Section]:
    """Lays out the plots: a section for each optimizer, in it all runs over each other."""
    by_index: dict[int, list[Curve]] = {}
    for number, one in enumerate(reports):
        for track in one.tracks:
            curves = by_index.setdefault(track.optimizer.index, [])
            curves.append(Curve(one.label, number, track))
    maps = 3 * sum(map(len, by_index.values()))
    made = []
    for index, curves in sorted(by_index.items()):
        figures = (*curve_figures(f"s{index}", curves), *_heats(f"s{index}", curves, maps))
        made.append(Section(_title(index, curves, alone=len(by_index) == 1), figures))
    return made


def _title(index: int, curves: Sequence[Curve], *, alone: bool) -> str:
    """Whose plots they are: one kind of optimizer, or each run's own."""
    kinds = {curve.track.optimizer.kind for curve in curves}
    if len(kinds) > 1:
        each = ", ".join(f"{curve.track.optimizer.kind} in {curve.label}" for curve in curves)
        return f"{'Plots' if alone else f'Optimizer {index}'}: {each}"
    return "" if alone else f"Optimizer {index} ({kinds.pop()})"


def text(words: str) -> str:
    """Escapes what plotly.js would take for markup; it reads a small part of HTML in labels."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# --- curves ----------------------------------------------------------------------------------


def curve_figures(prefix: str, curves: Sequence[Curve], *, early: bool = False) -> Iterator[Figure]:
    """Loss, norm, scale and share of clipped steps, each curve over the others.

    Args:
        prefix: what the keys of the figures begin with.
        curves: what to draw.
        early: whether the first steps matter most: they get a logarithmic axis, and where a loss
            was finite for the last time there is a cross.
    """
    losses, remark = _lines(curves, lambda track: line(track, track.loss), "loss")
    if losses:
        crosses = [cross for curve in curves for cross in _last_finite(curve)] if early else []
        wide_apart = _wide_apart(curves)
        y: dict[str, Any] = {"title": "loss"}
        if wide_apart:
            y = {"title": "loss, logarithmic", **_logarithmic(losses)}
        yield Figure(
            f"{prefix}-loss",
            "Loss",
            "Should fall and flatten. A jump that does not come back is divergence; a gap is a "
            "step whose loss was NaN or Inf, or not known."
            + (" The axis is logarithmic: the losses lie far apart." if wide_apart else "")
            + (" A cross is the last loss that is finite." if crosses else ""),
            _plot(curves, [*losses, *crosses], y, early=early),
            remark=remark,
        )
    norms, remark = _lines(curves, lambda track: line(track, track.norm), "norm")
    limits, _ = _lines(
        curves,
        lambda track: staircase(track, track.limit),
        "limit",
        {"dash": "dash", "width": 1.5, "shape": "hv"},
    )
    if norms:
        limited = ", dashed the limit above which it is clipped" if limits else ""
        yield Figure(
            f"{prefix}-norm",
            "Gradient norm",
            f"The norm of all gradients, before clipping{limited}. Spikes stand out; a gap is a "
            "step whose gradients were NaN or Inf.",
            _plot(curves, [*norms, *limits], {"title": "norm", **_logarithmic(norms)}, early=early),
            remark=remark,
        )
    yield from _scales(f"{prefix}-scale", curves, early=early)
    shares, _ = _lines(curves, clipped_share, "clipped", {"shape": "hv"})
    if shares:
        y = {"title": "clipped", "tickformat": ".0%", "range": [-0.03, 1.03]}
        yield Figure(
            f"{prefix}-clipped",
            "Share of clipped steps",
            "Of the steps that were taken, window by window. Near 100 % the limit sets every "
            "step's length; at 0 % it only stands guard.",
            _plot(curves, shares, y, early=early),
        )


def _scales(key: str, curves: Sequence[Curve], *, early: bool) -> Iterator[Figure]:
    scales, remark = _lines(
        curves, lambda track: staircase(track, track.scale), "scale", {"shape": "hv"}
    )
    unscaled = all(value == 1 or math.isnan(value) for c in curves for value in c.track.scale)
    if not scales or (unscaled and not any(curve.track.skipped for curve in curves)):
        return
    for trace in scales:
        trace["text"] = [None if value is None else power(value) for value in trace["y"]]
        trace["y"] = [_log2(value) for value in trace["y"]]
        trace["hovertemplate"] = "%{text}<extra>%{fullData.name}</extra>"
    marks = []
    for curve in curves:
        skips = skip_marks(curve.track)
        if skips is not None:
            name = f"skipped, {curve.label}" if len(curves) > 1 else "skipped"
            words = [text(each) for each in skips.words]
            marks.append(_crosses(curve, name, skips.x, [_log2(y) for y in skips.y], words))
    heights = [v for trace in (*scales, *marks) for v in trace["y"] if v is not None]
    low, high = math.floor(min(heights, default=0)) - 1, math.ceil(max(heights, default=0)) + 1
    y = {
        "title": "scale",
        "tickprefix": "2<sup>",
        "ticksuffix": "</sup>",
        "tick0": 0,
        "dtick": max(1, round((high - low) / TICKS)),
        "range": [low, high],
    }
    yield Figure(
        key,
        "Skipped steps" if unscaled else "Loss scale",
        "Crosses are skipped steps. There was no loss scale that could have overflowed."
        if unscaled
        else "Steps up are tries, steps down follow an overflow. Crosses are skipped steps: a few "
        "are usual, a row of them is not.",
        _plot(curves, [*scales, *marks], y, early=early),
        remark=remark,
    )


def _lines(
    curves: Sequence[Curve],
    make: Callable[[Track], Line | None],
    name: str,
    shape: Mapping[str, Any] | None = None,
) -> tuple[list[Trace], str]:
    """A line for each curve that has values, and a remark if one of them was thinned."""
    several, limit = len(curves) > 1, name == "limit"
    made = [(curve, drawn) for curve in curves if (drawn := make(curve.track)) is not None]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": text((f"{name}, " if limit else "") + curve.label if several else name),
            "x": drawn.x,
            "y": drawn.y,
            "hovertemplate": "%{y:.4g}<extra>%{fullData.name}</extra>",
            "meta": {"run": curve.colour, "role": name},
            **curve.style,
            "line": {**curve.style.get("line", {}), **(shape or {})},
            # Dashes tell a limit well enough.
            **({"showlegend": False} if several and limit else {}),
        }
        for curve, drawn in made
    ]
    longest = max((drawn.thinned for _, drawn in made), default=0)
    remark = (
        f"{longest:,} steps are more than a screen shows: of each group of neighbours the smallest "
        "and the largest are drawn."
    )
    return traces, remark if longest else ""


def _crosses(
    curve: Curve, name: str, x: Sequence[int], y: Sequence[float | None], words: Sequence[str]
) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": text(name),
        "x": x,
        "y": y,
        "text": words,
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
        "meta": {"run": curve.colour, "role": "skip"},
        **{key: curve.style[key] for key in ("legendgroup", "showlegend") if key in curve.style},
    }


def _last_finite(curve: Curve) -> list[Trace]:
    """A cross where a loss was finite for the last time, if it was not to the end."""
    loss = curve.track.loss
    finite = [place for place, value in enumerate(loss) if not math.isnan(value)]
    if not finite or finite[-1] == len(loss) - 1:
        return []
    x, y = [curve.track.at[finite[-1]]], [loss[finite[-1]]]
    cross = _crosses(curve, curve.label, x, y, ["the last that is finite"])
    return [{**cross, "showlegend": False}]


def _plot(
    curves: Sequence[Curve], traces: list[Trace], y: dict[str, Any], *, early: bool
) -> dict[str, Any]:
    places = any(curve.track.renumbered for curve in curves)
    x = {"title": "steps recorded" if places else "step"}
    return {
        "traces": traces,
        "x": {**x, "type": "log", "dtick": "D2"} if early else x,
        "y": y,
        "legend": len(traces) > 1,
    }


def _wide_apart(curves: Sequence[Curve]) -> bool:
    """Whether losses are positive, and the largest so large that all others would lie flat."""
    known = [value for curve in curves for value in curve.track.loss if not math.isnan(value)]
    return bool(known) and min(known) > 0 and max(known) > WIDE_APART * median(known)


def _logarithmic(traces: Sequence[Trace]) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5, or at whole decades where there are many."""
    values = [y for trace in traces for y in trace["y"] if y]
    span = math.log10(max(values) / min(values)) if values else 0.0
    axis: dict[str, Any] = {"type": "log", "exponentformat": "power"}
    if span < 0.7:  # Too little for 1, 2, 5: plotly finds something.
        return {**axis, "nticks": 6}
    if span < 3:
        return {**axis, "dtick": "D2", "tickformat": "~g"}  # Without a format, 0.5 would read "5".
    return {**axis, "dtick": max(1, round(span / TICKS))}


def _log2(value: float | None) -> float | None:
    return None if value is None or value <= 0 else round(math.log2(value), 4)


# --- heat maps -------------------------------------------------------------------------------


# What is shown of every tensor over time: its column, a title, how to read it, the colours, and
# what is said where one points at.
_MEASURES: dict[str, tuple[Callable[[Tensor], Sequence[float]], str, str, str, str]] = {
    "norms": (
        lambda tensor: tensor.norm,
        "Gradient norm, layer by layer",
        "One row a tensor, in the model's order; bright is large. A row that turns dark is "
        "vanishing, a bright column is a spike, a hole is a missing or non-finite gradient.",
        "log",
        "norm %{customdata:.3g}",
    ),
    "zeros": (
        lambda tensor: tensor.zeros,
        "Share of zeros in the gradients, layer by layer",
        "Faint is none, strong orange is all: values that the format rounded away, dead units, or, "
        "in an embedding, rows that no input asked for.",
        "share",
        "%{customdata:.1%} zeros",
    ),
    "updates": (
        lambda tensor: tensor.update,
        "Update-to-weight ratio, layer by layer",
        "How much a step changes a tensor, as a part of itself. Faint is the usual 0.001, orange "
        "is faster, blue slower; a hole is a skipped step, or a tensor that was zero.",
        "ratio",
        "changed by %{customdata:.3g} of itself",
    ),
}


def _heats(prefix: str, curves: Sequence[Curve], maps: int) -> Iterator[Figure]:
    for key, (column, title, reading, scale, hover) in _MEASURES.items():
        for curve in curves:
            made = heat(curve.track, column, maps=maps)
            if made is None:
                continue
            remark = []
            if made.thinned:
                steps = f"{made.thinned:,} recorded steps"
                remark.append(f"Each column shows the largest of several of the {steps}.")
            if made.folded:
                tensors = f"{made.folded:,} tensors"
                remark.append(f"Each row shows the largest of several of the {tensors}.")
            trace = heat_trace(made.edges, made.rows, made.z, scale, made.columns, hover)
            axes = {"x": {"title": "step"}, "y": name_axis(made.rows)}
            yield Figure(
                f"{prefix}-{key}-{curve.colour}",
                f"{title}, {curve.label}" if len(curves) > 1 else title,
                reading,
                {"traces": [trace], **axes, "heat": True},
                height=max(LOWEST, min(HIGHEST, 120 + ROW_HEIGHT * len(made.rows))),
                wide=True,
                remark=" ".join(remark),
            )


def heat_trace(
    edges: Sequence[float],
    rows: Sequence[str],
    z: Sequence[Sequence[float | None]],
    scale: str,
    columns: Sequence[str],
    hover: str,
) -> Trace:
    """A heat map as plotly.js draws it: one more edge than columns, and `hover` in its words."""
    return {
        "type": "heatmap",
        "x": edges,
        "y": [text(row) for row in rows],
        "z": z,
        "meta": {"scale": scale, "columns": columns},
        "hovertemplate": f"<b>%{{y}}</b><br>%{{text}}<br>{hover}<extra></extra>",
    }


def name_axis(names: Sequence[str]) -> dict[str, Any]:
    """The vertical axis of a heat map with a row for each name, from top to bottom."""
    shown = names[:: max(1, math.ceil(len(names) / MOST_LABELS))]
    return {
        "type": "category",
        "autorange": "reversed",
        "tickmode": "array",
        # Names, not places: a tensor may be called "2", and plotly.js looks for that first.
        "tickvals": [text(name) for name in shown],
        "ticktext": [text(shortened(name, LONGEST_LABEL)) for name in shown],
    }
