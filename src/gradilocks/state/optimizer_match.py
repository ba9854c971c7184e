"""Which of the optimizers in a checkpoint an optimizer is, by its parameters.

An optimizer that a scaler meets has no name. What was saved of it carries the names and shapes of
its parameters, and these are compared with those of whoever comes. Names tell certainly, if there
is a model or the optimizer was given them. Places and shapes tell as long as only one fits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gradilocks.names import Names, called_alike, is_unnamed
from gradilocks.step.table import every_parameter

__all__ = [
    "FIELDS",
    "fits_signature",
    "known_places",
    "may_be_as_well",
    "places_of",
    "signature_of",
    "tell_of_a_stranger",
]

_logger = logging.getLogger("gradilocks")

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
    plain = all(isinstance(name, str) for name in names)
    plain = plain and all(isinstance(size, int) for size in sizes)
    plain = plain and all(isinstance(shape, (list, tuple)) for shape in shapes)
    return whole and plain and len(names) == len(sizes) == len(shapes or names)


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
    found = [place for place in alike if _may_be(mine, saved[place])]
    if found:
        return found
    within = [place for place, state in enumerate(saved) if _by_name(mine, state) is not None]
    return within if len(within) == 1 else []  # Of several, it is none of them made larger.


def known_places(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> Sequence[int] | None:
    """The places, among these parameters, of those in `saved`; None if that cannot be told.

    Args:
        mine: from `signature_of`.
        saved: a signature of a checkpoint, which may be of fewer parameters.
    """
    by_name = _by_name(mine, saved)
    if by_name is not None:
        return by_name
    alike = saved["sizes"] == mine["sizes"] and _may_be(mine, saved)
    return range(len(mine["names"])) if alike else None


def may_be_as_well(
    mine: Mapping[str, Any], saved: Mapping[str, Any], holder: Mapping[str, Any]
) -> bool:
    """Whether `saved`, which another optimizer was given, may as well be of these parameters.

    Then it was a guess that it is the other's, unless names have told.

    Args:
        mine: from `signature_of`.
        saved: a signature of a checkpoint.
        holder: of the optimizer that was given it.
    """
    if _by_name(holder, saved) is not None and _by_name(mine, saved) is None:
        return False
    return len(places_of(mine, [saved])) > 0


def _by_name(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[int] | None:
    """Where each of `saved` is among these parameters, in any order and among any others.

    None if one is not there, or has no name: its place is another's as soon as one comes before it.
    """
    at = {name: place for place, name in enumerate(mine["names"])}
    names, key = saved["names"], "sizes" if saved.get("shapes") is None else "shapes"
    if not names or any(is_unnamed(name) or name not in at for name in names):
        return None
    places = [at[name] for name in names]
    same = [mine[key][place] for place in places] == _plain(saved[key])
    return places if same and len(set(places)) == len(places) else None


def _may_be(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether these may be the same parameters, of which not all are named on both sides."""
    shapes = saved.get("shapes")
    if shapes is not None and _plain(shapes) != mine["shapes"]:
        return False
    pairs = list(zip(mine["names"], saved["names"], strict=True))
    agree = all(one == other or is_unnamed(one) or is_unnamed(other) for one, other in pairs)
    return agree or called_alike(mine["names"], saved["names"])


def _plain(sizes: Sequence[Any]) -> list[Any]:
    """Numbers, or shapes as lists, which they may have been saved otherwise."""
    return [size if isinstance(size, int) else list(size) for size in sizes]


def tell_of_a_stranger(mine: Mapping[str, Any], policy_name: str, owner: str) -> None:
    """Says, in the log, that a clip policy has learned nothing of an optimizer in a checkpoint.

    Args:
        mine: from `signature_of`.
        policy_name: of the clip policy.
        owner: the class of what has loaded the checkpoint.
    """
    _logger.warning(
        "%s starts afresh for an optimizer of %d parameters (%s, ...): the state_dict that was "
        "loaded does not know it. Parameters that were added since are told from the others by "
        "their names, %s(model=...).",
        policy_name,
        len(mine["names"]),
        ", ".join(mine["names"][:1]),
        owner,
    )
