"""Losses and the steps with bad gradients → where the loss itself was NaN or Inf.

A run file has nothing in place of a loss that was not finite, and nothing in place of one that
nobody knew. Newer files tell which; of older ones it is decided here, once for everybody. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gradilocks.runfile.bad_steps import FOR_GOOD

__all__ = ["lost_for_good", "lost_places"]

# A loss that is missing at so many of the steps whose gradients were well is one that nobody knew.
UNKNOWN = 0.1
# Where a loss that was known at nearly every step before is missing, it is not finite.
KNOWN = 0.9


def lost_places(
    loss: Sequence[float], nonfinite: Collection[int], told: Sequence[bool | None]
) -> list[int]:
    """Returns the places of the steps whose loss was itself NaN or Inf.

    It was, where the step says so. In a file that does not say, it was where it is missing and the
    gradients were not finite either, in a run that else knows its loss, or that is nothing but such
    steps.

    Args:
        loss: of each step; NaN where it is missing.
        nonfinite: places of the steps with NaN or Inf among the gradients.
        told: whether each step says that its loss was NaN or Inf; None where it does not say.
    """
    missing = [place for place, value in enumerate(loss) if math.isnan(value)]
    sure = [place for place in missing if told[place]]
    asked = [place for place in missing if told[place] is None]
    bad = set(nonfinite)
    unknown = sum(place not in bad for place in asked)
    # A loss overflows one step before the gradients do.
    least = 1 if len(asked) < len(loss) else 0
    if unknown > max(least, UNKNOWN * (len(loss) - len(bad))):
        return sure
    return sorted([*sure, *(place for place in asked if place in bad)])


def lost_for_good(
    loss: Sequence[float],
    lost: Collection[int],
    told: Sequence[bool | None],
    taken: Collection[int],
) -> int | None:
    """Returns the place from which on the loss was never finite again; None if it ended well.

    Args:
        loss: of each step; NaN where it is missing.
        lost: as `lost_places` returns it.
        told: as for `lost_places`.
        taken: places of the steps that were taken with NaN or Inf among the gradients.
    """
    here = set(lost)
    if not loss or not math.isnan(loss[-1]):
        return None
    if told[-1] is not None:
        since = len(loss)
        while since and since - 1 in here:
            since -= 1
        gone = len(loss) - since
        # One step that was taken is enough: what it spoilt stays so.
        begin = since
        while begin and begin - 1 in taken:
            begin -= 1
        spoilt = any(place in taken for place in range(begin, len(loss)))
        return since if gone >= FOR_GOOD or (gone and (since == 0 or spoilt)) else None
    since = len(loss)
    while since and math.isnan(loss[since - 1]):
        since -= 1
    gone = len(loss) - since
    known = sum(not math.isnan(value) for value in loss[:since])
    usual = known >= FOR_GOOD and known >= KNOWN * since
    both = bool(here) and sum(place not in here for place in range(since, len(loss))) <= 1
    enough = gone >= FOR_GOOD or (gone > 0 and since == 0)
    return since if enough and (usual or both) else None
