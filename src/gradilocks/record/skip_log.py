"""Skipped steps → lines in the log: who overflowed, and where the scale went. Not too many.

The first five skips are told in full, as they come. After that there is at most one line a minute,
which says how many it stands for. The first step that was taken with NaN or Inf is told too:
whatever follows it comes from weights that it has spoilt, until a step is well again.

Lines come in the order of the steps, also where several optimizers step in turn and a line has to
wait for the scale that its optimizer's next step will tell, and where a trace has found something
of a step whose numbers have not arrived yet.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradilocks.runfile import SpoiltWeights, Step, Trace, describe_bad, has_bad_gradients

__all__ = ["SkipLog"]

_logger = logging.getLogger("gradilocks")
_IN_FULL = 5
_PAUSE = 60.0  # Seconds.
_LONGEST_WAIT = 16  # Steps, for one that tells the next scale: its optimizer may step no more.


@dataclass
class _Line:
    """Something to be told, once nothing that came before it is waiting."""

    group: Sequence[Step]
    """Skipped steps of the optimizers that share a decision, or one that was taken, or none."""
    words: str = ""
    """What had spoilt weights before it; of no steps all there is to tell."""
    waits_for: int | None = None
    """The optimizer whose next step tells the next scale."""
    next_scale: float | None = None
    waited: int = 0


class SkipLog:
    """Tells of skips through `logging.getLogger("gradilocks")`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = 0
        self._left_out = 0
        self._last: tuple[float, int] = (0.0, 0)  # When, and at which step, it last spoke.
        self._group: list[Step] = []  # Skipped steps of the optimizers that share a decision.
        self._untold: deque[_Line] = deque()
        self._spoilt = SpoiltWeights()
        self._lines_of_taken = 0
        self._traces: list[Trace] = []
        self._traced: set[str] = set()

    def take(self, step: Step, *, next_scale: float | None, more: bool) -> None:
        """A step has arrived; `next_scale` is None if the next step will tell it, and `more` says
        whether that belongs to the same decision."""
        for line in self._untold:
            line.waited += 1
            if line.waits_for == step.optimizer:
                line.waits_for, line.next_scale = None, step.scale
            elif line.waited > _LONGEST_WAIT:
                line.waits_for = None
        was_spoilt = self._spoilt.of(step.optimizer)
        self._spoilt.take(step)
        if has_bad_gradients(step) and not step.skipped and was_spoilt is None:
            self._lines_of_taken += 1
            if self._lines_of_taken <= _IN_FULL:
                self._untold.append(_Line([step]))
        if step.skipped:
            self._group.append(step)
        if self._group and not more:
            group, self._group = self._group, []
            spoilt = self._spoilt.describe(group[0].optimizer)
            waits_for = group[-1].optimizer if next_scale is None else None
            self._untold.append(_Line(group, spoilt, waits_for, next_scale))
        if not more:
            self._queue_traces(upto=step.step)
        while self._untold and self._untold[0].waits_for is None:
            self._tell(self._untold.popleft())

    def trace(self, found: Trace) -> None:
        """Tells what a trace has found, after the step that it was found in; a sentence once."""
        if found.text not in self._traced:
            self._traced.add(found.text)
            self._traces.append(found)

    def _queue_traces(self, *, upto: int | None = None) -> None:
        due = [each for each in self._traces if upto is None or each.step <= upto]
        self._traces = [each for each in self._traces if each not in due]
        self._untold += [_Line((), f"step {each.step} traced: {each.text}") for each in due]

    def resume(self) -> None:
        """The run goes on from an earlier step, with the weights that it had then."""
        self.settle()
        self._spoilt.forget()

    def settle(self) -> None:
        """Tells of those whose next scale nobody has told yet, and of traces."""
        self._queue_traces()
        while self._untold:
            self._tell(self._untold.popleft())

    def close(self) -> None:
        """Says how many were not told of one by one."""
        self.settle()
        if self._left_out:
            _logger.warning(
                "%d more step%s skipped since step %d",
                self._left_out,
                " was" if self._left_out == 1 else "s were",
                self._last[1],
            )
            self._left_out = 0

    def _tell(self, line: _Line) -> None:
        group, spoilt = line.group, line.words
        if not group:
            _logger.warning("%s", spoilt)
            return
        if not group[0].skipped:
            _logger.warning("%s", _describe_taken(group[0]))
            return
        now = self._clock()
        if self._lines >= _IN_FULL and now - self._last[0] < _PAUSE:
            self._left_out += 1
            return
        first = group[0]
        why = spoilt if spoilt and first.reason != "rejected" else _why(group)
        # A decision of several optimizers is of none of them alone.
        of = _of_optimizer(first) if len(group) == 1 else ""
        words = f"step {first.step}{of} skipped: {why}{_scale(first.scale, line.next_scale)}"
        if self._left_out:
            words += f" (and {self._left_out} more since step {self._last[1]})"
        self._lines, self._left_out = self._lines + 1, 0
        self._last = now, first.step
        _logger.warning("%s", words)


def _of_optimizer(step: Step) -> str:
    return f" of optimizer {step.optimizer}" if step.optimizer else ""


def _describe_taken(step: Step) -> str:
    """A step that was taken with NaN or Inf, in one line."""
    what = describe_bad(step) or "NaN or Inf in the gradients"
    latest = "" if step.loss is not None else ", at the latest"  # Or by a step before.
    return (
        f"step {step.step}{_of_optimizer(step)} taken though not finite: {what}; the weights are "
        f"spoilt from here on{latest}"
    )


def _why(group: Sequence[Step]) -> str:
    """Why a step was skipped; `group` is one step of each optimizer that shared the decision."""
    first = group[0]
    if first.reason == "rejected":
        why = "finite gradients, rejected by the clip policy"
        norm, limit = first.norm, first.limit
        if norm is None or limit is None or not norm > limit:  # By a rule of the policy's own.
            return why
        return f"{why}: norm {norm:.6g} over {limit:.6g}"
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
