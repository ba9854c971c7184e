"""Everything Gradilocks raises on its own account.

    GradilocksError
    ├── BadState            (ValueError)    a state_dict that does not fit; nothing was loaded
    │   └── MissingKey      (KeyError)      one that lacks a key
    ├── NoGradients         (RuntimeError)  step() with nothing to step on
    ├── NonFiniteGradient   (RuntimeError)  a step was skipped and the caller asked to be told
    │   └── NeverFinite                     so many in a row that training is going nowhere
    ├── ScaleMisuse         (RuntimeError)  gradients that were scaled never, or twice
    ├── SharedParameter     (ValueError)    one parameter in two places that would both change it
    ├── ReplicasDiffer      (RuntimeError)  ranks that should hold the same no longer do
    ├── BadRunFile          (ValueError)    a file that is no run file, or cannot be read or written
    ├── MissingPackage      (ImportError)   a package that this one thing needs is not installed
    └── BadScript           (ValueError)    what `gradilocks run` was given cannot be run

A wrong argument is a plain ValueError or TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BadRunFile",
    "BadScript",
    "BadState",
    "GradilocksError",
    "MissingKey",
    "MissingPackage",
    "NeverFinite",
    "NoGradients",
    "NonFiniteGradient",
    "ReplicasDiffer",
    "ScaleMisuse",
    "SharedParameter",
]


class GradilocksError(Exception):
    """The root of all of them."""


class BadState(GradilocksError, ValueError):
    """A state_dict of another version or policy, or one with a missing or impossible value."""


class MissingKey(BadState, KeyError):
    """A state_dict without a key that it must have; a KeyError too, as torch raises there."""

    def __str__(self) -> str:  # KeyError would show the message in quotes.
        return str(self.args[0])


class NoGradients(GradilocksError, RuntimeError):
    """A step was asked for and no parameter has a gradient."""


class ScaleMisuse(GradilocksError, RuntimeError):
    """Gradients that were not made from a scaled loss, or that would be unscaled twice."""


class SharedParameter(GradilocksError, ValueError):
    """One parameter listed where each listing would change it once."""


class ReplicasDiffer(GradilocksError, RuntimeError):
    """Tensors that several ranks hold alike have different norms there.

    Attributes:
        step: the number of the step at which it was noticed.
        tensors: which ones, parameters before gradients.
        ranks: of the first of them, the ranks that agree with each other.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        tensors: Sequence[str],
        ranks: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(message)
        self.step = step
        self.tensors = tuple(tensors)
        self.ranks = tuple(ranks)


class BadRunFile(GradilocksError, ValueError):
    """A file that is no run file, is damaged, or cannot be read or written."""


class MissingPackage(GradilocksError, ImportError):
    """Something that needs a package which is not installed; says how to install it."""


class BadScript(GradilocksError, ValueError):
    """What `gradilocks run` was to run is missing, or no Python."""


class NonFiniteGradient(GradilocksError, RuntimeError):
    """A step had a NaN or Inf gradient. Parameters and optimizer state are as they were.

    Attributes:
        culprits: names of the parameters with non-finite gradients, in backward order.
    """

    def __init__(self, message: str, *, culprits: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)


class NeverFinite(NonFiniteGradient):
    """`give_up_after` steps in a row were non-finite.

    Attributes:
        culprits: as in `NonFiniteGradient`, of the last step.
        in_a_row: how many steps that were.
        scales: the scale in force at each of them, oldest first; of the last 1,000 if there were
            more, or of fewer where a checkpoint did not have them: `in_a_row` tells.
        curable: whether a smaller scale could still bring finite gradients. True if NaN and Inf
            became fewer as the scale fell; False if the loss itself was NaN or Inf at every step,
            or the scale has fallen to 2^-24, where float16 has room for gradients of 10^12; None
            if it is not known, as long as an overflow and a division by zero look alike.
    """

    def __init__(
        self,
        message: str,
        *,
        culprits: Sequence[str] = (),
        scales: Sequence[float] = (),
        curable: bool | None = None,
        in_a_row: int | None = None,
    ) -> None:
        super().__init__(message, culprits=culprits)
        self.scales = tuple(scales)
        self.curable = curable
        self.in_a_row = len(self.scales) if in_a_row is None else in_a_row
