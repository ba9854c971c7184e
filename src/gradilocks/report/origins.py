"""Bad steps of a Track → what they tell of where the NaN or Inf arose, in words.

Only steps before which nothing bad had gone into the weights are asked. What they say is "likely"
at most; where they say nothing, the sentence says that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradilocks.report.tracks import ANOTHERS, Track
from gradilocks.report.words import clean, count, listed
from gradilocks.runfile import FORWARD_OR_LOSS, Origin, origin_of

__all__ = ["by_trace", "fresh", "likely", "where_it_arose"]


def fresh(track: Track, places: Sequence[int]) -> list[int]:
    """Those of the steps before which no NaN or Inf had gone into any weights."""
    return [place for place in places if not track.aftermath[place]]


def likely(track: Track, places: Sequence[int]) -> str | None:
    """The parameter at which it likely arose, if the steps agree on one more often than not."""
    found = _origins(track, places)
    names = Counter(origin.name for origin in found if origin.where == "parameter")
    name, times = names.most_common(1)[0] if names else ("", 0)
    return name if 2 * times > len(found) else None


def where_it_arose(track: Track, places: Sequence[int]) -> str:
    """One or two sentences, each with a space behind it; '' for no steps."""
    if not places:
        return ""
    asked = fresh(track, places)
    if not asked:
        whose = "another optimizer's" if track.aftermath[places[0]] == ANOTHERS else "the"
        return (
            f"NaN or Inf had gone into {whose} weights before, so whether this is a new fault is "
            "not known. "
        )
    found = _origins(track, asked)
    kinds = Counter(origin.where for origin in found)
    if kinds["forward"] == len(found):
        whose = FORWARD_OR_LOSS if track.found.isdisjoint(asked) else "see what the trace found"
        return (
            "The loss itself was NaN or Inf, so the gradients do not tell where that arose: "
            f"{whose}. "
        )
    each = " each time" if len(found) > 1 else ""
    if kinds["backward"] == len(found):
        return (
            f"The loss was finite and none of the gradients was{each}: likely it arose before "
            "backward reached these parameters, in the loss or in a layer behind them. "
        )
    if not kinds["parameter"]:
        return "The gradients do not tell where it arose. "
    return _by_name(found)


def by_trace(track: Track, places: Sequence[int]) -> str:
    """What would tell the module, in a sentence; in a traced run, why the trace did not."""
    if not track.found.isdisjoint(places):
        return "What the trace found is told apart."
    if track.traced:
        return (
            "A trace was on, but it begins after the first bad step: to see a fault that comes "
            "once, arm one by hand before that step (docs/finding-the-culprit.md)."
        )
    return (
        "Under a scaler or a GradientControl, which skip the step, `gradilocks run --trace` names "
        "the module if it comes back."
    )


def _by_name(found: Sequence[Origin]) -> str:
    named = [origin for origin in found if origin.where == "parameter"]
    names = Counter(origin.name for origin in named).most_common()
    first, times = names[0]
    rest = len(found) - len(named)
    unclear = f" {count(rest, 'other step')} did not tell." if rest else ""
    if len(names) == 1 and len(named) == 1 and named[0].after:
        return (
            f"Likely it arose in backward at {clean(first)}, or between it and "
            f"{clean(named[0].after)}, the next whose gradient is finite, if layers run in the "
            f"order in which they are defined.{unclear} "
        )
    if len(names) == 1:
        each = " each time" if len(named) > 1 and not rest else ""
        return f"Likely it arose in backward at {clean(first)} or just after it{each}.{unclear} "
    others = listed([name for name, _ in names[1:]])
    return (
        f"Likely it arose in backward at {clean(first)} or just after it ({count(times, 'time')}), "
        f"else at {others}.{unclear} "
    )


def _origins(track: Track, places: Sequence[int]) -> list[Origin]:
    lost = set(track.lost)
    return [
        origin_of(track.steps[place], lost=place in lost, others=track.others.get(place, ()))
        for place in fresh(track, places)
    ]
