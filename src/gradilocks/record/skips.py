"""Skipped steps → lines in the log: who overflowed, and where the scale went. Not too many.

The first five skips are told in full, as they come. After that there is at most one line a minute,
which says how many it stands for. The first step that was taken with NaN or Inf is told too:
whatever follows it comes from weights that it has spoilt, until a step is well again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from gradilocks.runfile import SpoiltWeights, Step, describe_bad, has_bad_gradients

__all__ = ["SkipLog"]

_logger = logging.getLogger("gradilocks")
IN_FULL = 5
PAUSE = 60.0


class SkipLog:
    """Tells of skips through `logging.getLogger("gradilocks")`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = 0
        self._untold = 0
        self._last: tuple[float, int] = (0.0, 0)  # When, and at which step, it last spoke.
        self._group: list[Step] = []
        # By optimizer: a skip whose next scale is not known, and what had spoilt weights before it.
        self._waiting: dict[int, tuple[list[Step], str]] = {}
        self._spoilt = SpoiltWeights()
        self._told_taken = 0

    def take(self, step: Step, *, next_scale: float | None, more: bool) -> None:
        """A step has arrived.

        Args:
            step: taken or skipped.
            next_scale: the scale after it; None if the next step will tell.
            more: whether the next step belongs to the same decision.
        """
        before = self._waiting.pop(step.optimizer, None)
        if before is not None:
            self._tell(*before, step.scale)
        was_spoilt = self._spoilt.of(step.optimizer)
        self._spoilt.take(step)
        if has_bad_gradients(step) and not step.skipped and was_spoilt is None:
            self._told_taken += 1
            if self._told_taken <= IN_FULL:
                _logger.warning("%s", describe_taken(step))
        if step.skipped:
            self._group.append(step)
        if more or not self._group:
            return
        group, self._group = self._group, []
        spoilt = self._spoilt.describe(group[0].optimizer)
        if next_scale is None:
            self._waiting[group[-1].optimizer] = group, spoilt
        else:
            self._tell(group, spoilt, next_scale)

    def settle(self) -> None:
        """Tells of those whose next scale nobody has told yet."""
        for group, spoilt in self._waiting.values():
            self._tell(group, spoilt, None)
        self._waiting.clear()

    def close(self) -> None:
        """Says how many were not told of one by one."""
        self.settle()
        if self._untold:
            _logger.warning(
                "%d more step%s skipped since step %d",
                self._untold,
                " was" if self._untold == 1 else "s were",
                self._last[1],
            )
            self._untold = 0

    def _tell(self, group: Sequence[Step], spoilt: str, next_scale: float | None) -> None:
        now = self._clock()
        if self._told >= IN_FULL and now - self._last[0] < PAUSE:
            self._untold += 1
            return
        line = describe(group, next_scale, spoilt=spoilt)
        if self._untold:
            line += f" (and {self._untold} more since step {self._last[1]})"
        self._told, self._untold = self._told + 1, 0
        self._last = now, group[0].step
        _logger.warning("%s", line)


def describe(group: Sequence[Step], next_scale: float | None, *, spoilt: str = "") -> str:
    """A skip in one line; `group` is one step of each optimizer that shared the decision.

    Args:
        group: the steps.
        next_scale: the scale after them; None if it is not known.
        spoilt: that weights were spoilt before, as `SpoiltWeights.describe` has it.
    """
    first = group[0]
    of = f" of optimizer {first.optimizer}" if len(group) == 1 and first.optimizer else ""
    why = spoilt if spoilt and first.reason != "rejected" else _why(group)
    return f"step {first.step}{of} skipped: {why}{_scale(first.scale, next_scale)}"


def describe_taken(step: Step) -> str:
    """A step that was taken with NaN or Inf, in one line."""
    of = f" of optimizer {step.optimizer}" if step.optimizer else ""
    what = describe_bad(step) or "NaN or Inf in the gradients"
    latest = "" if step.loss is not None else ", at the latest"  # Or by a step before.
    return (
        f"step {step.step}{of} taken though not finite: {what}; the weights are spoilt from here on"
        f"{latest}"
    )


def _why(group: Sequence[Step]) -> str:
    first = group[0]
    if first.reason == "rejected":
        if first.norm is None or first.limit is None:
            return "finite gradients, rejected by the clip policy"
        return (
            "finite gradients, rejected by the clip policy: "
            f"norm {first.norm:.6g} over {first.limit:.6g}"
        )
    bad = [step for step in group if step.culprits or step.loss_nonfinite]
    if not bad:
        return (
            "no NaN or Inf in a gradient that is here: it is on another rank, or finite gradients "
            "overflow when they are unscaled"
        )
    if len(bad) == 1:
        return describe_bad(bad[0])
    # Their parameters together: which of the optimizers comes first in backward is not known.
    finite = [step.finite_gradients for step in group]
    together = bad[0]._replace(
        culprits=tuple(culprit for step in bad for culprit in step.culprits),
        nan=sum(step.nan for step in bad),
        inf=sum(step.inf for step in bad),
        loss_nonfinite=any(step.loss_nonfinite for step in bad),
        finite_gradients=0 if finite == [0] * len(group) else None,
        finite_after=None,
    )
    return describe_bad(together)


def _scale(before: float | None, after: float | None) -> str:
    if before is None or (before == 1.0 and after in (None, 1.0)):
        return ""
    if after is None or after == before:
        return f"; scale {before:.10g}"
    return f"; scale {before:.10g} → {after:.10g}"
