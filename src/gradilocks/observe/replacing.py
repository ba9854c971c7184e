"""Puts one thing in another's place, wherever modules hold it, and back again."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Replacements"]


class Replacements:
    """Everything that was replaced, so that it can be put back."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._attributes: list[tuple[Any, str, Any, Any]] = []

    def everywhere(self, original: Any, replacement: Any, *, spare: str | None = None) -> None:
        """Every module that holds `original` under any name holds `replacement`.

        Those that import it later get it from where it lives, which is such a module.

        Args:
            original: what is there.
            replacement: what is put in its place.
            spare: the package whose modules keep what they have.
        """
        for place, module in list(sys.modules.items()):
            if spare is not None and place.split(".")[0] == spare:
                continue
            fields = getattr(module, "__dict__", None)
            if type(fields) is dict:
                for name, value in list(fields.items()):
                    if value is original:
                        fields[name] = replacement
                        self._places.append((fields, name, original, replacement))

    def attribute(self, owner: Any, name: str, replacement: Any) -> None:
        """`owner.name` is `replacement`; `owner` has it itself, not by inheritance."""
        self._attributes.append((owner, name, vars(owner)[name], replacement))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Puts everything back, the last first; what the script has changed since stays."""
        for owner, name, original, replacement in reversed(self._attributes):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        for fields, name, original, replacement in reversed(self._places):
            if fields.get(name) is replacement:
                fields[name] = original
        self._attributes, self._places = [], []
