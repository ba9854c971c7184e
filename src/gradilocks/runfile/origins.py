"""A step with NaN or Inf enters; what its own record shows of where they arose leaves. Pure.

Backward carries a NaN to every layer before the one where it arose, so the culprit that stands last
in the model is nearest to that place. That holds only if the loss was finite: one that was not
makes all gradients bad, wherever in forward it turned so. And it holds for the first bad step
alone: once such a step has gone into the weights, all that follows comes from them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gradilocks.runfile.records import Step
from gradilocks.runfile.writing import MOST_CULPRITS

__all__ = ["FORWARD_OR_LOSS", "Origin", "is_bad", "origin_of"]

FORWARD_OR_LOSS = "forward or loss, module unknown"


class Origin(NamedTuple):
    """Where the NaN or Inf of one step arose, as far as it is known; never certain."""

    where: Literal["forward", "backward", "parameter", "unknown"]
    """'forward': before backward began, in forward or the loss. 'parameter': likely in backward, at
    `name` or between it and `after`. 'backward': likely in backward, before it reached any
    parameter or at the first. 'unknown': nothing tells."""
    name: str = ""
    after: str = ""
    """The next parameter whose gradient is finite; '' if it is not known."""


def is_bad(step: Step) -> bool:
    """Whether a step had NaN or Inf, in its gradients or in its loss."""
    return step.nan + step.inf > 0 or bool(step.loss_nonfinite)


def origin_of(step: Step, *, lost: bool = False, parameters: int = 0) -> Origin:
    """Says where the NaN or Inf of a step arose, if the weights were good before it.

    Args:
        step: the step.
        lost: whether its loss was NaN or Inf by what the rest of its run shows; for older files,
            which do not say so themselves.
        parameters: how many its optimizer has; for older files too.
    """
    if step.loss_nonfinite or (lost and step.loss is None):
        return Origin("forward")
    if not step.culprits:
        return Origin("unknown")
    first, after = step.culprits[0].name, step.finite_after
    if after is None and step.loss_nonfinite is not None:
        return Origin("unknown")  # The order of the parameters tells nothing.
    if after is None:  # An older file: some of the gradients were bad, or all, or the loss.
        some = step.loss is not None and len(step.culprits) < min(parameters, MOST_CULPRITS)
        return Origin("parameter", first) if some else _at_the_end(step)
    return Origin("parameter", first, after) if after else _at_the_end(step)


def _at_the_end(step: Step) -> Origin:
    """Not even the first gradient that backward makes was finite."""
    if step.loss is None:
        return Origin("unknown")
    return Origin("backward")
