"""A step with NaN or Inf enters; what its own record shows of where they arose leaves. Pure.

Backward carries a NaN to every layer before the one where it arose, so the culprit that stands last
in the model is nearest to that place. That is said only if the loss was finite: one that was not
may make any gradient bad, wherever in forward it turned so. Only if the gradients are bad from that
culprit back to the first layer and finite behind it, else the model runs in another order than it
is defined in. And only of the first bad step: once such a step has gone into the weights, all that
follows comes from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from gradilocks.runfile.bad_steps import has_bad_gradients
from gradilocks.runfile.records import Step

__all__ = ["FORWARD_OR_LOSS", "Origin", "beside", "is_bad", "origin_of"]

FORWARD_OR_LOSS = "forward or loss, module unknown"


class Origin(NamedTuple):
    """Where the NaN or Inf of one step arose, as far as it is known; never certain."""

    where: Literal["forward", "backward", "parameter", "unknown"]
    """'forward': before backward began, in forward or the loss. 'parameter': likely in backward, at
    `name` or between it and `after`. 'backward': likely in backward, before it reached any
    parameter of the optimizer. 'unknown': nothing tells."""
    name: str = ""
    after: str = ""
    """The next parameter whose gradient is finite; '' if there is none, or it is not known."""


def is_bad(step: Step) -> bool:
    """Whether a step had NaN or Inf, in its gradients or in its loss."""
    return has_bad_gradients(step) or bool(step.loss_nonfinite)


def origin_of(step: Step, *, lost: bool = False, others: Iterable[Step] = ()) -> Origin:
    """Says where the NaN or Inf of a step arose, if the weights were good before it.

    Args:
        step: the step.
        lost: whether its loss was NaN or Inf by what the rest of its run shows; for older files,
            which do not say so themselves.
        others: the steps of other optimizers after the same backward pass.
    """
    if step.loss_nonfinite or (lost and step.loss is None):
        return Origin("forward")
    if step.loss is None or not step.culprits or step.finite_gradients is None:
        return Origin("unknown")
    if step.finite_gradients == 0:
        # In the order of layers, those of another optimizer may lie behind.
        every = all(other.culprits and other.finite_gradients == 0 for other in others)
        return Origin("backward") if every else Origin("unknown")
    if any(map(has_bad_gradients, others)):
        return Origin("unknown")
    if len(step.culprits) == 1 or step.finite_after is not None:
        return Origin("parameter", step.culprits[0].name, step.finite_after or "")
    return Origin("unknown")


def beside(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """For each step of a run: the steps, it too, of all optimizers after the same backward pass.

    They follow each other, and their loss is one.
    """
    group: list[Step] = []
    for step in steps:
        if group and not _together(group, step):
            yield from [group] * len(group)
            group = []
        group.append(step)
    yield from [group] * len(group)


def _together(group: Sequence[Step], step: Step) -> bool:
    first = group[0]
    alike = first.loss == step.loss and first.loss_nonfinite == step.loss_nonfinite
    return alike and all(each.optimizer != step.optimizer for each in group)
