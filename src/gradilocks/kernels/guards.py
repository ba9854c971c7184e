"""What a step depended on, said as comparisons: by identity, made all at once by C++.

Whoever takes part in a step that is to be taken again says of itself what must be as it was: an
attribute that is still the same object, an entry of a dictionary, a container that is still empty.
`cpp/step_watch.h` makes the comparisons, some thirty in 2 us, where each owner asked by a
method of its own takes a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Guard", "attribute", "empty", "item", "item_not_held"]

Guard = tuple[int, Any, Any, Any]
"""Its kind, as step_watch.h counts them; whose; what; and the object that is expected."""


def attribute(owner: object, *names: str) -> list[Guard]:
    """Each of these attributes is the very object that it is now."""
    return [(0, owner, name, getattr(owner, name)) for name in names]


def item(owner: Mapping[Any, Any], *keys: Any) -> list[Guard]:
    """Under each of these keys of a dictionary stands what stands there now; None for nothing."""
    return [(1, owner, key, owner.get(key)) for key in keys]


def empty(*containers: object) -> list[Guard]:
    """Each of them is empty."""
    return [(2, container, None, None) for container in containers]


def item_not_held(owner: Mapping[Any, Any], key: Any) -> list[Guard]:
    """As `item`, of an object that somebody else holds as long as this is asked."""
    return [(3, owner, key, id(owner[key]))]
