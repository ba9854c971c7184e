"""Series → figures: what plotly.js draws, each with a title and one line on how to read it.

A figure says what is drawn, not in which colour: a trace carries the number of its run's colour in
``meta``, and the page's script colours it for the theme that is on. It carries its places on both
axes, steps in ``x`` and seconds in ``meta.t``, and the edges of its band if it has one; the script
draws what the reader has chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from gradilocks.report.formatting import clean, power, sentence_case, short_name, short_names
from gradilocks.report.resources import Measured, Resources
from gradilocks.report.run_report import Reported
from gradilocks.report.series import (
    Line,
    clipped_share,
    heat,
    line,
    skip_marks,
    staircase,
    waiting_share,
)
from gradilocks.report.tracks import Tensor, Track

Trace = dict[str, Any]

HEIGHT = 300
ROW_HEIGHT, LOWEST, HIGHEST = 16, 220, 860
LONGEST_LABEL = 30
# Characters of a name beside its row in a narrow window.
SHORT_LABEL = 18
MOST_LABELS = 45
# Enough ticks to read a power of two, not so many that they touch.
TICKS = 7
# A value so many times the median leaves a twentieth of the height for half of the others.
WIDE_APART = 20.0
# Less than this share of zeros is as faint on a heat map as none.
LEAST_SHARE = 0.005
STEPS = {"shape": "hv"}
TO_ZERO = {"rangemode": "tozero"}
PERCENT: dict[str, Any] = {"tickformat": ".0%", "range": [-0.03, 1.03]}
# So few points are marked as well as joined: three steps are three dots.
FEW_POINTS = 40


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
    """Lays out the plots: a section for each optimizer, in it all runs over each other.

    What is of the whole run, its time and memory and what it logged, stands among the plots of the
    only optimizer, or after those of several.
    """
    by_index: dict[int, list[Curve]] = {}
    whole: list[WholeRun] = []
    for number, one in enumerate(reports):
        for track in one.tracks:
            curves = by_index.setdefault(track.optimizer.index, [])
            curves.append(Curve(one.label, number, track))
        found = one.resources
        if found is not None:
            marked = min(filter(None, map(nan_mark, one.tracks)), key=_seconds_of, default=None)
            whole.append(WholeRun(Curve(one.label, number, found.track), found, marked))
    maps = 3 * sum(map(len, by_index.values()))
    alone = len(by_index) == 1
    made = []
    for index, curves in sorted(by_index.items()):
        narrow = [*curve_figures(f"s{index}", curves)]
        narrow += run_figures(f"s{index}", whole) if alone else []
        figures = (*filled(narrow), *_heats(f"s{index}", curves, maps))
        made.append(Section(_title(index, curves, alone=alone), figures))
    if not alone:
        made.append(Section("The whole run", filled(run_figures("run", whole))))
    return [section for section in made if section.figures]


@dataclass(frozen=True)
class WholeRun:
    """A run as its clock and its memory see it."""

    curve: Curve
    """Of the optimizer along whose steps they stand."""
    resources: Resources
    marked: dict[str, Any] | None
    """Where its first NaN is, of whichever optimizer."""


def filled(figures: Iterable[Figure]) -> tuple[Figure, ...]:
    """Figures for a grid of two columns without a hole: of an odd number the last is wide."""
    every = tuple(figures)
    return (*every[:-1], replace(every[-1], wide=True)) if len(every) % 2 else every


def nan_mark(track: Track) -> dict[str, Any] | None:
    """Where NaN or Inf begins, to be marked on every plot; None if it does not."""
    place = track.nan_begins
    if place is None:
        return None
    bad = {*track.lost, *track.nonfinite}
    lasts = all(later in bad for later in range(place, len(track.steps)))
    words = f"NaN or Inf {'from' if lasts else 'at'} step {track.steps[place].step:,}"
    return {"x": track.at[place], "t": track.time[place], "words": words}


def _seconds_of(mark: dict[str, Any]) -> float:
    return float(mark["t"])


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
    """Loss, norm, learning rate, scale and share of clipped steps, each curve over the others.

    Args:
        prefix: what the keys of the figures begin with.
        curves: what to draw.
        early: whether the first steps matter most: they get a logarithmic axis, and where a loss
            was finite for the last time there is a cross.
    """
    marks = [{**mark, "run": curve.colour} for curve in curves if (mark := nan_mark(curve.track))]
    tracks = [curve.track for curve in curves]
    losses, remark = _lines(curves, [line(t, t.loss) for t in tracks], "loss", smooth=True)
    if are_worth_it(losses):
        crosses = [cross for curve in curves for cross in _last_finite(curve)] if early else []
        wide_apart = _wide_apart([curve.track.loss for curve in curves])
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
            _plot(curves, [*losses, *crosses], y, early=early, marks=marks),
            remark=remark,
        )
    norms, remark = _lines(curves, [line(t, t.norm) for t in tracks], "norm", smooth=True)
    limits, _ = _lines(
        curves,
        [staircase(t, t.limit) for t in tracks],
        "limit",
        {"dash": "dash", "width": 1.5, "shape": "hv"},
    )
    if are_worth_it(norms):
        limited = ", dashed the limit above which it is clipped" if limits else ""
        y = {"title": "norm", **_logarithmic(norms)}
        yield Figure(
            f"{prefix}-norm",
            "Gradient norm",
            f"The norm of all gradients, before clipping{limited}. Spikes stand out; a gap is a "
            "step whose gradients were NaN or Inf.",
            _plot(curves, [*norms, *limits], y, early=early, marks=marks),
            remark=remark,
        )
    rates, remark = _lines(curves, [line(t, t.lr) for t in tracks], "learning rate")
    # One that never moves is a number, and stands among the numbers.
    moves = len({value for track in tracks for value in track.lr if not math.isnan(value)}) > 1
    if moves and are_worth_it(rates):
        y = {"title": "learning rate", "exponentformat": "power", "rangemode": "tozero"}
        yield Figure(
            f"{prefix}-rate",
            "Learning rate",
            "Of the first parameter group. A loss that leaves the ground as the rate rises asks "
            "for a lower one, or a longer warm-up.",
            _plot(curves, rates, y, early=early, marks=marks),
            remark=remark,
        )
    yield from _scales(f"{prefix}-scale", curves, early=early, marks=marks)
    shares, _ = _lines(curves, list(map(clipped_share, tracks)), "clipped", STEPS)
    if are_worth_it(shares):
        yield Figure(
            f"{prefix}-clipped",
            "Share of clipped steps",
            "Of the steps that were taken, window by window. Near 100 % the limit sets every "
            "step's length; at 0 % it only stands guard.",
            _plot(curves, shares, {"title": "clipped", **PERCENT}, early=early, marks=marks),
        )


def run_figures(prefix: str, runs: Sequence[WholeRun]) -> Iterator[Figure]:
    """What scripts have logged, then step time, rates, time between steps and memory."""
    curves, took = [run.curve for run in runs], [run.resources for run in runs]
    marks = [{**run.marked, "run": run.curve.colour} for run in runs if run.marked]
    whose = {curve.track.label for curve in curves if curve.track.several}
    each = f" of {whose.pop()}" if len(whose) == 1 else ""
    for number, name in enumerate(dict.fromkeys(name for of in took for name in of.logged)):
        called = clean(name)
        lines = [_measured(of.logged.get(name)) for of in took]
        traces, remark = _lines(curves, lines, called, smooth=True)
        if are_worth_it(traces):
            yield Figure(
                f"{prefix}-logged-{number}",
                called,
                "Logged by the script itself.",
                _plot(curves, traces, {"title": text(short_name(called, 24))}, marks=marks),
                remark=remark,
            )
    seconds = [of.track.seconds for of in took]
    lines = [line(of.track, of.track.seconds) for of in took]
    traces, remark = _lines(curves, lines, "step time", smooth=True)
    if are_worth_it(traces):
        y = _logarithmic(traces) if _wide_apart(seconds) else TO_ZERO
        yield Figure(
            f"{prefix}-seconds",
            "Step time",
            f"From the end of one step{each} to the end of the next, by the host's clock: forward, "
            "backward, data and whatever else lies between. A GPU works behind the host, so a "
            "single step may look too short or too long; the median does not.",
            _plot(curves, traces, {"title": "seconds", **y}, marks=marks),
            remark=remark,
        )
    for number, name in enumerate(dict.fromkeys(name for of in took for name in of.per_step)):
        called = clean(name)
        lines = [line(of.track, of.rate(name)) if name in of.per_step else None for of in took]
        traces, remark = _lines(curves, lines, f"{called}/s", smooth=True)
        if are_worth_it(traces):
            yield Figure(
                f"{prefix}-rate-{number}",
                f"{sentence_case(called)} a second",
                f"How many a step works on, as the recorder was told, over the step time{each}.",
                _plot(curves, traces, {"title": f"{text(called)}/s", **TO_ZERO}, marks=marks),
                remark=remark,
            )
    lines = [waiting_share(of.track, of.waited, of.track.seconds) for of in took]
    traces, _ = _lines(curves, lines, "between", STEPS)
    if are_worth_it(traces):
        yield Figure(
            f"{prefix}-between",
            "Share of time between steps",
            "Waiting for data, as a rule: from the end of a step to the next forward pass, by the "
            "host's clock, and what a DataLoader takes at other times. Whatever else the script "
            "does between steps counts too: logging, a checkpoint, or loss.item(), which waits for "
            "the GPU.",
            _plot(curves, traces, {"title": "share", **PERCENT}, marks=marks),
        )
    memory, _ = _lines(curves, [_measured(of.memory, 2**30) for of in took], "memory", STEPS)
    dashed = {"dash": "dash", **STEPS}
    gpu, _ = _lines(curves, [_measured(of.gpu_memory, 2**30) for of in took], "GPU", dashed)
    if are_worth_it([*memory, *gpu]):
        of_gpu = "; dashed, what tensors have taken at most on its GPU" if gpu else ""
        ranks = sorted({of.rank for of in took if of.rank is not None})
        process = f"process of rank {' or '.join(map(str, ranks))}" if ranks else "process"
        yield Figure(
            f"{prefix}-memory",
            "Peak memory",
            f"The most that the {process} has held of the machine's memory so far{of_gpu}. A line "
            "that goes on rising is a leak, or a graph that is kept.",
            _plot(curves, [*memory, *gpu], {"title": "GiB", **TO_ZERO}, marks=marks),
        )


def _measured(found: Measured | None, unit: float = 1.0) -> Line | None:
    if found is None or not found.values:
        return None
    return line(found.places, [value / unit for value in found.values])


def are_worth_it(traces: Sequence[Trace]) -> bool:
    """Whether there is something to see: a line needs two points."""
    return any(sum(value is not None for value in trace["y"]) > 1 for trace in traces)


def _scales(
    key: str, curves: Sequence[Curve], *, early: bool, marks: Sequence[dict[str, Any]]
) -> Iterator[Figure]:
    scales, remark = _lines(
        curves, [staircase(c.track, c.track.scale) for c in curves], "scale", STEPS
    )
    unscaled = all(value == 1 or math.isnan(value) for c in curves for value in c.track.scale)
    if not are_worth_it(scales) or (unscaled and not any(c.track.skipped for c in curves)):
        return
    for trace in scales:
        trace["text"] = [None if value is None else power(value) for value in trace["y"]]
        trace["y"] = [_log2(value) for value in trace["y"]]
        trace["hovertemplate"] = "%{text}<extra>%{fullData.name}</extra>"
        for edge in ("low", "high"):
            trace["meta"][edge] = [_log2(value) for value in trace["meta"].get(edge, ())]
    crosses = []
    for curve in curves:
        skips = skip_marks(curve.track)
        if skips is not None:
            name = f"skipped, {curve.label}" if len(curves) > 1 else "skipped"
            words = [text(each) for each in skips.words]
            y = [_log2(value) for value in skips.y]
            crosses.append(_crosses(curve, name, replace(skips, y=y, words=words)))
    heights = [v for trace in (*scales, *crosses) for v in trace["y"] if v is not None]
    low, high = math.floor(min(heights, default=0)) - 1, math.ceil(max(heights, default=0)) + 1
    axis = {
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
        _plot(curves, [*scales, *crosses], axis, early=early, marks=marks),
        remark=remark,
    )


def _lines(
    curves: Sequence[Curve],
    lines: Sequence[Line | None],
    name: str,
    shape: Mapping[str, Any] | None = None,
    *,
    smooth: bool = False,
) -> tuple[list[Trace], str]:
    """The line of each curve that has values, and a remark if one of them was thinned.

    `smooth` says whether the reader may smooth it.
    """
    several, second = len(curves) > 1, name in ("limit", "GPU")
    made = [(curve, drawn) for curve, drawn in zip(curves, lines, strict=True) if drawn is not None]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers" if dotted(drawn, shape, curve.style) else "lines",
            "name": text((f"{name}, " if second else "") + curve.label if several else name),
            "x": drawn.x,
            "y": drawn.y,
            "hovertemplate": "%{y:.4g}<extra>%{fullData.name}</extra>",
            **curve.style,
            "meta": {
                "run": curve.colour,
                "role": name if second else "line",
                "t": drawn.t,
                **({"smooth": True} if smooth else {}),
                **({"low": drawn.low, "high": drawn.high} if drawn.low else {}),
            },
            "line": {**curve.style.get("line", {}), **(shape or {})},
            # Dashes tell a limit well enough.
            **({"showlegend": False} if several and second else {}),
        }
        for curve, drawn in made
    ]
    longest = max((drawn.thinned for _, drawn in made), default=0)
    remark = (
        f"Of {longest:,} values: the line is the median of each group of neighbours, the band "
        "reaches from the smallest to the largest of them."
    )
    return traces, remark if longest else ""


def dotted(drawn: Line, shape: object, style: Mapping[str, Any]) -> bool:
    """Whether points are marked: a few of a curve that wanders, or those with no neighbour."""
    few = drawn.known <= FEW_POINTS and shape is None and "line" not in style
    return few or drawn.has_loose_points


def _crosses(curve: Curve, name: str, marks: Line) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": text(name),
        "x": marks.x,
        "y": marks.y,
        "text": marks.words,
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
        "meta": {"run": curve.colour, "role": "skip", "t": marks.t},
        **{key: curve.style[key] for key in ("legendgroup", "showlegend") if key in curve.style},
    }


def _last_finite(curve: Curve) -> list[Trace]:
    """A cross where a loss was finite for the last time, if it was not to the end."""
    track = curve.track
    finite = [place for place, value in enumerate(track.loss) if not math.isnan(value)]
    if not finite or finite[-1] == len(track.loss) - 1:
        return []
    last = finite[-1]
    where = Line([track.at[last]], [track.time[last]], [track.loss[last]])
    cross = _crosses(curve, curve.label, replace(where, words=["the last that is finite"]))
    return [{**cross, "showlegend": False}]


def _plot(
    curves: Sequence[Curve],
    traces: list[Trace],
    y: dict[str, Any],
    *,
    early: bool = False,
    marks: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    places = any(curve.track.renumbered for curve in curves)
    x = {"title": "steps recorded" if places else "step"}
    return {
        "traces": traces,
        "x": {**x, "type": "log", "dtick": "D2"} if early else x,
        "y": y,
        "marks": marks,
        "legend": sum(trace.get("showlegend", True) for trace in traces) > 1,
    }


def _wide_apart(columns: Iterable[Sequence[float]]) -> bool:
    """Whether values are positive, and the largest so large that all others would lie flat."""
    known = [value for column in columns for value in column if not math.isnan(value)]
    return bool(known) and min(known) > 0 and max(known) > WIDE_APART * median(known)


def _logarithmic(traces: Sequence[Trace]) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5, or at whole decades where there are many."""
    values = [y for trace in traces for y in trace["y"] if y]
    values += [y for trace in traces for y in trace["meta"].get("low", ()) if y]
    values += [y for trace in traces for y in trace["meta"].get("high", ()) if y]
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
        "One row a tensor, in the optimizer's order; bright is large. A row that turns dark is "
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
            # A map on which nothing stands out is none: hardly a zero, say.
            least = LEAST_SHARE if scale == "share" else 0.0
            if made is None or not any(
                value and abs(value) > least for row in made.z for value in row
            ):
                continue
            remark = []
            if made.thinned:
                steps = f"{made.thinned:,} recorded steps"
                remark.append(f"Each column shows the largest of several of the {steps}.")
            if made.folded:
                tensors = f"{made.folded:,} tensors"
                remark.append(f"Each row shows the largest of several of the {tensors}.")
            trace = heat_trace(made.edges, made.rows, made.z, scale, made.columns, hover)
            trace["meta"]["t"] = made.times
            mark = nan_mark(curve.track)
            plot = {
                "traces": [trace],
                "x": {"title": "steps recorded" if curve.track.renumbered else "step"},
                "heat": True,
                "marks": [] if mark is None else [{**mark, "run": curve.colour}],
                **name_axis(made.rows),
            }
            yield Figure(
                f"{prefix}-{key}-{curve.colour}",
                f"{title}, {curve.label}" if len(curves) > 1 else title,
                reading,
                plot,
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


def name_axis(names: Sequence[str], *, short: int = SHORT_LABEL) -> dict[str, Any]:
    """The vertical axis of a heat map with a row for each name, from top to bottom.

    With the labels as a wide window has room for them, and of `short` characters for a narrow one.
    """
    shown = names[:: max(1, math.ceil(len(names) / MOST_LABELS))]
    axis = {
        "type": "category",
        "autorange": "reversed",
        "tickmode": "array",
        # Names, not places: a tensor may be called "2", and plotly.js looks for that first.
        "tickvals": [text(name) for name in shown],
        "ticktext": list(map(text, short_names(shown, LONGEST_LABEL))),
    }
    return {"y": axis, "short": list(map(text, short_names(shown, short)))}
