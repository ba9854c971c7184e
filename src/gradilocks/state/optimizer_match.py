"""Which of the optimizers in a checkpoint an optimizer is, by its parameters.

An optimizer that a scaler meets has no name. What was saved of it carries the names and shapes of
its parameters, and these are compared with those of whoever comes. Names tell certainly, if there
is a model or the optimizer was given them. Places and shapes tell as long as only one fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradilocks.names import Names, called_alike, is_unnamed
from gradilocks.step.table import every_parameter

__all__ = ["FIELDS", "fits_signature", "places_of", "signature_of"]

FIELDS = ("names", "sizes", "shapes", "groups")
"""What a signature has. A checkpoint of before has names and sizes alone."""


def signature_of(optimizer: Any, names: Names) -> dict[str, Any]:
    """The parameters of an optimizer in plain values, and how many groups it has."""
    params = list(every_parameter([optimizer]))
    return {
        "names": names.of(params),
        "sizes": [param.numel() for param in params],
        "shapes": [list(param.shape) for param in params],
        "groups": len(optimizer.param_groups),
    }


def fits_signature(saved: Mapping[str, Any]) -> bool:
    """Whether `saved` has what `signature_of` returns, or what it returned before."""
    names, sizes = saved.get("names"), saved.get("sizes")
    shapes, groups = saved.get("shapes", []), saved.get("groups", 0)
    if not all(isinstance(each, list) for each in (names, sizes, shapes)):
        return False
    assert names is not None
    assert sizes is not None
    whole = isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0
    named = all(isinstance(name, str) for name in names)
    return whole and named and len(names) == len(sizes) == len(shapes or names)


def places_of(mine: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of those in `saved` that may be of these parameters: of none, one or several.

    Args:
        mine: from `signature_of`.
        saved: signatures of a checkpoint.
    """
    alike = [place for place, state in enumerate(saved) if state["sizes"] == mine["sizes"]]
    if not any(map(is_unnamed, mine["names"])):
        named = [place for place in alike if saved[place]["names"] == mine["names"]]
        if named:
            return named
    return [place for place in alike if _may_be(mine, saved[place])]


def _may_be(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether these may be the same parameters, of which not all are named on both sides."""
    shapes = saved.get("shapes")
    if shapes is not None and list(map(list, shapes)) != mine["shapes"]:
        return False
    pairs = list(zip(mine["names"], saved["names"], strict=True))
    agree = all(one == other or is_unnamed(one) or is_unnamed(other) for one, other in pairs)
    return agree or called_alike(mine["names"], saved["names"])
