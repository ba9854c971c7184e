"""Errors raised by Gradilocks.

    GradilocksError
    ├── BadState            (ValueError)    a state_dict that does not fit; nothing was loaded
    ├── NoGradients         (RuntimeError)  step() while no parameter has a gradient
    ├── NonFiniteGradient   (RuntimeError)  a step was skipped and on_nonfinite is "raise"
    │   └── NeverFinite                     give_up_after steps in a row were non-finite
    ├── ScaleMisuse         (RuntimeError)  gradients that were never scaled, or unscaled twice
    ├── SharedParameter     (ValueError)    a parameter in two groups or optimizers, which would update it twice
    ├── OutcomeExpired      (RuntimeError)  an Outcome was read after its numbers were overwritten
    ├── RanksDiffer         (RuntimeError)  ranks disagree on settings, scale or step
    └── ReplicasDiffer      (RuntimeError)  replicas no longer hold identical bits

A wrong argument is a plain ValueError or TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BadState",
    "GradilocksError",
    "NeverFinite",
    "NoGradients",
    "NonFiniteGradient",
    "OutcomeExpired",
    "RanksDiffer",
    "ReplicasDiffer",
    "ScaleMisuse",
    "SharedParameter",
]


class GradilocksError(Exception):
    """Base class of all Gradilocks errors."""


class BadState(GradilocksError, ValueError):
    """A state_dict with a missing key, an impossible value, or the state of another policy."""


class NoGradients(GradilocksError, RuntimeError):
    """A step was requested while no parameter has a gradient."""


class ScaleMisuse(GradilocksError, RuntimeError):
    """Gradients that do not come from a scaled loss, or that would be unscaled twice."""


class SharedParameter(GradilocksError, ValueError):
    """A parameter listed in two groups or optimizers, which would update it twice."""


class OutcomeExpired(GradilocksError, RuntimeError):
    """The numbers of an Outcome were overwritten: the device keeps only those of the most recent steps."""


class RanksDiffer(GradilocksError, RuntimeError):
    """Ranks that must decide together have different settings, scales or step counts."""


class ReplicasDiffer(GradilocksError, RuntimeError):
    """Tensors that should be replicas hold different values.

    Attributes:
        tensors: names of the tensors that differ.
        ranks: for the first of them, the groups of ranks that agree with each other.
    """

    def __init__(self, message: str, *, tensors: Sequence[str] = (), ranks: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)
        self.ranks = tuple(ranks)


class NonFiniteGradient(GradilocksError, RuntimeError):
    """A gradient contained NaN or Inf. Parameters and optimizer state are unchanged.

    Attributes:
        culprits: names of the parameters with non-finite gradients, in backward order.
    """

    def __init__(self, message: str, *, culprits: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)


class NeverFinite(NonFiniteGradient):
    """`give_up_after` consecutive steps were non-finite."""
