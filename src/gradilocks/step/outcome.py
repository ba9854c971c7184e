"""What a step leaves behind: kept on the device, brought to the host when somebody reads it.

Reading is what waits. `Outcome` reads when its properties are asked for; `Streak` reads its counter
no more often than it could have reached the limit.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.errors import NonFiniteGradient
from gradilocks.runfile import FORWARD_OR_LOSS
from gradilocks.step.diagnose import Symptom
from gradilocks.step.host_copy import LAG, HostCopy, fetch
from gradilocks.step.together import NonFiniteCount
from gradilocks.values import ROW, Statistics, StepRecord, moved

__all__ = [
    "NonFiniteCount",
    "Outcome",
    "ScalerOutcome",
    "Streak",
    "fetch",
    "nonfinite",
]


class ScalerOutcome:
    """Whether a step was skipped, at which scale, and whose gradients were not finite.

    Reading any property waits for the device, once.
    """

    def __init__(
        self,
        *,
        skip: Tensor,
        scale: Tensor,
        counted: Callable[[], tuple[Tensor, Tensor]],
        names: Callable[[], Sequence[tuple[int, str]]],
    ) -> None:
        self._skip, self._scale, self._counted_by = skip, scale, counted
        self._names = names

    # What hardly any step needs is said once for all of them: an outcome is made at every step.
    _counted_by: Callable[[], tuple[Tensor, Tensor]] | None = None
    _counts: dict[str, NonFiniteCount] | None = None
    _all_bad = False  # Whether all gradients are.
    _where = ""  # On which ranks losses were.

    def _counted(self) -> tuple[Tensor, Tensor]:
        """How many NaN and how many Inf each gradient has."""
        assert self._counted_by is not None
        return self._counted_by()

    def __getstate__(self) -> dict[str, Any]:
        # To a queue, a file or a checkpoint: what the host can read of it. Waits for the device.
        counts = dict(self.counts)
        told = {"_counts": counts, "_all_bad": self._all_bad, "_where": self._where}
        return {**told, "_skip_and_scale": list(self._skip_and_scale)}

    @classmethod
    def of_nothing(cls, *, skip: Tensor | None = None) -> ScalerOutcome:
        """What a disabled scaler tells: nothing was looked at, nothing skipped but by a clip."""
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        return cls(
            skip=zero if skip is None else skip,
            scale=torch.ones_like(zero),
            counted=lambda: (none, none),
            names=list,
        )

    @functools.cached_property
    def _skip_and_scale(self) -> list[float]:
        return fetch(self._skip, self._scale)

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left as they were."""
        return self._skip_and_scale[0] > 0

    @property
    def rejected(self) -> bool:
        """Whether a policy such as SkipSpikes has skipped a step whose gradients were finite."""
        return self._skip_and_scale[0] == 2.0

    @property
    def scale(self) -> float:
        """The scale that these gradients carried."""
        return self._skip_and_scale[1]

    @property
    def norm(self) -> float:
        """Of an Outcome, the norm of the unscaled gradients; a plain scaler has measured none."""
        raise _not_measured("norm")

    @property
    def limit(self) -> float:
        """Of an Outcome, the bound that was put on the norm."""
        raise _not_measured("limit")

    @property
    def clipped(self) -> bool:
        """Of an Outcome, whether the gradients were pulled down."""
        raise _not_measured("clipped")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Of an Outcome, the numbers of the step on the device."""
        raise _not_measured("tensors")

    @property
    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters with non-finite gradients, in backward order; () if none.

        Who has NaN or Inf, not where they began: after a loss that was itself NaN or Inf all have.
        """
        return tuple(self.counts)

    @property
    def counts(self) -> Mapping[str, NonFiniteCount]:
        """How many NaN and Inf each culprit has, in backward order."""
        skipped = self.skipped
        if self._counts is None:
            self._counts = {}
            if skipped:
                nan, inf = torch.stack(self._counted()).tolist()
                self._all_bad = all(map(any, zip(nan, inf, strict=True)))
                for place, name in self._names():
                    if nan[place] or inf[place]:
                        self._counts[name] = NonFiniteCount(nan[place], inf[place])
        return self._counts

    @property
    def _loss_was_bad(self) -> bool:
        """Whether the loss itself is known to have been NaN or Inf."""
        return False

    def describe(self, *, at_most: int = 3) -> str:
        """The culprits in words: `Inf in head.weight, NaN in body.bias (+2 more)`.

        None is named where that would tell nothing of where it began: after a loss that was itself
        NaN or Inf, or if all gradients are.
        """
        parts = [f"{count} in {name}" for name, count in self.counts.items()]
        if self.skipped and self._loss_was_bad:
            return f"the loss itself was NaN or Inf{self._where} ({FORWARD_OR_LOSS})"
        if len(parts) > 1 and self._all_bad:
            return f"NaN or Inf in all {len(parts)} gradients, so they do not tell where it began"
        if not parts:
            if not self.skipped:
                return "finite gradients"
            if self.rejected:
                return "finite gradients, rejected by the clip policy"
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


class Outcome(ScalerOutcome):
    """What became of one step of a GradientControl. Reading any property waits for the device.

    Example:
        >>> outcome = control.step()
        >>> outcome.skipped, outcome.clipped
        (False, True)
    """

    def __init__(
        self,
        record: StepRecord,
        names: Callable[[], Sequence[tuple[int, str]]],
        *,
        step: int | None = None,
        live: bool = False,
        on_ranks: Callable[[], tuple[dict[str, NonFiniteCount], str]] | None = None,
    ) -> None:
        self._record, self._names, self._step = record, names, step
        if live:
            self._live = True
        if on_ranks is not None:
            self._on_ranks = on_ranks

    def __getstate__(self) -> dict[str, Any]:
        told = super().__getstate__()
        del told["_skip_and_scale"]  # Worked out of these.
        return {**told, "_read": dict(self._numbers), "_step": self.step}

    _record: StepRecord | None = None
    _live = False
    _on_ranks: Callable[[], tuple[dict[str, NonFiniteCount], str]] | None = None
    _read: dict[str, float] | None = None

    def _counted(self) -> tuple[Tensor, Tensor]:
        if self._counted_by is not None:
            return self._counted_by()
        found = self._held().statistics
        return found.nan, found.inf

    def _held(self) -> StepRecord:
        """What lies on the device of the step."""
        if self._record is None:
            raise AttributeError(
                "an outcome that was pickled or copied has its numbers and its culprits, and "
                "nothing on the device. Take statistics and tensors off the one that step() "
                "returned."
            )
        return self._record

    def count_by(self, counted: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Takes the counts of NaN and Inf from there, gradient by gradient."""
        self._counted_by = counted

    @property
    def _numbers(self) -> dict[str, float]:
        # A step that was captured in a CUDA graph happens again at each replay.
        if self._read is None or self._live:
            self._read = dict(zip(ROW, fetch(self._held().row), strict=False))
            self._counts = None
        return self._read

    @property
    def _skip_and_scale(self) -> list[float]:
        return [self._numbers["skip"], self._numbers["scale"]]

    @property
    def counts(self) -> Mapping[str, NonFiniteCount]:
        """How many NaN and Inf each culprit has, in backward order.

        Where several ranks hold the model, the first culprit of each rank, with the rank: alike on
        all of them.
        """
        if self._on_ranks is None:
            return super().counts
        if self._counts is None:
            self._counts, self._where = self._on_ranks() if self.skipped else ({}, "")
        return self._counts

    @property
    def _loss_was_bad(self) -> bool:
        return self._numbers["loss_nonfinite"] > 0

    @property
    def statistics(self) -> Statistics:
        """What was measured, gradient by gradient in the optimizers' order, on the device.

        Taking it does not wait; the gradients were measured as they stood, so scaled. `largest`
        and `zeros` are None where finding them would have cost another read.
        """
        return self._held().statistics

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The numbers of the step as 0-d tensors on the device, for code that logs without a wait.

        "norm", "scale" and "limit" are what the properties of that name read, in float64 (float32
        where the device has no float64); "clipped" and "skipped" are bool. Of a step that was
        captured in a CUDA graph, ask again after each replay.
        """
        numbers = dict(zip(ROW, self._held().row.unbind(), strict=False))
        flags = {"clipped": numbers["clipped"] > 0, "skipped": numbers["skip"] > 0}
        return {name: numbers[name] for name in ("norm", "scale", "limit")} | flags

    @property
    def step(self) -> int:
        """The number of this step, from 1.

        Where a control has several optimizers, among those that they took together; after
        `step(only=)`, among those that this one took alone. A run file counts both, for each.
        """
        return int(self._numbers["step"]) if self._step is None else self._step

    @property
    def norm(self) -> float:
        """The norm of the unscaled gradients before clipping; NaN or inf if they are not finite."""
        return self._numbers["norm"]

    def describe(self, *, at_most: int = 3) -> str:
        """The culprits in words, or why a finite step was skipped."""
        if self.rejected and self.norm > self.limit:
            return f"finite gradients, rejected: norm {self.norm:.6g} over {self.limit:.6g}"
        return super().describe(at_most=at_most)

    @property
    def limit(self) -> float:
        """The bound that was put on the norm; inf if there was none.

        Of a chain the smallest of its policies'; of a rejected step, the bound that rejected it.
        """
        return self._numbers["limit"]

    @property
    def clipped(self) -> bool:
        """Whether the gradients were pulled down, on any rank. False when skipped."""
        return self._numbers["clipped"] > 0

    def __repr__(self) -> str:
        return (
            f"Outcome(step={self.step}, skipped={self.skipped}, norm={self.norm:.6g}, "
            f"clipped={self.clipped}, scale={self.scale:g}, culprits={self.culprits})"
        )


def _not_measured(name: str) -> AttributeError:
    """What to raise for a number that nobody has: a wrong one would be worse."""
    return AttributeError(
        f"this outcome has no {name}: a GradScaler looks for NaN and Inf, as torch's does, and "
        "measures no norm. GradScaler(clip=...) measures it, with clip=math.inf without clipping, "
        "and so does GradScaler(record=...)."
    )


def nonfinite(outcome: Outcome) -> NonFiniteGradient:
    """What to raise for a step that was skipped, if the caller wants to know at once."""
    return NonFiniteGradient(
        f"step {outcome.step} skipped: {outcome.describe()}; scale {outcome.scale:g}. "
        "Parameters and optimizer state are as they were.",
        culprits=outcome.culprits,
    )


class Streak:
    """Counts non-finite steps in a row, on the device, and says when there are too many.

    The counter is read only when it could have reached the limit, so a healthy run with a limit of
    100 reads it once in 100 steps. On a GPU it is sent for without waiting and looked at when it
    has arrived, so the host learns of the limit a few steps late; beside other ranks always equally
    many, so that all give up at the same step.

    Of the latest steps it keeps the rows, to say how it came to that: as many as the limit and a
    few that may be gone by when the host learns of it, and 1,000 at most.

    Args:
        limit: so many are too many; None if none are.
        together: whether other ranks count along.
    """

    MOST_KEPT = 1000

    def __init__(self, limit: int | None, *, together: bool = False) -> None:
        self.limit = limit
        self._together = together
        self.count = torch.zeros((), dtype=torch.int32, device="cpu")
        self._until_reading = limit or 0
        # A control without a limit may be gone on with by one that has one.
        kept = (100 if limit is None else limit) + 4 * LAG
        self._recent: deque[Tensor | Callable[[], Tensor]] = deque(maxlen=min(kept, self.MOST_KEPT))
        self._coming: HostCopy | None = None
        self._age = 0  # How many steps ago it was sent for.

    def __getstate__(self) -> dict[str, Any]:
        # An event on its way cannot be copied: a copy asks for the counter again.
        return {**self.__dict__, "_coming": None}

    def note(self, record: StepRecord) -> bool:
        """Takes note of a step; True if the limit has been reached."""
        skip = record.skip
        if self.count.device != skip.device:
            self.move_to(skip.device)
        self.count.copy_(torch.where(skip > 0, self.count + 1, 0))
        return self.watch(record)

    def watch(self, record: StepRecord) -> bool:
        """As `note`, after a step that has been counted already."""
        self._recent.append(record.kept_row)
        if self.limit is None:
            return False
        self._until_reading -= 1
        if self._until_reading > 0:
            return False
        count = self._counted()
        if count is None:
            return False
        if count >= self.limit:  # As it was then: a finite step may have come since. Worth a wait.
            count = int(fetch(self.count)[0])
        self._until_reading += max(1, self.limit - count)
        return count >= self.limit

    def move_to(self, device: torch.device) -> None:
        """Counts on `device` from here on."""
        if self.count.device != device:
            self.count = moved(self.count, device)

    def _counted(self) -> int | None:
        """The counter when the host first asked for it; None if it has not arrived yet."""
        if self.count.device.type != "cuda":
            self._until_reading = 0
            return int(self.count.item())
        if torch.cuda.is_current_stream_capturing():
            return None
        return self._sent()

    def _sent(self) -> int | None:
        """The counter as it was when it was sent for; None as long as it is on its way."""
        if self._coming is None:
            self._coming, self._age = HostCopy(self.count), 0
        self._age += 1
        if self._together:
            if self._age <= LAG:
                return None
            self._coming.wait()
        elif not self._coming.arrived():
            return None
        (count,) = self._coming.read()
        self._coming = None
        return int(count)

    def symptoms(self) -> list[Symptom]:
        """The non-finite steps of the present run of them, oldest first."""
        found: list[Symptom] = []
        for kept in reversed(self._recent):
            row = kept if isinstance(kept, Tensor) else kept()
            numbers = dict(zip(ROW, fetch(row), strict=False))
            if numbers["skip"] != 1.0:
                break
            broken = numbers["loss_nonfinite"]
            found.append(
                Symptom(
                    scale=numbers["scale"],
                    nan=int(numbers["nan"]),
                    inf=int(numbers["inf"]),
                    loss_nonfinite=None if math.isnan(broken) else broken > 0,
                )
            )
        return found[::-1]

    def restore(self, count: int, symptoms: Sequence[Symptom] = ()) -> None:
        """Goes on from a checkpoint.

        Args:
            count: how many steps in a row were not finite.
            symptoms: the last of them, oldest first, as far as they are known.
        """
        self.count.fill_(count)
        self._recent.clear()
        for symptom in symptoms:
            broken = symptom.loss_nonfinite
            numbers = {
                "skip": 1.0,
                "scale": symptom.scale,
                "nan": symptom.nan,
                "inf": symptom.inf,
                "loss_nonfinite": math.nan if broken is None else broken,
            }
            row = [float(numbers.get(name, math.nan)) for name in ROW]
            self._recent.append(torch.tensor(row, dtype=torch.float64, device="cpu"))
        self._coming = None
        self._until_reading = max(1, (self.limit or 0) - count)
