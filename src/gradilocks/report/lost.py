"""Losses and the steps with bad gradients → where the loss itself was NaN or Inf.

A run file has nothing in place of a loss that was not finite, and nothing in place of one that
nobody knew. Which of them it was is decided here, once for everybody. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

__all__ = ["lost_for_good", "lost_places"]

# A loss that is missing at so many of the steps whose gradients were well is one that nobody knew.
UNKNOWN = 0.1
# Where a loss that was known at nearly every step before is missing, it is not finite.
KNOWN = 0.9
# One or two steps at the end may be skipped, and the next is well again.
SHORTEST = 5


def lost_places(loss: Sequence[float], nonfinite: Collection[int]) -> list[int]:
    """Returns the places of the steps whose loss was itself NaN or Inf.

    It was, where it is missing and the gradients were not finite either, in a run that else knows
    its loss, or that is nothing but such steps.

    Args:
        loss: of each step; NaN where it is missing.
        nonfinite: places of the steps with NaN or Inf among the gradients.
    """
    missing = [place for place, value in enumerate(loss) if math.isnan(value)]
    bad = set(nonfinite)
    unknown = sum(place not in bad for place in missing)
    # A loss overflows one step before the gradients do.
    least = 1 if len(missing) < len(loss) else 0
    if unknown > max(least, UNKNOWN * (len(loss) - len(bad))):
        return []
    return [place for place in missing if place in bad]


def lost_for_good(loss: Sequence[float], lost: Collection[int]) -> int | None:
    """Returns the place from which on the loss was never finite again; None if it ended well.

    Args:
        loss: of each step; NaN where it is missing.
        lost: as `lost_places` returns it.
    """
    here = set(lost)
    since = len(loss)
    while since and math.isnan(loss[since - 1]):
        since -= 1
    gone = len(loss) - since
    known = sum(not math.isnan(value) for value in loss[:since])
    usual = known >= SHORTEST and known >= KNOWN * since
    both = bool(here) and sum(place not in here for place in range(since, len(loss))) <= 1
    enough = gone >= SHORTEST or (gone > 0 and since == 0)
    return since if enough and (usual or both) else None
