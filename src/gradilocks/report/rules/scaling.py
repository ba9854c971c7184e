"""The loss scale: at one of its bounds, or falling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from gradilocks.report.rules.skipping import SETTLING
from gradilocks.report.tracks import Track, middle
from gradilocks.report.values import Finding
from gradilocks.report.words import percent, power
from gradilocks.runfile import Run

# A scale that touches a bound and leaves it again did its work; half of the run is another matter.
STUCK = 0.5
# Six halvings between the first and the last quarter. A dynamic scale moves up and down by a few.
FALLEN = 64.0
# Fewer steps are too few for quarters.
ENOUGH = 100


def scaling(run: Run, track: Track) -> Iterator[Finding]:
    """Judges where the scale went once it had settled."""
    scale = [value for value in track.scale[SETTLING:] if not math.isnan(value)]
    if len(scale) < ENOUGH or max(scale) == min(scale) == track.scale[0]:
        return  # No scale, a static one, or too short to tell.
    lowest, highest = _bound(run, "min_scale"), _bound(run, "max_scale")
    stuck_low = sum(value <= max(1.0, lowest or 0.0) for value in scale) / len(scale)
    stuck_high = sum(value > highest / 2 for value in scale) / len(scale) if highest else 0.0
    lost = set(track.lost)
    # Each step with a NaN loss halves the scale too, and for nothing.
    in_vain = sum(place in lost for place in track.skipped) > len(track.skipped) / 2
    if stuck_low >= STUCK:
        bound = power(max(1.0, lowest or 0.0))
        yield Finding(
            "scale-stuck-low",
            "problem",
            f"The scale was {bound} or less for {percent(stuck_low)} of the run",
            "It was halved whenever the loss itself was NaN or Inf: mend that, and it recovers."
            if in_vain
            else "Nothing is amplified any more, and still gradients overflow. Something in the "
            "model is too large by itself: lower the learning rate, look at the inputs' size, or "
            "train in bfloat16.",
            {"share": stuck_low, "last scale": scale[-1]},
        )
        return
    if stuck_high >= STUCK and highest:
        yield Finding(
            "scale-stuck-high",
            "note",
            f"The scale was at its upper bound for {percent(stuck_high)} of the run",
            f"It may not grow past {power(highest)}. The gradients would bear more; if many "
            "are zero (see the plot of zeros), raise max_scale.",
            {"share": stuck_high, "max_scale": highest},
        )
    quarter = len(scale) // 4
    before, after = middle(scale[:quarter]), middle(scale[-quarter:])
    if before >= FALLEN * after and not in_vain:
        yield Finding(
            "scale-falling",
            "warning",
            f"The scale fell from {power(before)} to {power(after)}",
            "Gradients, or activations on their way, grow as training goes on. If it goes on "
            "falling the small gradients will be rounded to zero: look for a layer whose norm "
            "rises in the heat map.",
            {"first quarter": before, "last quarter": after},
        )


def _bound(run: Run, name: str) -> float | None:
    """A bound of the scale policy, from its text in the header; None if that has none."""
    found = re.search(rf"\b{name}=([-+.\deE]+)", str(run.header.settings.get("scale", "")))
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
