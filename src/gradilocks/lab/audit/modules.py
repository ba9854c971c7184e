"""The gradients of one module, counted; data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradilocks.lab.audit.histogram import Histogram

__all__ = ["ModuleGradients", "Outputs"]


@dataclass(frozen=True)
class Outputs:
    """How large what a module returned was, and who took it."""

    largest: float
    """The largest finite magnitude."""
    nonfinite: int = 0
    takers: tuple[str, ...] = ()
    """The modules that computed with it, and so compute its gradient."""

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**vars(self), "takers": list(self.takers)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Outputs:
        """The inverse of `to_plain`."""
        return cls(
            float(plain["largest"]), int(plain["nonfinite"]), tuple(map(str, plain["takers"]))
        )


@dataclass(frozen=True)
class ModuleGradients:
    """The gradients of one module."""

    name: str
    """As `model.named_modules()` has it; '' is the model itself."""
    kind: str
    """The module's class, as in 'Linear'."""
    parameters: Histogram | None
    """Of its own parameters; None if none had a gradient."""
    activations: Histogram | None
    """Of what it returned; None if that had no gradient."""
    outputs: Outputs | None = None
    """What it returned; None if that was not seen."""

    @cached_property
    def together(self) -> Histogram:
        """Both."""
        return Histogram.total(h for h in (self.parameters, self.activations) if h is not None)
