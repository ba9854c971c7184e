"""An audit → its pictures: the gradients' exponents, and over them what each format can hold.

The x axis is log2 of a magnitude, a bin reaches from its exponent to the next. A picture has a view
for each format; which one is on is the reader's choice, made in the page's script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gradilocks.lab import AuditRecord, FormatFinding, Histogram, ModuleGradients, Shares
from gradilocks.report.figures import (
    HIGHEST,
    ROW_HEIGHT,
    Figure,
    heat_trace,
    name_axis,
)
from gradilocks.report.formatting import clean, count, percent, power, raised, short_name
from gradilocks.report.series import buckets, unique

# Beyond every exponent of a float64: where a window's outer bands end.
OUTSIDE = 1200
# An edge of a window so many doublings from the gradients says nothing about them, and would
# leave them a fraction of the picture: it is left outside, to be zoomed out to.
REACH = 32
# A tail of fewer values than this share is left outside too, but only on the side of zero.
TAIL = 0.0005
MOST_ROWS = 400
# Characters of a module's name beside its row in a narrow window.
SHORT_LABEL = 13
ROWS_TALL = (330, 520)
KINDS = {
    "all": "all gradients",
    "activations": "activation gradients",
    "parameters": "parameter gradients",
}
HISTOGRAMS = ("activations", "parameters")
EXPONENTS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d"}


def shown_first(audit: AuditRecord) -> FormatFinding:
    """The format to show first: the recommended one, if it is among them."""
    return audit.recommended or audit.formats[0]


def label_of(module: ModuleGradients) -> str:
    """What a module is called beside its row."""
    return clean(module.name) or "(the model itself)"


def kinds_of(audit: AuditRecord) -> list[str]:
    """Which gradients the modules have: all together, and each kind if there are both."""
    there = [
        kind
        for kind in HISTOGRAMS
        if any((made := getattr(module, kind)) and made.values for module in audit.modules)
    ]
    return ["all", *there] if len(there) > 1 else there


def window_figure(key: str, audit: AuditRecord) -> Figure:
    """How the exponents are spread, at scale 1 and at the scale recommended for a format."""
    spread = {kind: getattr(audit, kind) for kind in HISTOGRAMS}
    drawn = {kind: made for kind, made in spread.items() if made.values}
    return Figure(
        key,
        "The gradients in the format's window",
        "How many values have which magnitude. What lies left of the window is rounded to zero, "
        "what lies right of it overflows; subnormal values lose precision bit by bit. A loss scale "
        "moves all gradients to the right.",
        {
            "traces": [],
            "x": {"title": "magnitude as stored: |gradient| × scale", **EXPONENTS},
            "y": {"title": "share", "tickformat": ".0%"},
            "legend": True,
            "hover": "around 2<sup>%{x:.1f}</sup>",
            "views": {each.name: _window(drawn, each) for each in audit.formats},
            "active": [shown_first(audit).name],
        },
        height=ROWS_TALL[1],
        wide=True,
        remark=_left_out(audit.activations + audit.parameters),
    )


def module_figure(key: str, audit: AuditRecord) -> Figure | None:
    """The exponents of every module, with the ends of the window; None if there is no value."""
    rows = _rows(audit.modules)
    kinds = kinds_of(audit)
    if not rows or not kinds:
        return None
    low, high = _shown([row[kind] for _, row in rows for kind in kinds])
    names = unique([name for name, _ in rows])
    views: dict[str, Any] = {
        f"of {kind}": {"traces": [_heat([row[kind] for _, row in rows], kind, names, low, high)]}
        for kind in kinds
    }
    views |= {each.name: _over(each, low, high) for each in audit.formats}
    folded = len(audit.modules) if len(rows) < len(audit.modules) else 0
    return Figure(
        key,
        "The gradients of each module",
        "One row a module, in forward order; the stronger the colour, the more of its values have "
        "this magnitude. Lines are the ends of the window at the recommended scale, dotted at "
        "scale 1. What lies in the tinted parts is lost, or overflows.",
        {
            "traces": [],
            "x": {"title": "magnitude: |gradient|, unscaled", **EXPONENTS},
            **name_axis(names, short=SHORT_LABEL),
            "heat": True,
            "views": views,
            "active": [shown_first(audit).name, f"of {kinds[0]}"],
        },
        height=min(HIGHEST, 170 + max(ROW_HEIGHT * len(rows), min(28 * len(rows), 280))),
        wide=True,
        remark=f"Each row adds up several of the {folded:,} modules." if folded else "",
    )


# --- the window ------------------------------------------------------------------------------


def _window(drawn: dict[str, Histogram], each: FormatFinding) -> dict[str, Any]:
    scales = [1.0] if each.scale == 1 else [1.0, each.scale]
    low, high = _shown(drawn.values())
    shifts = [math.log2(scale) for scale in scales]
    left, right = _reaching(low + min(shifts), high + max(shifts), each.format.edges)
    titles = ["At scale 1", f"At scale {raised(power(each.scale))}"]
    top = max((max(made.counts) / made.values for made in drawn.values()), default=1.0)
    return {
        "traces": [
            trace for row, shift in enumerate(shifts) for trace in _curves(drawn, shift, row=row)
        ],
        "rows": titles[: len(scales)],
        "bands": [
            {**band, "ends": _ends(band, left, right)}
            for row, shares in enumerate(each.fate[: len(scales)])
            for band in _bands(each, shares, row=row)
        ],
        "moved": _moved(drawn, each.scale) if len(scales) > 1 else None,
        "range": [left, right],
        "top": top * 1.32,
        "height": ROWS_TALL[len(scales) - 1],
    }


def _curves(drawn: dict[str, Histogram], shift: float, *, row: int) -> Iterator[dict[str, Any]]:
    for kind, made in drawn.items():
        bins = range(made.first - 1, made.first + len(made.counts) + 1)
        total = made.values
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": KINDS[kind],
            # A point lies in the middle of its bin, so that one points at the bin under the mouse.
            "x": [_neat(at + shift + 0.5) for at in bins],
            "y": [0, *(_neat(each / total) for each in made.counts), 0],
            "line": {"shape": "hvh"},
            "fill": "tozeroy",
            "yaxis": "y" if row == 0 else f"y{row + 1}",
            "legendgroup": kind,
            "showlegend": row == 0,
            "hovertemplate": "%{y:.2%}<extra>%{fullData.name}</extra>",
            "meta": {"role": kind},
        }


def _bands(each: FormatFinding, shares: Shares | None, *, row: int) -> list[dict[str, Any]]:
    """What a format makes of which magnitudes, with the share of them if it is to be shown."""
    edges = (-OUTSIDE, *each.format.edges, OUTSIDE)
    return [
        {
            "fate": fate,
            "x0": _neat(edges[place]),
            "x1": _neat(edges[place + 1]),
            "row": row,
            "share": "" if shares is None or shares.of_nothing else percent(getattr(shares, fate)),
        }
        for place, fate in enumerate(("lost", "subnormal", "normal", "overflow"))
    ]


def _ends(band: dict[str, Any], left: float, right: float) -> str:
    """Where the window ends, if that is not in the picture."""
    if band["fate"] != "normal":
        return ""
    below = f"down to 2<sup>{band['x0']:.0f}</sup>" if band["x0"] < left else ""
    above = f"up to 2<sup>{band['x1']:.0f}</sup>" if band["x1"] > right else ""
    return ", ".join(filter(None, (below, above)))


def _moved(drawn: dict[str, Histogram], scale: float) -> dict[str, Any] | None:
    """From where to where the scale moves the middle of the first histogram."""
    for made in drawn.values():
        below, half = 0, made.values / 2
        for at, each in made.bins():
            below += each
            if each and below >= half:
                words = f"× {raised(power(scale))}"
                return {"from": at, "to": _neat(at + math.log2(scale)), "words": words}
    return None


# --- module by module ------------------------------------------------------------------------


def _rows(modules: Sequence[ModuleGradients]) -> list[tuple[str, dict[str, Histogram]]]:
    """A row a module, or for several neighbours if there are more than a screen shows."""
    rows = []
    for group in buckets(len(modules), MOST_ROWS):
        members = [modules[i] for i in group]
        name = label_of(members[0])
        if len(members) > 1:
            name = f"{short_name(name, 40)} … {short_name(clean(members[-1].name), 40)}"
        row = {k: Histogram.total(getattr(one, k) for one in members) for k in HISTOGRAMS}
        row["all"] = row["activations"] + row["parameters"]
        if row["all"].values:
            rows.append((short_name(name, 90), row))
    return rows


def _heat(
    histograms: Sequence[Histogram], kind: str, names: list[str], low: int, high: int
) -> dict[str, Any]:
    z: list[list[float | None]] = []
    for made in histograms:
        counts, total = dict(made.bins()), made.values
        shares = (counts.get(at, 0) / total if total else 0.0 for at in range(low, high))
        z.append([float(f"{share:.3g}") if share else None for share in shares])
    columns = [f"2<sup>{at}</sup> to 2<sup>{at + 1}</sup>" for at in range(low, high)]
    hover = f"%{{customdata:.2%}} of its {KINDS[kind].removeprefix('all ')}"
    return heat_trace(list(range(low, high + 1)), names, z, "density", columns, hover)


def _over(each: FormatFinding, low: int, high: int) -> dict[str, Any]:
    """The ends of a format's window among unscaled gradients: a scale moves them to the left."""
    shift = math.log2(each.scale)
    moved = [edge - shift for edge in each.format.edges]
    bands = [
        {**band, "x0": _neat(band["x0"] - shift), "x1": _neat(band["x1"] - shift)}
        for band in _bands(each, None, row=0)
    ]
    # The window at scale 1 shows how far the scale moves it, but not at the price of the modules.
    left, right = _reaching(low, high, moved)
    return {
        "bands": bands,
        "before": [_neat(edge) for edge in each.format.edges] if shift else [],
        "range": [left, right],
    }


# --- numbers ---------------------------------------------------------------------------------


def _shown(histograms: Iterable[Histogram]) -> tuple[int, int]:
    """From where to where there are values: the outermost of all histograms, without thin tails."""
    low, high = [], []
    for made in histograms:
        below, total = 0, made.values
        for at, each in made.bins():
            below += each
            if below > TAIL * total:
                low.append(at)
                break
        if total:
            high.append(made.first + len(made.counts))
    return (min(low), max(high)) if low else (-24, 0)


def _reaching(low: float, high: float, edges: Sequence[float]) -> tuple[float, float]:
    """A range with all values in it, and with those ends of the window that are not far off."""
    left = min([low, *(edge for edge in edges if low - REACH < edge)])
    right = max([high, *(edge for edge in edges if edge < high + REACH)])
    margin = 0.08 * (right - left)
    return _neat(left - margin), _neat(right + margin)


def _left_out(seen: Histogram) -> str:
    words = []
    if seen.zeros:
        share = seen.zeros / (seen.values + seen.zeros + seen.nonfinite)
        words.append(f"{percent(share)} of the values are exactly zero")
    if seen.nonfinite:
        are = "is" if seen.nonfinite == 1 else "are"
        words.append(f"{count(seen.nonfinite, 'value')} {are} NaN or Inf")
    return f"{' and '.join(words)}; they are not drawn." if words else ""


def _neat(value: float) -> float:
    return float(f"{value:.6g}")
