"""Optimizer state that tells of its changes, so that a step need not look for them.

A plan has sent the addresses of the state's tensors to the device. Whoever puts another tensor into
the state (loads it, offloads it, resets it) must be noticed before the next step, and looking into
2,000 dictionaries at every step would take as long as the rest of it. The plan also lets go of the
tensors at once: offloading is done to free their memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, Protocol

__all__ = ["Changes", "Entries", "Listener", "States", "plain"]


class Changes:
    """Tells one listener of a change to the state of one optimizer."""

    def __init__(self) -> None:
        self._listener: weakref.ref[Listener] | None = None

    def tell(self, listener: Listener) -> None:
        """From now on tells `listener` alone. Weakly: it may hold the state that tells it."""
        self._listener = weakref.ref(listener)

    def note(self) -> None:
        """Something is about to change."""
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            self._listener = None
            listener.drop()


class Listener(Protocol):
    """Who has to let go of the state's tensors when one of them may be replaced."""

    def drop(self) -> None:
        """Called once, before the change."""


def _telling(name: str, base: type) -> Any:
    method = getattr(base, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.note()
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
        watched = {
            key: Entries(changes, entries) if type(entries) in (dict, Entries) else entries
            for key, entries in states.items()
        }
        super().__init__(dict, watched)

    def __missing__(self, key: Any) -> Entries:
        entries = Entries(self.changes, {})
        self[key] = entries
        return entries

    def watch(self, key: Any) -> Entries:
        """The state of one parameter, watched from here on."""
        entries = self[key]
        if type(entries) is not Entries or entries.changes is not self.changes:
            entries = Entries(self.changes, entries)
            self[key] = entries
        return entries

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def copy(self) -> Any:
        """A plain one, that nobody watches."""
        return defaultdict(dict, self)

    __copy__ = copy


for _name in _WRITES:
    setattr(Entries, _name, _telling(_name, dict))
    setattr(States, _name, _telling(_name, defaultdict))


def plain(states: dict[Any, Any]) -> dict[Any, Any]:
    """The same as dictionaries that a checkpoint may hold, without the empty ones."""
    return {
        key: dict(entries) if isinstance(entries, Entries) else entries
        for key, entries in states.items()
        if not isinstance(entries, Entries) or entries
    }
