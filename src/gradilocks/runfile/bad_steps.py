"""The steps of one optimizer enter, one by one; since when its loss and its weights are bad leaves.

Whoever says how a run stands or ended (`gradilocks run`, `watch`, the report) says it in the words
of `ended_badly`. Takes room for a few numbers, however long the run.
"""

from __future__ import annotations

from gradilocks.runfile.records import Step

__all__ = ["FOR_GOOD", "BadSteps", "ended_badly"]

FOR_GOOD = 5
"""Skipped steps in a row without a finite loss after which it is lost; fewer may be bad batches."""


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
        self._steps = 0
        self._knows_loss: bool | None = None
        # Of the bad steps in a row up to the last: how many, since when, and likewise of two kinds.
        self._row = self._lost = 0
        self._row_since = self._lost_since = 0
        self._taken_since: int | None = None

    def take(self, step: Step) -> None:
        """The next step."""
        self._steps += 1
        self.last = step.step
        gradients = step.nan + step.inf > 0
        if step.loss is not None:
            self._knows_loss = True
        elif not gradients and self._knows_loss is None:
            self._knows_loss = False
        lost = self._is_lost(step, gradients=gradients)
        self._lost_since = self._lost_since if self._lost else step.step
        self._lost = self._lost + 1 if lost else 0
        if not (gradients or lost):
            self._row, self._taken_since = 0, None
            return
        self.seen += 1
        self._row_since = self._row_since if self._row else step.step
        self._row += 1
        if gradients and not step.skipped:
            self.taken += 1
            self.taken_since = self.taken_since or step.step
            self._taken_since = self._taken_since or step.step

    def _is_lost(self, step: Step, *, gradients: bool) -> bool:
        if step.loss is not None:
            return False
        if step.loss_nonfinite is None:  # An older file, which does not say it of each step.
            return gradients and self._knows_loss is not False
        return step.loss_nonfinite

    @property
    def lost_since(self) -> int | None:
        """The step since which the loss was never finite again; None if it is, or may be."""
        if not self._lost:
            return None
        enough = self._lost >= FOR_GOOD or self._lost == self._steps
        return self._lost_since if enough or self._taken_since is not None else None

    @property
    def ending(self) -> str | None:
        """How it stands, in words, if it ends in NaN or Inf here; None if it does not."""
        return ended_badly(
            last=self.last,
            bad_since=self._row_since if self._row else None,
            lost_since=self.lost_since,
            spoilt_since=self._taken_since,
        )


def ended_badly(
    *, last: int, bad_since: int | None, lost_since: int | None, spoilt_since: int | None
) -> str | None:
    """Says how a run ended in NaN or Inf; None if it did not.

    Args:
        last: the last step's number.
        bad_since: the step since which every step had NaN or Inf; None if the last one had none.
        lost_since: the step since which the loss was never finite again, if it was not.
        spoilt_since: the first of the steps since `bad_since` that was taken, if one was.
    """
    if bad_since is None or (lost_since is None and spoilt_since is None):
        return None
    if lost_since is not None:
        what = f"the loss is NaN or Inf since step {lost_since:,} of {last:,}"
    else:
        what = f"the gradients are NaN or Inf since step {bad_since:,} of {last:,}"
    if spoilt_since is not None:
        return f"{what}, and the weights are spoilt since step {spoilt_since:,}"
    return f"{what}; the steps since then were skipped and changed no weight"
