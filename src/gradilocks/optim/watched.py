"""Optimizer state that counts its changes, so that a step need not look for them.

A plan has sent the addresses of the state's tensors to the device. Whoever puts another tensor into
the state (loads it, offloads it, resets it) must be noticed before the next step, and looking into
2,000 dictionaries at every step would take as long as the rest of it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

__all__ = ["Changes", "Entries", "States", "plain"]


class Changes:
    """How often the state of one optimizer has been changed."""

    def __init__(self) -> None:
        self.count = 0


def _counting(name: str, base: type) -> Any:
    method = getattr(base, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.count += 1
        return method(self, *args, **kwargs)

    return changed


_WRITES = (
    "__setitem__",
    "__delitem__",
    "__ior__",
    "clear",
    "pop",
    "popitem",
    "setdefault",
    "update",
)


class Entries(dict[str, Any]):
    """The state of one parameter."""

    def __init__(self, changes: Changes, entries: dict[str, Any]) -> None:
        self.changes = changes
        super().__init__(entries)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class States(defaultdict[Any, Any]):
    """The state of all parameters."""

    def __init__(self, changes: Changes, states: dict[Any, Any]) -> None:
        self.changes = changes
        super().__init__(dict, states)

    def __missing__(self, key: Any) -> Entries:
        entries = Entries(self.changes, {})
        self[key] = entries
        return entries

    def watch(self, key: Any) -> Entries:
        """The state of one parameter, watched from here on."""
        entries = self[key]
        if type(entries) is not Entries:
            entries = Entries(self.changes, entries)
            self[key] = entries
        return entries

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


for _name in (*_WRITES, "update"):
    setattr(Entries, _name, _counting(_name, dict))
    setattr(States, _name, _counting(_name, defaultdict))


def plain(states: dict[Any, Any]) -> dict[Any, Any]:
    """The same as dictionaries that a checkpoint may hold."""
    return {
        key: dict(entries) if isinstance(entries, Entries) else entries
        for key, entries in states.items()
    }
