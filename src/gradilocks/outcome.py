"""Outcomes: the numbers of one step, read from the device on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks.errors import NeverFinite, NonFiniteGradient, RanksDiffer
from gradilocks.kernels import STATISTICS
from gradilocks.ranks.collective import RANK_ROW, describe_disagreement, disagreement, first_culprits
from gradilocks.ranks.layout import Layout
from gradilocks.step.decide import ROW, Decision
from gradilocks.step.host_copy import LAG, HostCopy


class NonFiniteCount(NamedTuple):
    """Number of NaN and Inf elements in one gradient."""

    nan: int
    inf: int

    def __str__(self) -> str:
        return " and ".join(name for name, count in (("NaN", self.nan), ("Inf", self.inf)) if count) or "NaN or Inf"


class Outcome:
    """The result of one step of a GradientControl. Reading a property waits for the device.

    A GPU keeps the numbers of the last 1,024 steps and the counts behind `culprits` of the last 64; reading older ones
    raises OutcomeExpired.

    Examples:
        >>> outcome = control.step()
        >>> outcome.skipped, outcome.clipped
        (False, True)
    """

    def __init__(
        self,
        decision: Decision,
        names: Callable[[], tuple[Sequence[str], Sequence[int]]],
        *,
        loss: Tensor | None,
        names_by_rank: Sequence[Sequence[str]] | None,
    ) -> None:
        self._row, self._statistics, self._rank_rows = decision.row, decision.statistics, decision.rank_rows
        self._names, self._loss, self._names_by_rank = names, loss, names_by_rank
        self.is_captured = decision.skip.is_cuda and torch.cuda.is_current_stream_capturing()
        """True for a step captured in a CUDA graph of the user."""
        self._numbers: dict[str, float] | None = None
        self._counts: dict[str, NonFiniteCount] | None = None

    def _read(self, name: str) -> float:
        # A step captured in a CUDA graph runs again at each replay, so its numbers are read again.
        if self._numbers is None or self.is_captured:
            self._numbers, self._counts = dict(zip(ROW, self._row().tolist(), strict=True)), None
        return self._numbers[name]

    @property
    def skipped(self) -> bool:
        """True if parameters and optimizer state were left unchanged."""
        return self._read("skipped") > 0

    @property
    def rejected(self) -> bool:
        """True if a clip policy such as SkipSpikes skipped a step with finite gradients."""
        return self._read("rejected") > 0

    @property
    def scale(self) -> float:
        """The scale during this step."""
        return self._read("scale")

    @property
    def norm(self) -> float:
        """Norm of the unscaled gradients before clipping; NaN or inf if they are not finite."""
        return self._read("norm")

    @property
    def limit(self) -> float:
        """Bound on the norm; inf for none. With several policies the smallest, or the one that rejected the step."""
        return self._read("limit")

    @property
    def clipped(self) -> bool:
        """True if clipping changed the gradients; False for a skipped step.

        With policies for groups or tensors, pipeline stages and experts report their own gradients only; with
        AdaptiveClip, every rank its own rows.
        """
        return self._read("clipped") > 0

    @property
    def step(self) -> int:
        """Number of this step, from 1."""
        return int(self._read("step"))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """norm, scale, limit, skipped and clipped as 0-d device tensors, for logging without a synchronization."""
        numbers = dict(zip(ROW, self._row().clone().unbind(), strict=True))
        flags = {name: numbers[name] > 0 for name in ("skipped", "clipped")}
        return {name: numbers[name] for name in ("norm", "scale", "limit")} | flags

    @property
    def row(self) -> Tensor:
        """1-d on the device: the numbers named by `step.decide.ROW`."""
        return self._row()

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters, in the order of `statistics`."""
        return self._names()[0]

    @property
    def statistics(self) -> Tensor:
        """[5, n] on the device: norm, largest magnitude and counts of zeros, NaN and Inf of each gradient.

        The gradients are those at `step()`: scaled, unless `unscale_` was called.

        On a CPU without the C extension they are measured only if the control has a subscriber; otherwise this raises
        RuntimeError.
        """
        return self._statistics()

    @property
    def loss_is_finite(self) -> bool | None:
        """False if the loss itself was NaN or Inf; None if no loss was given to `backward`.

        Covers all ranks that decide together; under DistributedDataParallel, this rank only.
        """
        if self._rank_rows is None:
            return None if self._loss is None else math.isfinite(float(self._loss))
        columns = (RANK_ROW.index("loss"), RANK_ROW.index("has_loss"))
        losses = [loss for loss, has_loss in self._rank_rows[:, columns].tolist() if has_loss]
        return all(map(math.isfinite, losses)) if losses else None

    @property
    def culprits(self) -> tuple[str, ...]:
        """Names of parameters with non-finite gradients, in backward order; then the first one of each other rank."""
        return tuple(self.counts)

    @property
    def counts(self) -> Mapping[str, NonFiniteCount]:
        """Number of NaN and Inf elements of each culprit; (0, 0) for culprits on other ranks, which send only names."""
        if not self.skipped or self.rejected:
            return {}
        if self._counts is None:
            if not (self._read("nan") or self._read("inf") or self._rank_rows is not None):
                return {}
            names, order = self._names()
            statistics = self._statistics()
            nan, inf = (statistics[STATISTICS.index(name)].tolist() for name in ("nan", "inf"))
            found = [i for i in order if nan[i] or inf[i]]
            self._counts = {names[i]: NonFiniteCount(int(nan[i]), int(inf[i])) for i in found}
            if self._rank_rows is not None:
                for name in first_culprits(self._rank_rows, self._names_by_rank or [names]):
                    self._counts.setdefault(name, NonFiniteCount(0, 0))
        return self._counts

    def describe(self) -> str:
        """Returns the reason for a skip as text: `Inf in head.weight, NaN in body.bias (+2 more)`."""
        if not self.skipped:
            return "finite gradients"
        if self.rejected:
            return f"finite gradients, rejected by the clip policy: norm {self.norm:.6g} above {self.limit:.6g}"
        if self.loss_is_finite is False:
            return "the loss itself is NaN or Inf"
        parts = [f"{count} in {name}" for name, count in self.counts.items()]
        if not parts and self._rank_rows is not None and bool(disagreement(self._rank_rows)):
            return "ranks at different scales or steps"
        if not parts and not math.isfinite(self.norm):
            return "NaN or Inf found by unscale_() and removed from the gradients since"
        if not parts:
            return "finite gradients that overflow when they are unscaled"
        more = f" (+{len(parts) - 3} more)" if len(parts) > 3 else ""
        return ", ".join(parts[:3]) + more

    def __repr__(self) -> str:
        return (
            f"Outcome(step={self.step}, skipped={self.skipped}, norm={self.norm:.6g}, clipped={self.clipped}, "
            f"scale={self.scale:g}, culprits={self.culprits})"
        )


class Streak:
    """Reports when the device has counted too many consecutive non-finite steps.

    The host reads the counter only when it could have reached the limit: with a limit of 100 and finite steps, once in
    100 steps. On a GPU the copy is asynchronous and arrives a few steps late; several ranks read it exactly LAG steps
    late.

    Args:
        limit: number of consecutive non-finite steps to report; None for no limit.
        has_ranks: True if several ranks must report at the same step.
    """

    def __init__(self, limit: int | None, *, has_ranks: bool = False) -> None:
        self.limit, self._has_ranks = limit, has_ranks
        self._steps_until_read = limit or 0
        self._copy: HostCopy | None = None
        self._age = 0

    def reached(self, counter: Tensor) -> bool:
        """Returns True once the limit has been reached. Called after every step with the device's counter."""
        if self.limit is None:
            return False
        self._steps_until_read -= 1
        if self._steps_until_read > 0 or (counter.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        if self._copy is None:
            self._copy, self._age = HostCopy(counter), 0
        self._age += 1
        is_ready = self._age > LAG if self._has_ranks else self._copy.has_arrived()
        if not (self._copy.is_immediate or is_ready):
            return False
        count = int(self._copy.read())
        self._copy = None
        self._steps_until_read = max(1, self.limit - count)
        return count >= self.limit

    def restart(self, count: int) -> None:
        """Resumes from a loaded counter."""
        self._copy = None
        self._steps_until_read = max(1, (self.limit or 0) - count)


class RankCheck:
    """Raises RanksDiffer if ranks are at different scales or steps. Such ranks skip every step.

    Steps on a CPU are checked immediately. On a GPU the rows of every 16th step are copied asynchronously and read
    exactly LAG steps later, so that all ranks raise at the same step.

    Args:
        layout: ranks that decide together; None for one rank.
    """

    _PERIOD = 16

    def __init__(self, layout: Layout | None) -> None:
        self._layout = layout
        self._count = 0
        self._copy: HostCopy | None = None

    def check(self, rows: Tensor) -> None:
        """Checks the rows of all ranks. Called after every step."""
        if rows.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return
            age = self._count % self._PERIOD
            self._count += 1
            if age == 0:
                self._copy = HostCopy(rows)
            if age != LAG or self._copy is None:
                return
            rows = self._copy.tensor()
        if bool(disagreement(rows)):
            assert self._layout is not None
            raise RanksDiffer(describe_disagreement(rows, self._layout))


def nonfinite_error(outcome: Outcome) -> NonFiniteGradient:
    """Returns the error for `on_nonfinite="raise"`."""
    return NonFiniteGradient(
        f"step {outcome.step} skipped: {outcome.describe()}; scale {outcome.scale:g}. "
        "Parameters and optimizer state are unchanged.",
        culprits=outcome.culprits,
    )


def never_finite_error(outcome: Outcome, count: int, *, min_scale: float) -> NeverFinite:
    """Returns the error for `give_up_after`, with a short diagnosis.

    Args:
        outcome: outcome of the last step.
        count: number of consecutive non-finite steps.
        min_scale: the smallest scale that the policy can reach; 0 for a constant scale.
    """
    if outcome.loss_is_finite is False:
        advice = (
            "No scale helps: the loss is NaN or Inf before scaling. Check the batch and the forward pass: "
            "log(0), a division by zero, float16 activations above 65504, too high a learning rate."
        )
    elif outcome.scale <= min_scale * (1.0 + 1e-6):  # float32 may have rounded the scale up.
        advice = (
            f"The scale has fallen to its lower bound, {outcome.scale:g}. "
            "Look for 0/0, a division by zero, or the gradient of sqrt or norm at zero; `gradilocks run` names the "
            "operation."
        )
    else:
        advice = (
            f"The scale was {outcome.scale:g}. If gradients overflow, a lower scale, a lower learning rate or float32 "
            "for the overflowing modules helps; a NaN with another cause remains at any scale."
        )
    return NeverFinite(
        f"gave up after {count} non-finite step{'s in a row' if count > 1 else ''}, the last at step {outcome.step}: "
        f"{outcome.describe()}. {advice}",
        culprits=outcome.culprits,
    )
