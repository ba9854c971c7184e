"""Steps of a run enter, one by one; which are bad, where that arose, and how the run ended leave.

A step is bad if NaN or Inf is in its gradients or its loss. `origin_of` says where that arose, as
far as one step's record tells. `SpoiltWeights` says whose weights hold NaN or Inf from a bad step
that was taken, and `BadSteps` since when loss and gradients are bad: what `gradilocks run`,
`watch`, `compare` and the report say of how a run stands or ended. Both take room for a few
numbers, however long the run.

Where it arose: backward carries a NaN to every layer before the one where it arose, so the culprit
that stands last in the model is nearest to that place. That is said only if the loss was finite:
one that was not may make any gradient bad, wherever in forward it turned so. Only if the gradients
are bad from that culprit back to the first layer and finite behind it, else the model runs in
another order than it is defined in. And only of the first bad step: once such a step has gone into
the weights, all that follows comes from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from gradilocks.runfile.records import Step

__all__ = [
    "FORWARD_OR_LOSS",
    "FOR_GOOD",
    "BadSteps",
    "Origin",
    "Spoilt",
    "SpoiltWeights",
    "backward_groups",
    "has_bad_gradients",
    "is_bad",
    "is_sound",
    "origin_of",
]

FORWARD_OR_LOSS = "forward or loss, module unknown"

FOR_GOOD = 5
"""Bad steps in a row, if all were skipped, after which that stays; fewer may be bad batches."""

# Older files do not tell a loss that was NaN from one that nobody knew. If it is missing at more
# than this share of the steps with good gradients, nobody knew it.
_UNKNOWN_SHARE = 0.1
# If at least this share of the steps before had one, a missing loss was NaN.
_KNOWN_SHARE = 0.9


def has_bad_gradients(step: Step) -> bool:
    """Whether there was NaN or Inf among its gradients."""
    return step.nan + step.inf > 0


def is_bad(step: Step) -> bool:
    """Whether a step had NaN or Inf, in its gradients or in its loss."""
    return has_bad_gradients(step) or bool(step.loss_nonfinite)


def is_sound(step: Step) -> bool:
    """Whether a step proves that the weights could be used: its gradients and its loss were finite.

    The forward pass ran through the weights. Those that it did not use may be bad all the same.
    """
    return step.norm is not None and not has_bad_gradients(step) and not step.loss_nonfinite


class Origin(NamedTuple):
    """Where the NaN or Inf of one step arose, as far as it is known; never certain."""

    where: Literal["forward", "backward", "parameter", "ranks", "unknown"]
    """'forward': before backward began, in forward or the loss. 'parameter': likely in backward, at
    `name` or between it and `after`. 'ranks': likely in backward, at `name`, which says on which
    ranks, or in what lies behind it in the model. 'backward': likely in backward, before it reached
    any parameter of the optimizer. 'unknown': nothing tells."""
    name: str = ""
    after: str = ""
    """The next parameter whose gradient is finite; '' if there is none, or it is not known."""


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
    if step.loss is None or not step.culprits:
        return Origin("unknown")
    if step.finite_gradients is None:
        # Several ranks: each tells of its first culprit, and of its loss if `loss` is their mean.
        one = bool(step.loss_ranks) and not step.of_rank and len(step.culprits) == 1
        told = one and not any(map(has_bad_gradients, others))
        return Origin("ranks", step.culprits[0].name) if told else Origin("unknown")
    if step.finite_gradients == 0:
        # In the order of layers, those of another optimizer may lie behind.
        every = all(other.culprits and other.finite_gradients == 0 for other in others)
        return Origin("backward") if every else Origin("unknown")
    if any(map(has_bad_gradients, others)):
        return Origin("unknown")
    if len(step.culprits) == 1 or step.finite_after is not None:
        return Origin("parameter", step.culprits[0].name, step.finite_after or "")
    return Origin("unknown")


def backward_groups(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """For each step of a run: the steps of all optimizers after the same backward pass, it too.

    They follow each other, have one loss, and are of different optimizers.
    """
    group: list[Step] = []
    for step in steps:
        if group and (
            (group[0].loss, group[0].loss_nonfinite) != (step.loss, step.loss_nonfinite)
            or any(each.optimizer == step.optimizer for each in group)
        ):
            yield from [group] * len(group)
            group = []
        group.append(step)
    yield from [group] * len(group)


class Spoilt(NamedTuple):
    """The step that put NaN or Inf into the weights of an optimizer."""

    step: int
    surely: bool
    """Whether they were good before it. Its loss was finite then; if it was not, or if nobody knew
    it, a step before may have spoilt them: by its learning rate, or by the optimizer's state."""

    def __str__(self) -> str:
        return f"since step {self.step:,}{'' if self.surely else ' at the latest'}"


class SpoiltWeights:
    """Whose weights have NaN or Inf from a step that was taken, and from which on."""

    def __init__(self) -> None:
        self._by: dict[int, Spoilt] = {}

    def __len__(self) -> int:
        return len(self._by)

    def of(self, optimizer: int) -> Spoilt | None:
        """The step that spoilt this optimizer's weights; None if they are good."""
        return self._by.get(optimizer)

    def describe(self, optimizer: int) -> str:
        """Says of a bad step what went before it: '' if no weights were spoilt."""
        own = self._by.get(optimizer)
        if own is not None:
            return f"NaN or Inf, and the weights are spoilt {own} already"
        if self._by:
            other, spoilt = min(self._by.items())
            return f"NaN or Inf, and the weights of optimizer {other} are spoilt {spoilt} already"
        return ""

    def take(self, step: Step) -> None:
        """The next step, of any optimizer."""
        if has_bad_gradients(step):
            if not step.skipped:
                self._by.setdefault(step.optimizer, Spoilt(step.step, step.loss is not None))
        elif self._by and is_sound(step):
            self._by.pop(step.optimizer, None)

    def forget(self) -> None:
        """Another session begins, from weights of which nothing is known."""
        self._by.clear()


class _Row:
    """Consecutive steps of one kind that reach up to the last step."""

    def __init__(self) -> None:
        self.steps = self.skipped = self.with_bad_gradients = 0
        self.since = 0
        """The number of its first step."""
        self.before = 0
        """How many steps the run had before its first."""

    def take(self, step: Step, *, belongs: bool, before: int) -> None:
        if not belongs:
            self.steps = 0
            return
        if not self.steps:
            self.since, self.before = step.step, before
            self.skipped = self.with_bad_gradients = 0
        self.steps += 1
        self.skipped += step.skipped
        self.with_bad_gradients += has_bad_gradients(step)


class BadSteps:
    """What was NaN or Inf in the steps of one optimizer, and whether it stayed so.

    Attributes:
        taken: how many steps were taken though gradients were NaN or Inf.
        taken_since: the first of them; None if there is none.
        first: the first bad step of those that the run ends in: the one that put NaN or Inf into
            the weights, if one has; None if the last step is good.
        seen: how many steps had NaN or Inf in their gradients or their loss.
        last: the last step's number.
    """

    def __init__(self) -> None:
        self.taken = self.seen = self.last = 0
        self.taken_since: int | None = None
        self.first: Step | None = None
        self._spoilt_weights = SpoiltWeights()
        self._spoilt: Spoilt | None = None
        self._steps = self._with_bad_gradients = self._with_loss = 0
        self._bad_gradients, self._bad_loss = _Row(), _Row()
        # Of older files: steps without a loss that do not say why.
        self._unexplained = _Row()
        self._with_loss_before_unexplained = 0
        self._unexplained_bad = self._unexplained_good = 0  # By their gradients.

    def take(self, step: Step) -> None:
        """The next step."""
        before, self._steps = self._steps, self._steps + 1
        self.last = step.step
        bad = has_bad_gradients(step)
        unexplained = step.loss is None and step.loss_nonfinite is None
        was_spoilt = self._spoilt is not None
        self._spoilt_weights.take(step)
        self._spoilt = self._spoilt_weights.of(step.optimizer)
        self._bad_gradients.take(step, belongs=bad, before=before)
        self._bad_loss.take(step, belongs=bool(step.loss_nonfinite), before=before)
        if not self._unexplained.steps:
            self._with_loss_before_unexplained = self._with_loss
        self._unexplained.take(step, belongs=unexplained, before=before)
        self._with_loss += step.loss is not None
        self._with_bad_gradients += bad
        self._unexplained_bad += unexplained and bad
        self._unexplained_good += unexplained and not bad
        self.seen += is_bad(step)
        if self._spoilt is not None:
            self.first = self.first if was_spoilt else step
        elif not is_bad(step) and not unexplained:
            self.first = None
        elif self.first is None:
            self.first = step
        if bad and not step.skipped:
            self.taken += 1
            self.taken_since = self.taken_since or step.step

    @property
    def guesses_lost(self) -> bool:
        """Of an older file: whether a missing loss beside bad gradients was NaN or Inf.

        It was in a run that else knows its loss, or that is nothing but such steps.
        """
        unexplained = self._unexplained_bad + self._unexplained_good
        # A loss overflows a step before the gradients do.
        least = 1 if unexplained < self._steps else 0
        good = self._steps - self._with_bad_gradients
        return self._unexplained_good <= max(least, _UNKNOWN_SHARE * good)

    @property
    def _without_loss(self) -> _Row | None:
        """The steps up to the last without a finite loss, if it stays so."""
        row = self._bad_loss
        if row.steps:
            enough = row.steps >= FOR_GOOD or row.steps == self._steps
            return row if enough or self._spoilt is not None else None
        row = self._unexplained
        if not row.steps or not (row.steps >= FOR_GOOD or row.before == 0):
            return None
        if self._with_loss_before_unexplained >= max(FOR_GOOD, _KNOWN_SHARE * row.before):
            return row
        guessed = self._unexplained_bad > 0 and self.guesses_lost
        return row if guessed and row.steps - row.with_bad_gradients <= 1 else None

    @property
    def lost_since(self) -> int | None:
        """The step since which the loss was never finite again; None if it is, or may be."""
        return None if self._without_loss is None else self._without_loss.since

    @property
    def lost_from(self) -> int | None:
        """Likewise the number of steps before that one."""
        return None if self._without_loss is None else self._without_loss.before

    @property
    def _to_the_end(self) -> _Row | None:
        """The bad steps that it ends in, if it stays so."""
        gradients, without_loss = self._bad_gradients, self._without_loss
        if not gradients.steps and not self._bad_loss.steps:
            return None
        if without_loss is None and self._spoilt is None and gradients.steps < FOR_GOOD:
            return None
        return gradients if without_loss is None else without_loss

    @property
    def since(self) -> str | None:
        """What is NaN or Inf since when, in words, if it ends so; None if it does not."""
        row = self._to_the_end
        if row is None:
            return None
        what = "gradients are" if row is self._bad_gradients else "loss is"
        return f"the {what} NaN or Inf since step {row.since:,} of {self.last:,}"

    @property
    def ending(self) -> str | None:
        """How it stands, in words, if it ends in NaN or Inf here; None if it does not."""
        row, said = self._to_the_end, self.since
        if row is None:
            return None
        if self._spoilt is not None:
            return f"{said}, and the weights are spoilt {self._spoilt}"
        if row.skipped == row.steps:
            return f"{said}; the steps since then were skipped and changed no weight"
        if not row.with_bad_gradients:
            return f"{said}; the gradients stayed finite"
        return (
            f"{said}; those of the steps since then with NaN or Inf in the gradients were skipped"
        )
