"""Steps, as they come → what ``gradilocks watch`` shows of them, in room that does not grow.

Numbers and names only; `watch_view.py` makes text of them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from gradilocks.report import Trail, mean
from gradilocks.runfile import BadSteps, Follower, Reader, SpoiltWeights, Step

RECENT = 200
"""Steps over which the speed is taken."""
LAST_SKIPS = 50
FOR_GOOD = 3
"""Steps in a row without a finite norm after which it is said to be lost."""
AT_A_TIME = 4 << 20
"""Bytes of a long file that are read before the view is drawn again."""


class Course:
    """The course of one optimizer.

    Attributes:
        last: its last step; None before the first.
        steps: how many, skipped ones included.
        least: the least loss and its step; None where no loss is known.
        bad: which steps had NaN or Inf, and whether that stayed.
    """

    def __init__(self) -> None:
        self.last: Step | None = None
        self.steps = self.skipped = self.clipped = 0
        self.bad = BadSteps()
        self.reasons: Counter[str] = Counter()
        self.least: tuple[float, int] | None = None
        self.scales: tuple[float, float] | None = None
        self.loss, self.lr = Trail(mean), Trail(mean)
        self.norm, self.scale = Trail(max), Trail(max)
        self._known: dict[str, float] = {}
        self._lost: dict[str, tuple[int, int]] = {}  # since which step, and how many by now
        self._times: deque[float] = deque(maxlen=RECENT)

    def take(self, step: Step) -> None:
        """The next step."""
        self.last = step
        self.bad.take(step)
        self.steps += 1
        self.clipped += step.clipped and not step.skipped
        if step.skipped:
            self.skipped += 1
            self.reasons[step.reason or "unknown"] += 1
        self.loss.add(step.loss)
        self.norm.add(step.norm)
        self.scale.add(step.scale)
        self.lr.add(step.lr)
        for name in ("loss", "norm", "scale", "lr"):
            value = getattr(step, name)
            if value is not None:
                self._known[name] = value
                self._lost.pop(name, None)
            elif step.nan + step.inf:
                since, many = self._lost.get(name, (step.step, 0))
                self._lost[name] = since, many + 1
        if step.loss is not None and (self.least is None or step.loss < self.least[0]):
            self.least = (step.loss, step.step)
        if step.scale is not None:
            low, high = self.scales or (step.scale, step.scale)
            self.scales = (min(low, step.scale), max(high, step.scale))
        if self._times and step.time < self._times[-1]:  # another session counts from its start
            self._times.clear()
        self._times.append(step.time)

    def known(self, name: str) -> float | None:
        """The last finite 'loss', 'norm', 'scale' or 'lr'."""
        return self._known.get(name)

    def lost_since(self, name: str) -> int | None:
        """The step since which 'loss' or 'norm' has been NaN or Inf; None if it is known.

        A step or two are a skip, which is shown as one.
        """
        if name == "loss":
            return self.bad.lost_since
        since, many = self._lost.get(name, (0, 0))
        for_good = many >= FOR_GOOD or many == self.steps or self.bad.ending is not None
        return since if many and for_good else None

    @property
    def steps_per_second(self) -> float | None:
        """Over the last steps, by the run's own clock."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])

    @property
    def clip_rate(self) -> float | None:
        """Clipped steps among those taken, 0 to 1."""
        taken = self.steps - self.skipped
        return self.clipped / taken if taken else None


class State:
    """Everything that is shown of a run: a `Course` an optimizer, and the last skips of all."""

    def __init__(self) -> None:
        self.courses: dict[int, Course] = {}
        self.skips: deque[tuple[Step, str]] = deque(maxlen=LAST_SKIPS)
        """With what had spoilt weights before it, as `SpoiltWeights.describe` has it."""
        self.spoilt = SpoiltWeights()
        self.seconds = 0.0

    def take(self, steps: Iterable[Step]) -> list[tuple[Step, str]]:
        """The next steps; returns those that were skipped, as in `skips`."""
        skips = []
        for step in steps:
            self.courses.setdefault(step.optimizer, Course()).take(step)
            self.seconds = step.time
            if step.skipped:
                skips.append((step, self.spoilt.describe(step.optimizer)))
            self.spoilt.take(step)
        self.skips.extend(skips)
        return skips


class Watched:
    """A run file that is followed, and what is shown of it."""

    def __init__(self, path: Path) -> None:
        self.follower = Follower(path)
        self.state = State()
        self.new_skips: list[tuple[Step, str]] = []
        """Of the steps that `poll` returned last, those that were skipped, as in `State.skips`."""

    @property
    def reader(self) -> Reader:
        """The header, the optimizers and the end, as far as they are there."""
        return self.follower.reader

    @property
    def unread(self) -> float:
        """Share of the file that is still to be read, 0 to 1; 0 for the little at its end."""
        behind = self.follower.behind
        return behind / (self.follower.size or behind) if behind > AT_A_TIME else 0.0

    @property
    def silent(self) -> float | None:
        """Seconds since the file last changed."""
        changed = self.follower.changed
        return None if changed is None else max(0.0, time.time() - changed)

    def poll(self) -> list[Step]:
        """Reads on, and says which steps came; a file that was begun again is shown anew."""
        before = self.follower.restarts
        steps = self.follower.poll(most=AT_A_TIME)
        if self.follower.restarts != before:
            self.state = State()
        self.new_skips = self.state.take(steps)
        return steps
