"""What travels through the demo: a Job enters a worker, a Step a step and a Result leave it.

Data only, and no torch. All three become plain data and come back the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradilocks.demo.arms import Arm, Setup

__all__ = ["Job", "Result", "Step", "summarize"]

LONGEST_WINDOW = 50
"""The final loss is a mean over a sixth of the run, and over no more steps than this."""


@dataclass(frozen=True)
class Job:
    """One arm with one seed."""

    arm: Arm
    seed: int
    setup: Setup
    path: str
    """Where its run file goes."""
    command: tuple[str, ...] = ()
    """What the run file says was run."""

    def to_plain(self) -> dict[str, Any]:
        """What ``json.dumps`` takes."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Job:
        """Returns the Job that ``to_plain`` was called on."""
        given = dict(plain)
        given["arm"], given["setup"] = Arm(**given["arm"]), Setup(**given["setup"])
        given["command"] = tuple(given["command"])
        return cls(**given)


@dataclass(frozen=True)
class Step:
    """What one step did.

    ``norm`` is unscaled and before clipping, ``rate`` the optimizer's; ``number`` counts from 1.
    """

    number: int
    loss: float
    scale: float
    norm: float
    clipped: bool
    skipped: bool
    rate: float


@dataclass(frozen=True)
class Result:
    """One arm with one seed, in numbers.

    Args:
        arm: its name.
        seed: of the parameters and the batches.
        steps: how many were taken or skipped; fewer than planned if it was stopped.
        first_loss: the loss of the first step, before anything was learned.
        final_loss: the mean loss of the last ``window`` steps; NaN if one of them was not finite.
        window: a sixth of the steps, 50 at most.
        first_nonfinite: the first step whose loss was not finite; None if all were.
        last_finite: the last step whose loss was finite; 0 if none was.
        least_loss: the least of all losses that were finite.
        largest_loss: the largest of them.
        skipped: steps that left the parameters as they were.
        clipped: steps whose gradients were made smaller.
        scale_first: the scale of the first step.
        scale_last: the scale of the last step.
        rate_first: the learning rate of the first step.
        rate_least: the least of all.
        rate_largest: the largest of all.
        norm_first: the norm of all gradients at the first step.
        norm_median: its median, of the steps where it was finite; NaN if none was.
        norm_largest: its largest finite value.
        lost: the share of the gradients entering the last layer that fp16 rounded to zero at the
            first step; None where nothing is rounded.
        stopped: why it ended early; None if it did not.
        parameters: how many numbers the model trains.
        seconds: wall-clock time of the loop.
        path: its run file.
    """

    arm: str
    seed: int
    steps: int
    first_loss: float
    final_loss: float
    window: int
    first_nonfinite: int | None
    last_finite: int
    least_loss: float
    largest_loss: float
    skipped: int
    clipped: int
    scale_first: float
    scale_last: float
    rate_first: float
    rate_least: float
    rate_largest: float
    norm_first: float
    norm_median: float
    norm_largest: float
    lost: float | None
    stopped: str | None
    parameters: int
    seconds: float
    path: str

    @property
    def diverged(self) -> bool:
        """Whether it ended worse than it began, or as NaN or Inf."""
        return math.isnan(self.final_loss) or self.final_loss > self.first_loss

    @property
    def learned(self) -> bool:
        """Whether it ended better than it began."""
        return self.final_loss < self.first_loss

    @property
    def lost_for_good(self) -> bool:
        """Whether a loss was not finite and none after it was."""
        return self.first_nonfinite is not None and self.last_finite < self.first_nonfinite

    def to_plain(self) -> dict[str, Any]:
        """What ``json.dumps`` takes; a number that is not finite becomes None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Result:
        """Returns the Result that ``to_plain`` was called on; None becomes NaN."""
        given: dict[str, Any] = dict(plain)
        for name, value in plain.items():
            if value is None and name not in ("first_nonfinite", "lost", "stopped"):
                given[name] = math.nan
        return cls(**given)


def summarize(
    job: Job,
    steps: Sequence[Step],
    *,
    lost: float | None,
    stopped: str | None,
    parameters: int,
    seconds: float,
) -> Result:
    """Sums up the steps of a job; there must be at least one."""
    window = min(LONGEST_WINDOW, math.ceil(len(steps) / 6))
    losses = [step.loss for step in steps]
    norms = [step.norm for step in steps if math.isfinite(step.norm)]
    finite = [step for step in steps if math.isfinite(step.loss)]
    final = sum(losses[-window:]) / window
    return Result(
        arm=job.arm.name,
        seed=job.seed,
        steps=len(steps),
        first_loss=losses[0],
        final_loss=final if math.isfinite(final) else math.nan,
        window=window,
        first_nonfinite=next((s.number for s in steps if not math.isfinite(s.loss)), None),
        last_finite=finite[-1].number if finite else 0,
        least_loss=min((step.loss for step in finite), default=math.nan),
        largest_loss=max((step.loss for step in finite), default=math.nan),
        skipped=sum(step.skipped for step in steps),
        clipped=sum(step.clipped for step in steps if not step.skipped),
        scale_first=steps[0].scale,
        scale_last=steps[-1].scale,
        rate_first=steps[0].rate,
        rate_least=min(step.rate for step in steps),
        rate_largest=max(step.rate for step in steps),
        norm_first=steps[0].norm,
        norm_median=median(norms) if norms else math.nan,
        norm_largest=max(norms, default=math.nan),
        lost=lost,
        stopped=stopped,
        parameters=parameters,
        seconds=seconds,
        path=job.path,
    )
