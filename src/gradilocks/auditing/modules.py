"""The gradients of one module, counted; data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gradilocks.auditing.histogram import Histogram

__all__ = ["ModuleGradients"]


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

    @cached_property
    def together(self) -> Histogram:
        """Both."""
        return Histogram.total(h for h in (self.parameters, self.activations) if h is not None)
