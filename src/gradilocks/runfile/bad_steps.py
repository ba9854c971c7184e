"""The steps of a run enter, one by one; since when its loss and its weights are bad leaves.

Whoever says how a run stands or ended (`gradilocks run`, `watch`, the report, `compare`) asks
`BadSteps`, and whoever tells of a single step asks `SpoiltWeights` what went before. Both take room
for a few numbers, however long the run.
"""

from __future__ import annotations

from typing import NamedTuple

from gradilocks.runfile.records import Step

__all__ = ["FOR_GOOD", "BadSteps", "Spoilt", "SpoiltWeights", "has_bad_gradients", "is_sound"]

FOR_GOOD = 5
"""Skipped steps in a row, with NaN or Inf, after which that stays; fewer may be bad batches."""
# Of older files, which do not tell a loss that was NaN from one that nobody knew: missing at so
# many of the steps whose gradients were well, nobody knew it; known at so many before, it was NaN.
UNKNOWN, KNOWN = 0.1, 0.9


def has_bad_gradients(step: Step) -> bool:
    """Whether there was NaN or Inf among its gradients."""
    return step.nan + step.inf > 0


def is_sound(step: Step) -> bool:
    """Whether a step proves that the weights could be used: its gradients and its loss were finite.

    The forward pass ran through the weights. Those that it did not use may be bad all the same.
    """
    return step.norm is not None and not has_bad_gradients(step) and not step.loss_nonfinite


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
    """Steps of one kind in a row, up to the last step."""

    def __init__(self) -> None:
        self.many = self.skipped = self.with_bad_gradients = self.since = self.place = 0

    def take(self, step: Step, *, belongs: bool, place: int) -> None:
        if not belongs:
            self.many = 0
            return
        if not self.many:
            self.since, self.place = step.step, place
            self.skipped = self.with_bad_gradients = 0
        self.many += 1
        self.skipped += step.skipped
        self.with_bad_gradients += has_bad_gradients(step)


class BadSteps:
    """What was NaN or Inf in the steps of one optimizer, and whether it stayed so.

    Attributes:
        taken: how many steps were taken though gradients were NaN or Inf.
        taken_since: the first of them; None if there is none.
        seen: how many steps had NaN or Inf in their gradients or their loss.
        last: the last step's number.
    """

    def __init__(self) -> None:
        self.taken = self.seen = self.last = 0
        self.taken_since: int | None = None
        self._spoilt = SpoiltWeights()
        self._optimizer = 0
        self._steps = 0
        self._gradients, self._lost, self._missing = _Row(), _Row(), _Row()
        # Of older files: steps with a loss, with bad gradients, and those without a loss that do
        # not say why, with bad gradients or with good ones.
        self._known = self._bad = self._asked_bad = self._asked_good = 0
        self._known_before = 0  # When the row of missing ones began.

    def take(self, step: Step) -> None:
        """The next step."""
        place, self._steps = self._steps, self._steps + 1
        self.last, self._optimizer = step.step, step.optimizer
        gradients, lost = has_bad_gradients(step), bool(step.loss_nonfinite)
        asked = step.loss is None and step.loss_nonfinite is None
        self._spoilt.take(step)
        self._gradients.take(step, belongs=gradients, place=place)
        self._lost.take(step, belongs=lost, place=place)
        if not self._missing.many:
            self._known_before = self._known
        self._missing.take(step, belongs=asked, place=place)
        self._known += step.loss is not None
        self._bad += gradients
        self._asked_bad += asked and gradients
        self._asked_good += asked and not gradients
        self.seen += gradients or lost
        if gradients and not step.skipped:
            self.taken += 1
            self.taken_since = self.taken_since or step.step

    @property
    def guesses_lost(self) -> bool:
        """Whether a missing loss beside bad gradients was NaN or Inf, in a file that says not.

        It was in a run that else knows its loss, or that is nothing but such steps.
        """
        asked = self._asked_bad + self._asked_good
        least = 1 if asked < self._steps else 0  # A loss overflows a step before the gradients do.
        return self._asked_good <= max(least, UNKNOWN * (self._steps - self._bad))

    @property
    def _gone(self) -> _Row | None:
        """The row of steps without a finite loss, if it stays so."""
        row = self._lost
        if row.many:
            enough = row.many >= FOR_GOOD or row.many == self._steps
            return row if enough or self._spoilt.of(self._optimizer) is not None else None
        row = self._missing
        if not row.many or not (row.many >= FOR_GOOD or row.place == 0):
            return None
        usual = self._known_before >= max(FOR_GOOD, KNOWN * row.place)
        guessed = self._asked_bad > 0 and self.guesses_lost
        both = guessed and row.many - row.with_bad_gradients <= 1
        return row if usual or both else None

    @property
    def lost_since(self) -> int | None:
        """The step since which the loss was never finite again; None if it is, or may be."""
        return None if self._gone is None else self._gone.since

    @property
    def lost_from(self) -> int | None:
        """Likewise the number of steps before that one."""
        return None if self._gone is None else self._gone.place

    @property
    def ending(self) -> str | None:
        """How it stands, in words, if it ends in NaN or Inf here; None if it does not."""
        gradients, gone = self._gradients, self._gone
        if not gradients.many and not self._lost.many:
            return None
        spoilt = self._spoilt.of(self._optimizer)
        if gone is None and spoilt is None and gradients.many < FOR_GOOD:
            return None
        row, what = (gradients, "gradients are") if gone is None else (gone, "loss is")
        said = f"the {what} NaN or Inf since step {row.since:,} of {self.last:,}"
        if spoilt is not None:
            return f"{said}, and the weights are spoilt {spoilt}"
        if row.skipped == row.many:
            return f"{said}; the steps since then were skipped and changed no weight"
        if not row.with_bad_gradients:
            return f"{said}; the gradients stayed finite"
        return (
            f"{said}; those of the steps since then with NaN or Inf in the gradients were skipped"
        )
