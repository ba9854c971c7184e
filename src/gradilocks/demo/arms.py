"""What is compared, and what comes of it: an Experiment has Arms, a Setup and seeds; each arm with
each seed is a Job, which leaves a Step a step and a Result at the end.

Data only, and no torch, so that ``gradilocks demo --help`` answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

MADE_BY = "gradilocks demo"
"""How the files of the demo say whose they are."""
LONGEST_WINDOW = 50
"""The final loss is a mean over a sixth of the run, and over no more steps than this."""


@dataclass(frozen=True)
class Setup:
    """What every arm of an experiment has in common."""

    steps: int = 300  # of the optimizer
    accumulation: int = 1024  # equal micro-batches in a global batch; one of them is computed
    rows: int = 32  # windows of text in a micro-batch
    length: int = 64  # characters in a window; a character is a token here
    width: int = 64  # of the residual stream
    layers: int = 2  # transformer blocks
    heads: int = 4  # of attention, a block

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation", "rows", "length", "width", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"heads must divide width {self.width}, got {self.heads}.")

    @property
    def micro_batch(self) -> int:
        """Tokens in the micro-batch that is computed."""
        return self.rows * self.length

    @property
    def global_batch(self) -> int:
        """Tokens in the global batch that it stands for."""
        return self.micro_batch * self.accumulation

    @property
    def computed(self) -> str:
        """Says exactly what a step computes."""
        times = f"{self.accumulation:,}"
        return (
            f"Each step computes one micro-batch of {self.rows} x {self.length} = "
            f"{self.micro_batch:,} characters. It stands for {times} equal ones, a global batch of "
            f"{self.global_batch:,}: the loss is divided by {times} before the backward pass, as "
            f"in accumulation, and each parameter's gradient is multiplied by {times} in fp32 "
            f"after it, in place of adding up {times} equal ones. What fp16 has rounded to zero in "
            "between stays zero."
        )


@dataclass(frozen=True)
class Arm:
    """One way to train: what an arm does differently from the others is in here, and only that."""

    name: str  # as --arm and the files have it
    title: str  # as people read it
    format: Literal["fp32", "fp16"]  # what matrix products are stored in
    scaled: bool  # by DynamicScale as it comes: from 2^16, doubled after 2,000 clean steps
    clip: float | None  # the largest norm of all gradients together
    optimizer: Literal["AdamW", "SGD"]  # torch's class, with its own defaults but for the rate
    rate: float  # the same from the first step to the last: no warm-up
    source: str  # where optimizer, rate and limit are from


_USUAL = "With this limit it is what GPTs of about this size are usually trained with."
# --model Transformer --lr 5, and --clip 0.25, which is the example's own.
_EXAMPLE = (
    "The rate that PyTorch's own word language model example (examples/word_language_model) gives "
    "for its Transformer; the example clips, and the limit, where there is one, is its own too."
)
ARMS = (
    Arm("fp32", "fp32", "fp32", False, 1.0, "AdamW", 2e-3, _USUAL),
    Arm("too-small", "too small", "fp16", False, 1.0, "AdamW", 2e-3, _USUAL),
    Arm("just-right", "just right", "fp16", True, 1.0, "AdamW", 2e-3, _USUAL),
    Arm("too-large", "too large", "fp16", True, None, "SGD", 5.0, _EXAMPLE),
    Arm("clipped", "too large, clipped", "fp16", True, 0.25, "SGD", 5.0, _EXAMPLE),
)


def arm_named(name: str) -> Arm:
    """Returns the arm of that name.

    Raises:
        ValueError: there is none.
    """
    for arm in ARMS:
        if arm.name == name:
            return arm
    known = ", ".join(arm.name for arm in ARMS)
    raise ValueError(f"arm must be one of {known}, got {name!r}.")


def finite_or_none(value: Any) -> Any:
    """Returns what JSON has in place of a value: it knows no NaN and no Inf."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


@dataclass(frozen=True)
class Experiment:
    """The arms that are compared, each with each seed."""

    arms: Sequence[Arm]
    seeds: Sequence[int]
    setup: Setup
    folder: Path
    """Where everything is written."""
    command: tuple[str, ...] = ()

    @property
    def jobs(self) -> list[Job]:
        """Seed by seed, the arms in their order."""
        return [
            Job(arm, seed, self.setup, str(self.run_file(arm, seed)), self.command)
            for seed in self.seeds
            for arm in self.arms
        ]

    def run_file(self, arm: Arm, seed: int) -> Path:
        """Where the run file of an arm and a seed goes."""
        return self.folder / f"{arm.name}-{seed}.jsonl"

    def page(self, arm: Arm) -> Path:
        """Where an arm's own report goes."""
        return self.folder / f"{arm.name}.html"


@dataclass(frozen=True)
class Step:
    """What one step did."""

    number: int  # from 1
    loss: float
    scale: float
    norm: float  # unscaled and before clipping
    clipped: bool
    skipped: bool
    rate: float  # the optimizer's


@dataclass(frozen=True)
class Result:
    """One arm with one seed, in numbers."""

    arm: str  # its name
    seed: int  # of the parameters and the batches
    steps: int  # taken or skipped; fewer than planned if it was stopped
    first_loss: float  # before anything was learned
    final_loss: float  # the mean of the last `window` steps; NaN if one of them was not finite
    window: int  # a sixth of the steps, 50 at most
    first_nonfinite: int | None  # the first step whose loss was not finite; None if all were
    last_finite: int  # the last step whose loss was finite; 0 if none was
    least_loss: float  # of those that were finite
    largest_loss: float  # of those that were finite
    skipped: int  # steps that left the parameters as they were
    clipped: int  # steps whose gradients were made smaller
    scale_first: float
    scale_last: float
    rate_first: float  # the learning rate
    rate_least: float
    rate_largest: float
    norm_first: float  # of all gradients together
    norm_median: float  # of the steps where it was finite; NaN if none was
    norm_largest: float  # of those, too
    lost: float | None  # the share of the gradients entering the last layer that fp16 rounded to
    # zero at the first step; None where nothing is rounded
    stopped: str | None  # why it ended early; None if it did not
    parameters: int  # how many numbers the model trains
    seconds: float  # wall-clock time of the loop
    path: str  # its run file

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
        return {name: finite_or_none(value) for name, value in asdict(self).items()}

    @classmethod
    def from_steps(
        cls,
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
        return cls(
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
