"""An audit → its pictures: the gradients' exponents, and over them what each format can hold.

The x axis is log2 of a magnitude, a bin reaches from its exponent to the next. A picture has a view
for each format; which one is on is the reader's choice, made in the page's script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gradilocks.report.audited import Audit, Format, Histogram, Module, Shares
from gradilocks.report.figures import HIGHEST, LONGEST_LABEL, MOST_LABELS, ROW_HEIGHT, Figure, text
from gradilocks.report.formatting import count, percent, power, shortened
from gradilocks.report.series import buckets, unique

__all__ = ["KINDS", "kinds_of", "module_figure", "window_figure"]

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


def window_figure(key: str, audit: Audit) -> Figure:
    """How the exponents are spread, at scale 1 and at the scale recommended for a format."""
    spread = {kind: getattr(audit, kind) for kind in HISTOGRAMS}
    drawn = {kind: made for kind, made in spread.items() if made is not None and made.total}
    return Figure(
        key,
        "The gradients in the format's window",
        "How many values have which magnitude. What lies left of the window is rounded to zero, "
        "what lies right of it overflows; subnormal values lose precision bit by bit. A loss scale "
        "moves all gradients to the right.",
        {
            "traces": [],
            "x": {"title": "magnitude as stored: |gradient| × scale", **_exponents()},
            "y": {"title": "share", "tickformat": ".0%"},
            "legend": True,
            "hover": "around 2<sup>%{x:.1f}</sup>",
            "views": {each.name: _window(drawn, each) for each in audit.formats},
            "active": [audit.first.name],
        },
        height=ROWS_TALL[1],
        wide=True,
        remark=_left_out(spread),
    )


def module_figure(key: str, audit: Audit) -> Figure | None:
    """The exponents of every module, with the ends of the window; None if there is no value."""
    rows = _rows(audit.modules)
    kinds = kinds_of(audit)
    if not rows or not kinds:
        return None
    low, high = _shown([row[kind] for row in rows for kind in kinds])
    names = unique([row["name"] for row in rows])
    every = max(1, math.ceil(len(rows) / MOST_LABELS))
    views: dict[str, Any] = {
        f"of {kind}": {"traces": [_heat(rows, kind, names, low, high)]} for kind in kinds
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
            "x": {"title": "magnitude: |gradient|, unscaled", **_exponents()},
            "y": {
                "type": "category",
                "autorange": "reversed",
                "tickmode": "array",
                # Names, not places: a module may be called "2", and plotly.js looks for that first.
                "tickvals": [text(name) for name in names[::every]],
                "ticktext": [text(shortened(name, LONGEST_LABEL)) for name in names[::every]],
            },
            "heat": True,
            "short": [text(_initials(name)) for name in names[::every]],
            "views": views,
            "active": [audit.first.name, f"of {kinds[0]}"],
        },
        height=min(HIGHEST, 170 + max(ROW_HEIGHT * len(rows), min(28 * len(rows), 280))),
        wide=True,
        remark=f"Each row adds up several of the {folded:,} modules." if folded else "",
    )


def kinds_of(audit: Audit) -> list[str]:
    """Which gradients the modules have: all together, and each kind if there are both."""
    there = [
        kind
        for kind in HISTOGRAMS
        if any((made := getattr(module, kind)) and made.total for module in audit.modules)
    ]
    return ["all", *there] if len(there) > 1 else there


# --- the window ------------------------------------------------------------------------------


def _window(drawn: dict[str, Histogram], each: Format) -> dict[str, Any]:
    scales = [1.0] if each.scale == 1 else [1.0, each.scale]
    fates = [each.fate.unscaled, each.fate.scaled][: len(scales)]
    low, high = _shown([list(_bins(made)) for made in drawn.values()])
    shifts = [math.log2(scale) for scale in scales]
    left, right = _reaching(low + min(shifts), high + max(shifts), each.edges)
    titles = ["At scale 1", f"At scale {_raised(power(each.scale))}"]
    top = max((max(made.counts) / made.total for made in drawn.values()), default=1.0)
    return {
        "traces": [
            trace for row, shift in enumerate(shifts) for trace in _curves(drawn, shift, row=row)
        ],
        "rows": titles[: len(scales)],
        "bands": [
            {**band, "ends": _ends(band, left, right)}
            for row, shares in enumerate(fates)
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
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": KINDS[kind],
            # A point lies in the middle of its bin, so that one points at the bin under the mouse.
            "x": [_neat(at + shift + 0.5) for at in bins],
            "y": [0, *(_neat(each / made.total) for each in made.counts), 0],
            "line": {"shape": "hvh"},
            "fill": "tozeroy",
            "yaxis": "y" if row == 0 else f"y{row + 1}",
            "legendgroup": kind,
            "showlegend": row == 0,
            "hovertemplate": "%{y:.2%}<extra>%{fullData.name}</extra>",
            "meta": {"role": kind},
        }


def _bands(each: Format, shares: Shares | None, *, row: int) -> list[dict[str, Any]]:
    lost, normal, over = each.edges
    bands: list[dict[str, Any]] = []
    for fate, low, high in (
        ("lost", -OUTSIDE, lost),
        ("subnormal", lost, normal),
        ("normal", normal, over),
        ("overflow", over, OUTSIDE),
    ):
        share = getattr(shares, fate) if shares is not None else None
        bands.append(
            {
                "fate": fate,
                "x0": _neat(low),
                "x1": _neat(high),
                "row": row,
                "share": "" if share is None else percent(share),
            }
        )
    return bands


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
        half, below = made.total / 2, 0
        for at, each in _bins(made):
            below += each
            if below >= half:
                words = f"× {_raised(power(scale))}"
                return {"from": at, "to": _neat(at + math.log2(scale)), "words": words}
    return None


# --- module by module ------------------------------------------------------------------------


def _rows(modules: Sequence[Module]) -> list[dict[str, Any]]:
    """A row a module, or for several neighbours if there are more than a screen shows."""
    made = []
    for group in buckets(len(modules), MOST_ROWS):
        members = [modules[i] for i in group]
        name = members[0].name or "(the model itself)"
        if len(members) > 1:
            name = f"{shortened(name, 40)} … {shortened(members[-1].name, 40)}"
        row: dict[str, Any] = {"name": shortened(name, 90)}
        for kind in HISTOGRAMS:
            found = [getattr(member, kind) for member in members]
            row[kind] = _added([pair for one in found if one for pair in _bins(one)])
        row["all"] = _added([*row["activations"], *row["parameters"]])
        made.append(row)
    return [row for row in made if row["all"]]


def _heat(
    rows: Sequence[dict[str, Any]], kind: str, names: list[str], low: int, high: int
) -> dict[str, Any]:
    z: list[list[float | None]] = []
    for row in rows:
        counts = dict(row[kind])
        total = sum(counts.values())
        z.append(
            [
                float(f"{counts[at] / total:.3g}") if counts.get(at) else None
                for at in range(low, high)
            ]
        )
    return {
        "type": "heatmap",
        "x": list(range(low, high + 1)),
        "y": [text(name) for name in names],
        "z": z,
        "meta": {
            "scale": "density",
            "columns": [_between(at) for at in range(low, high)],
        },
        "hovertemplate": f"<b>%{{y}}</b><br>%{{text}}<br>%{{customdata:.2%}} of its "
        f"{KINDS[kind].removeprefix('all ')}"
        "<extra></extra>",
    }


def _over(each: Format, low: int, high: int) -> dict[str, Any]:
    """The ends of a format's window among unscaled gradients: a scale moves them to the left."""
    shift = math.log2(each.scale)
    moved = [edge - shift for edge in each.edges]
    bands = [
        {**band, "x0": _neat(band["x0"] - shift), "x1": _neat(band["x1"] - shift)}
        for band in _bands(each, None, row=0)
    ]
    # The window at scale 1 shows how far the scale moves it, but not at the price of the modules.
    left, right = _reaching(low, high, moved)
    return {
        "bands": bands,
        "before": [_neat(edge) for edge in each.edges] if shift else [],
        "range": [left, right],
    }


# --- numbers ---------------------------------------------------------------------------------


def _bins(made: Histogram) -> Iterator[tuple[int, int]]:
    return ((made.first + i, each) for i, each in enumerate(made.counts) if each)


def _added(bins: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    counts: dict[int, int] = {}
    for at, each in bins:
        counts[at] = counts.get(at, 0) + each
    return sorted(counts.items())


def _shown(histograms: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int]:
    """From where to where there are values: the outermost of all histograms, without thin tails."""
    low, high = [], []
    for bins in histograms:
        total = sum(each for _, each in bins)
        below = 0
        for at, each in sorted(bins):
            below += each
            if below > TAIL * total:
                low.append(at)
                break
        if bins:
            high.append(max(bins)[0] + 1)
    return (min(low), max(high)) if low else (-24, 0)


def _reaching(low: float, high: float, edges: Sequence[float]) -> tuple[float, float]:
    """A range with all values in it, and with those ends of the window that are not far off."""
    left = min([low, *(edge for edge in edges if low - REACH < edge)])
    right = max([high, *(edge for edge in edges if edge < high + REACH)])
    margin = 0.08 * (right - left)
    return _neat(left - margin), _neat(right + margin)


def _left_out(spread: dict[str, Histogram | None]) -> str:
    there = [made for made in spread.values() if made is not None]
    zeros = sum(made.zeros for made in there)
    bad = sum(made.nonfinite for made in there)
    everything = sum(made.total for made in there) + zeros + bad
    words = []
    if zeros:
        words.append(f"{percent(zeros / everything)} of the values are exactly zero")
    if bad:
        words.append(f"{count(bad, 'value')} {'is' if bad == 1 else 'are'} NaN or Inf")
    return f"{' and '.join(words)}; they are not drawn." if words else ""


def _exponents() -> dict[str, Any]:
    return {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d"}


def _initials(name: str) -> str:
    """A module's name for a narrow window: ``blocks.0.attention.qkv`` is ``b.0.a.qkv``."""
    *path, last = name.split(".")
    kept = [part if part.isdigit() else part[:1] for part in path]
    return shortened(".".join([*kept, last]), SHORT_LABEL)


def _between(exponent: int) -> str:
    return f"2<sup>{exponent}</sup> to 2<sup>{exponent + 1}</sup>"


def _raised(words: str) -> str:
    base, _, exponent = words.partition("^")
    return f"{base}<sup>{exponent}</sup>" if exponent else words


def _neat(value: float) -> float:
    return float(f"{value:.6g}")
