"""What a step leaves behind: kept on the device, brought to the host when somebody reads it.

Reading is what waits. `Outcome` reads when its properties are asked for; `Streak` reads its counter
no more often than it could have reached the limit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks.diagnose import Symptom
from gradilocks.values import StepRecord, wide

__all__ = ["Findings", "NonFiniteCount", "Outcome", "Streak", "fetch"]


def fetch(*scalars: Tensor) -> list[float]:
    """0-d tensors as Python numbers, in one transfer."""
    home = scalars[0].device
    if home.type == "cpu":
        return [float(s) for s in scalars]
    return [float(v) for v in torch.stack([s.to(home, wide(home)) for s in scalars]).tolist()]


class NonFiniteCount(NamedTuple):
    """How many elements of one gradient are NaN, and how many are Inf."""

    nan: int
    inf: int

    def __str__(self) -> str:
        if self.nan and self.inf:
            return "NaN and Inf"
        return "NaN" if self.nan else "Inf"


class Findings:
    """Whether a step was skipped, at which scale, and whose gradients were not finite.

    Reading any property waits for the device, once.
    """

    def __init__(
        self,
        *,
        skip: Tensor,
        scale: Tensor,
        nan: Tensor,
        inf: Tensor,
        names: Callable[[], Sequence[tuple[int, str]]],
    ) -> None:
        self._skip, self._scale, self._nan, self._inf = skip, scale, nan, inf
        self._names = names
        self._counts: dict[str, NonFiniteCount] | None = None

    @functools.cached_property
    def _values(self) -> list[float]:
        return fetch(self._skip, self._scale)

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left as they were."""
        return self._values[0] > 0

    @property
    def scale(self) -> float:
        """The scale that these gradients carried."""
        return self._values[1]

    @property
    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters with non-finite gradients, in backward order; () if none."""
        return tuple(self.counts)

    @property
    def counts(self) -> Mapping[str, NonFiniteCount]:
        """How many NaN and Inf each culprit has, in backward order."""
        if self._counts is None:
            self._counts = {}
            if self.skipped:
                nan, inf = torch.stack([self._nan, self._inf]).tolist()
                for place, name in self._names():
                    if nan[place] or inf[place]:
                        self._counts[name] = NonFiniteCount(nan[place], inf[place])
        return self._counts

    def describe(self, *, at_most: int = 3) -> str:
        """The culprits in words: `Inf in head.weight, NaN in body.bias (+2 more)`."""
        parts = [f"{count} in {name}" for name, count in self.counts.items()]
        if not parts:
            if not self.skipped:
                return "finite gradients"
            return (
                "no NaN or Inf in a gradient that is here: it is on another rank, its parameter is "
                "gone, or finite gradients overflow when they are unscaled"
            )
        more = f" (+{len(parts) - at_most} more)" if len(parts) > at_most else ""
        return ", ".join(parts[:at_most]) + more

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(skipped={self.skipped}, scale={self.scale:g}, "
            f"culprits={self.culprits})"
        )


class Outcome(Findings):
    """What became of one step of a GradientControl. Reading any property waits for the device.

    Example:
        >>> outcome = control.step()
        >>> outcome.skipped, outcome.clipped
        (False, True)
    """

    def __init__(self, record: StepRecord, names: Callable[[], Sequence[tuple[int, str]]]) -> None:
        super().__init__(
            skip=record.skip, scale=record.scale, nan=record.nan, inf=record.inf, names=names
        )
        self._record = record

    @functools.cached_property
    def _values(self) -> list[float]:
        record = self._record
        return fetch(record.skip, record.scale, record.norm, record.limit, record.clipped)

    @property
    def step(self) -> int:
        """The number of this step, from 1."""
        return self._record.step

    @property
    def norm(self) -> float:
        """The norm of the unscaled gradients before clipping; NaN or inf if they are not finite."""
        return self._values[2]

    @property
    def limit(self) -> float:
        """The bound that was put on the norm; inf if there was none."""
        return self._values[3]

    @property
    def clipped(self) -> bool:
        """Whether the gradients were pulled down. False when skipped."""
        return self._values[4] > 0

    def __repr__(self) -> str:
        return (
            f"Outcome(step={self.step}, skipped={self.skipped}, norm={self.norm:.6g}, "
            f"clipped={self.clipped}, scale={self.scale:g}, culprits={self.culprits})"
        )


class Streak:
    """Counts non-finite steps in a row, on the device, and says when there are too many.

    The counter is read only when it could have reached the limit, so a healthy run with a limit of
    100 waits once in 100 steps.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.count = torch.zeros((), dtype=torch.int32, device="cpu")
        self._until_reading = limit or 0
        self._recent: deque[StepRecord] = deque(maxlen=min(limit, 1000) if limit else 1)

    def note(self, record: StepRecord) -> bool:
        """Takes note of a step; True if the limit has been reached."""
        skip = record.skip
        if self.count.device != skip.device:
            self.count = self.count.to(skip.device)
        self.count.copy_(torch.where(skip > 0, self.count + 1, 0))
        self._recent.append(record)
        if self.limit is None:
            return False
        self._until_reading -= 1
        if self._until_reading > 0:
            return False
        count = int(self.count.item())
        self._until_reading = max(1, self.limit - count)
        return count >= self.limit

    def symptoms(self) -> list[Symptom]:
        """The non-finite steps of the present run of them, oldest first."""
        found: list[Symptom] = []
        for record in reversed(self._recent):
            skip, scale, loss = fetch(record.skip, record.scale, record.loss_nonfinite)
            if not skip:
                break
            nan, inf = torch.stack([record.nan.sum(), record.inf.sum()]).tolist()
            found.append(Symptom(scale=scale, nan=nan, inf=inf, loss_nonfinite=loss > 0))
        return found[::-1]

    def restore(self, count: int) -> None:
        """Goes on from a checkpoint."""
        self.count.fill_(count)
        self._recent.clear()
        self._until_reading = max(1, (self.limit or 0) - count)
