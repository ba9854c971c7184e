"""Plots of one or several runs, as one plotly figure with a shared step axis."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from gradilocks.view.columns import Columns, Floats, columns
from gradilocks.view.runfile import Run
from gradilocks.view.text import clean, number, percent, scale_text, shorten

__all__ = ["figure", "thin"]

COLORS = ("#2a78d6", "#e0701a", "#1c9c78", "#b14a9a", "#a8830f", "#6a5acd", "#c0504d", "#5b8a3c")
"""One per curve; legible on white and on black."""
CURVE_HEIGHT, MARKS_HEIGHT, ROW_HEIGHT = 190, 26, 15
"""Pixels of a panel with curves, of one line of marks, and of one row of a heat map."""
MAX_CURVES = len(COLORS)
NORM_AND_LIMIT = "Gradient norm (dotted: limit)"
MAX_ROWS = 60
"""Rows of a heat map; it shows the tensors with the largest values."""


@dataclass(frozen=True)
class Curve:
    """The steps of one optimizer with the name and the color of its curves."""

    name: str
    color: str
    steps: Columns
    run: Run


@dataclass(frozen=True)
class Panel:
    """One row of the figure."""

    caption: str
    height: int
    draw: Callable[[go.Figure, int], None]


def figure(runs: Sequence[Run], names: Sequence[str]) -> go.Figure | None:
    """All plots of the runs, one below the other; None if there is nothing to plot.

    Panels whose values are constant in all runs are left out. Heat maps are drawn only for one run with one optimizer.
    """
    curves = _curves(runs, names)
    has_limit = any(np.isfinite(curve.steps.limit).any() for curve in curves)
    panels = [
        _curve_panel(curves, "Loss", lambda steps: steps.loss, number),
        _curve_panel(curves, NORM_AND_LIMIT if has_limit else "Gradient norm", lambda steps: steps.norm, number),
        _event_panel(curves),
        _curve_panel(curves, "Loss scale", lambda steps: steps.scale, scale_text, is_stair=True),
        _curve_panel(curves, "Learning rate", lambda steps: steps.lr, number, is_stair=True),
        _curve_panel(curves, "Zero gradient elements (mean)", _mean_zeros, percent),
        *_metric_panels(curves),
    ]
    if len(runs) == 1 and len(curves) == 1:
        steps = curves[0].steps
        panels += [
            _heat_panel(steps, "Gradient norm per tensor, log10", _log10(steps.norms)),
            _heat_panel(steps, "Update / weight per tensor, log10", _log10(steps.updates)),
            _heat_panel(steps, "Share of zeros per tensor", steps.zeros),
        ]
    drawn = [panel for panel in panels if panel is not None]
    return _stack(drawn, has_legend=len(curves) > 1) if drawn else None


def _stack(panels: list[Panel], *, has_legend: bool) -> go.Figure:
    gap = 56
    total = sum(panel.height for panel in panels) + gap * (len(panels) - 1)
    fig = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=gap / total if len(panels) > 1 else 0,
        row_heights=[panel.height for panel in panels],
        subplot_titles=[panel.caption for panel in panels],
    )
    for row, panel in enumerate(panels, 1):
        panel.draw(fig, row)
    fig.update_annotations(x=0, xanchor="left", font_size=13, yshift=4)
    fig.update_xaxes(title_text="step", row=len(panels), col=1)
    fig.update_xaxes(showgrid=False, zeroline=False, showticklabels=True)
    fig.update_yaxes(zeroline=False, automargin=True)
    fig.update_layout(
        template="none",
        height=total + 110 + 24 * has_legend,
        margin={"l": 56, "r": 12, "t": 40 + 24 * has_legend, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=has_legend,
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1 + 28 / total, "yanchor": "bottom"},
        hovermode="closest",
        dragmode="zoom",
    )
    return fig


def _curves(runs: Sequence[Run], names: Sequence[str]) -> list[Curve]:
    """The optimizers with the most steps in each run, about `MAX_CURVES` in total but at least one per run."""
    found: list[tuple[str, Columns, Run]] = []
    per_run = max(1, MAX_CURVES // max(1, len(runs)))
    for run, name in zip(runs, names, strict=True):
        all_steps = columns(run)
        longest = sorted(all_steps, key=lambda steps: -len(steps))[:per_run]
        for steps in sorted(longest, key=lambda steps: steps.optimizer):
            parts = [name] if len(runs) > 1 else []
            parts += [steps.label] if len(all_steps) > 1 else []
            found.append((html.escape(clean(" · ".join(parts))), steps, run))
    return [Curve(name, COLORS[i % len(COLORS)], steps, run) for i, (name, steps, run) in enumerate(found)]


def _curve_panel(
    curves: Sequence[Curve],
    caption: str,
    values_of: Callable[[Columns], Floats],
    text_of: Callable[[float], str],
    *,
    is_stair: bool = False,
) -> Panel | None:
    """One line per optimizer; None if there are fewer than two values or all are equal."""
    lines = [(curve, curve.steps.step, values_of(curve.steps)) for curve in curves]
    return _line_panel(lines, caption, text_of, is_stair=is_stair)


def _line_panel(
    lines: Sequence[tuple[Curve, NDArray[np.generic], Floats]],
    caption: str,
    text_of: Callable[[float], str] = number,
    *,
    is_stair: bool = False,
) -> Panel | None:
    pooled = np.concatenate([values for *_, values in lines]) if lines else np.array([])
    pooled = pooled[np.isfinite(pooled)]
    if len(pooled) < 2 or np.ptp(pooled) == 0:
        return None

    def draw(fig: go.Figure, row: int) -> None:
        for curve, steps, values in lines:
            keep = np.isfinite(values)
            x, y = thin(steps[keep], values[keep])
            fig.add_scatter(
                x=x,
                y=y,
                name=curve.name,
                legendgroup=curve.name,
                showlegend=row == 1,
                mode="lines+markers" if len(x) < 40 else "lines",
                line={"color": curve.color, "width": 1.5, "shape": "hv" if is_stair else "linear"},
                marker={"size": 4},
                text=[text_of(value) for value in y],
                hovertemplate="step %{x}: %{text}<extra>" + curve.name + "</extra>",
                row=row,
                col=1,
            )
            if caption == NORM_AND_LIMIT:
                _draw_limit(fig, row, curve)
        positive = pooled[pooled > 0]
        is_wide = len(positive) == len(pooled) and positive.max() > 20 * np.median(positive)
        if is_wide or caption == "Loss scale":
            decades = math.log10(positive.max()) - math.log10(positive.min())
            fig.update_yaxes(type="log", exponentformat="power", dtick=max(1, round(decades / 5)), row=row, col=1)
        if caption == "Loss scale":
            _label_powers_of_two(fig, row, positive)
        if text_of is percent:
            fig.update_yaxes(tickformat=".2~%", row=row, col=1)

    return Panel(caption, CURVE_HEIGHT, draw)


def _draw_limit(fig: go.Figure, row: int, curve: Curve) -> None:
    """The limit on the norm, as a dotted line."""
    has_limit = np.isfinite(curve.steps.limit)
    x, y = thin(curve.steps.step[has_limit], curve.steps.limit[has_limit])
    if len(x):
        line = {"color": curve.color, "width": 1, "dash": "dot", "shape": "hv"}
        text = [f"limit {number(value)}" for value in y]
        hover = "step %{x}: %{text}<extra></extra>"
        fig.add_scatter(
            x=x, y=y, mode="lines", line=line, showlegend=False, text=text, hovertemplate=hover, row=row, col=1
        )


def _label_powers_of_two(fig: go.Figure, row: int, scales: Floats) -> None:
    exponents = np.arange(math.floor(math.log2(scales.min())), math.ceil(math.log2(scales.max())) + 1)
    shown = exponents[:: max(1, len(exponents) // 5)]
    labels = [f"2<sup>{exponent}</sup>" for exponent in shown]
    fig.update_yaxes(tickvals=[2.0**exponent for exponent in shown], ticktext=labels, row=row, col=1)


def _event_panel(curves: Sequence[Curve]) -> Panel | None:
    """Marks at clipped, rejected, skipped and corrupting steps."""
    kinds: list[tuple[str, Callable[[Columns], NDArray[np.bool_]]]] = [
        ("clipped", lambda steps: steps.clipped),
        ("rejected", lambda steps: steps.rejected),
        ("skipped", lambda steps: steps.skipped & ~steps.rejected),
        ("NaN or Inf applied", lambda steps: steps.nonfinite & steps.applied),
    ]
    shown = [(name, flags_of) for name, flags_of in kinds if any(flags_of(curve.steps).any() for curve in curves)]
    if not shown:
        return None

    def draw(fig: go.Figure, row: int) -> None:
        for name, flags_of in shown:
            for curve in curves:
                at = curve.steps.step[flags_of(curve.steps)]
                # More than 2,000 marks would overlap.
                at = at[:: len(at) // 2000 + 1]
                marker = {"symbol": "line-ns-open", "size": 9, "color": curve.color}
                hover = f"{name} in step %{{x}}<extra>{curve.name}</extra>"
                fig.add_scatter(
                    x=at,
                    y=[name] * len(at),
                    mode="markers",
                    marker=marker,
                    showlegend=False,
                    hovertemplate=hover,
                    row=row,
                    col=1,
                )
        fig.update_yaxes(type="category", categoryarray=[name for name, _ in shown], showgrid=False, row=row, col=1)

    return Panel("Marked steps", MARKS_HEIGHT * len(shown) + 20, draw)


def _mean_zeros(steps: Columns) -> Floats:
    """Share of zero elements at each step, averaged over the tensors; NaN at steps without detail."""
    values = np.full(len(steps), np.nan)
    has_zeros = ~np.isnan(steps.zeros).all(axis=1)
    values[steps.detail[has_zeros]] = np.nanmean(steps.zeros[has_zeros], axis=1)
    return values


def _metric_panels(curves: Sequence[Curve], *, limit: int = 8) -> list[Panel | None]:
    """One panel for each of the first `limit` logged metrics, with one line per run."""
    by_run = {id(curve.run): curve for curve in reversed(curves)}
    shown = [curve for curve in curves if by_run[id(curve.run)] is curve]
    metrics = list(dict.fromkeys(name for curve in shown for log in curve.run.logs for name in log["values"]))[:limit]
    return [_metric_panel(shown, metric) for metric in metrics]


def _metric_panel(curves: Sequence[Curve], metric: str) -> Panel | None:
    lines = []
    for curve in curves:
        points = [(log["step"], log["values"][metric]) for log in curve.run.logs if metric in log["values"]]
        steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
        lines.append((curve, steps, values))
    return _line_panel(lines, html.escape(shorten(clean(metric), 40)) + " (logged)")


def _log10(values: Floats) -> Floats:
    """Base-10 logarithm; NaN where a value is zero, NaN or Inf."""
    return np.log10(values, out=np.full_like(values, np.nan), where=np.isfinite(values) & (values > 0))


def _heat_panel(steps: Columns, caption: str, values: Floats) -> Panel | None:
    """One row per tensor, the first tensor on top; None for one tensor, for one step, or if all values are equal."""
    finite = values[np.isfinite(values)]
    rows = np.flatnonzero(np.isfinite(values).any(axis=0))
    if len(rows) < 2 or len(values) < 2 or np.ptp(finite) == 0:
        return None
    if len(rows) > MAX_ROWS:
        largest = np.argsort(-np.nanmax(values[:, rows], axis=0), kind="stable")[:MAX_ROWS]
        rows = np.sort(rows[largest])
        caption += f", {MAX_ROWS} largest"
    stride = -(-len(values) // 500)
    names = [html.escape(clean(steps.names[i])) for i in rows]
    short = [html.escape(shorten(clean(name), 18)) for name in _without_common_prefix([steps.names[i] for i in rows])]

    def draw(fig: go.Figure, row: int) -> None:
        axis = "coloraxis" + ("" if row == 1 else str(row))
        fig.add_heatmap(
            x=steps.step[steps.detail][::stride],
            y=names,
            z=np.round(values[::stride, rows].T, 3),
            coloraxis=axis,
            hovertemplate="%{y}<br>step %{x}: %{z:.3g}<extra></extra>",
            row=row,
            col=1,
        )
        ticks = {"type": "category", "tickvals": names, "ticktext": short, "tickfont_size": 10}
        fig.update_yaxes(ticks, autorange="reversed", showgrid=False, row=row, col=1)
        fig.update_layout({axis: {"colorscale": "Viridis", "showscale": False}})

    return Panel(caption, max(120, ROW_HEIGHT * len(rows)), draw)


def _without_common_prefix(names: list[str]) -> list[str]:
    """The names without the leading dotted parts that all of them share."""
    while all("." in name for name in names) and len({name.partition(".")[0] for name in names}) == 1:
        names = [name.partition(".")[2] for name in names]
    return names


def thin(x: NDArray[np.generic], y: Floats, bins: int = 1000) -> tuple[NDArray[np.generic], Floats]:
    """The lowest and the highest point of each bin, and the first and last point, so that no extreme is lost."""
    if len(x) <= 2 * bins:
        return x, y
    parts = np.array_split(np.arange(len(y)), bins)
    keep = {0, len(y) - 1}
    for part in parts:
        keep |= {int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    rows = sorted(keep)
    return x[rows], y[rows]
