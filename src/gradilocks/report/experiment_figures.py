"""An experiment's summary and its runs → the pictures of its page.

As in ``figures``, a trace carries the number of its arm, and the page's script colours it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradilocks.report.figures import Figure
from gradilocks.report.series import line
from gradilocks.report.tracks import Track

__all__ = ["CLIPPING", "SCALING", "Drawn", "clipping_figures", "place_of", "scaling_figures"]

Plain = Mapping[str, Any]
Trace = dict[str, Any]

# Each arm has a colour of its own, whatever arms are there.
PLACES = {"fp32": 0, "too-small": 1, "just-right": 2, "too-large": 3, "clipped": 4}
SCALING = ("fp32", "too-small", "just-right")
CLIPPING = ("too-large", "clipped")
TALL = 380


@dataclass(frozen=True)
class Drawn:
    """A run to draw."""

    arm: str
    title: str
    seed: int
    track: Track


def place_of(arm: str) -> int:
    """The number of an arm's colour."""
    return PLACES.get(arm, len(PLACES))


def scaling_figures(drawn: Sequence[Drawn]) -> list[Figure]:
    """Loss of fp32, too small and just right."""
    traces = [
        trace
        for one in drawn
        if one.arm in SCALING
        for trace in _curve(one, one.track.loss, drawn, wide=one.arm == "fp32")
    ]
    if not traces:
        return []
    return [
        Figure(
            "scaling-loss",
            "Loss",
            "Of every step, before its update."
            + (" The broad band is fp32." if any(one.arm == "fp32" for one in drawn) else ""),
            _plot(traces, {"title": "step"}, {"title": "loss"}),
            height=TALL,
            wide=True,
        )
    ]


def clipping_figures(drawn: Sequence[Drawn]) -> list[Figure]:
    """Loss and gradient norm of too large and its clipped twin."""
    pair = [one for one in drawn if one.arm in CLIPPING]
    losses = [
        trace
        for one in pair
        for trace in (*_curve(one, one.track.loss, drawn), *_ends(one, one.track.loss))
    ]
    norms = [trace for one in pair for trace in _curve(one, one.track.norm, drawn)]
    limits = {limit for one in pair for limit in one.track.limit if not math.isnan(limit)}
    if not losses:
        return []
    crossed = any(trace["meta"]["role"] == "skip" for trace in losses)
    steps = {"title": "step", "type": "log", "dtick": "D2", "tickformat": "~g"}
    logarithmic = {"type": "log", "exponentformat": "power"}
    return [
        Figure(
            "clipping-loss",
            "Loss",
            "Both axes are logarithmic, so that the first steps can be told apart."
            + (" A cross is the last loss that is finite." if crossed else ""),
            _plot(losses, steps, {"title": "loss", **logarithmic, **_decades(losses)}),
            height=TALL,
        ),
        Figure(
            "clipping-norm",
            "Gradient norm",
            "Of all gradients together, before clipping"
            + (f"; dashed the limit of {min(limits):g}." if limits else "."),
            _plot(
                [*norms, *_limit(pair)],
                steps,
                {"title": "norm", **logarithmic, **_decades(norms)},
            ),
            height=TALL,
        ),
    ]


def _curve(
    one: Drawn, values: Sequence[float], drawn: Sequence[Drawn], *, wide: bool = False
) -> list[Trace]:
    made = line(one.track, values)
    if made is None:
        return []
    seeds = sorted({other.seed for other in drawn})
    few = sum(value is not None for value in made.y) < 30
    name = one.title if len(seeds) == 1 else f"{one.title}, seed {one.seed}"
    return [
        {
            "type": "scatter",
            "mode": "lines+markers" if few else "lines",
            "name": one.title,
            "legendgroup": one.arm,
            "showlegend": one.seed == seeds[0],
            "x": made.x,
            "y": made.y,
            "line": {"width": 6} if wide else {},
            "opacity": 0.35 if wide else 1.0 if one.seed == seeds[0] else 0.6,
            "hovertemplate": f"%{{y:.4g}}<extra>{name}</extra>",
            "meta": {"run": place_of(one.arm), "role": "curve"},
        }
    ]


def _ends(one: Drawn, values: Sequence[float]) -> list[Trace]:
    """A cross where a loss was finite for the last time, if it was not to the end."""
    finite = [place for place, value in enumerate(values) if not math.isnan(value)]
    if not finite or finite[-1] == len(values) - 1:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "the last that is finite",
            "x": [one.track.at[finite[-1]]],
            "y": [values[finite[-1]]],
            "showlegend": False,
            "hovertemplate": "the last that is finite<extra></extra>",
            "meta": {"run": place_of(one.arm), "role": "skip"},
        }
    ]


def _limit(pair: Sequence[Drawn]) -> list[Trace]:
    for one in pair:
        limits = [limit for limit in one.track.limit if not math.isnan(limit)]
        if limits:
            return [
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": "limit",
                    "x": [one.track.at[0], one.track.at[-1]],
                    "y": [limits[0], limits[0]],
                    "showlegend": False,
                    "line": {"dash": "dash", "width": 1.5},
                    "hovertemplate": "%{y:.4g}<extra>%{fullData.name}</extra>",
                    "meta": {"run": place_of(one.arm), "role": "limit"},
                }
            ]
    return []


def _decades(traces: Sequence[Trace]) -> dict[str, Any]:
    """1, 2 and 5 of each decade where there are few of them, else the decades alone."""
    values = [y for trace in traces for y in trace["y"] if y]
    few = bool(values) and max(values) < 200 * min(values)
    return {"dtick": "D2", "tickformat": "~g"} if few else {"dtick": 1}


def _plot(traces: list[Trace], x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    return {"traces": traces, "x": x, "y": y, "legend": True}
