"""What travels through the demo: Settings enter, a Step a step, a Summary leaves. Data only.

No torch here, so that ``gradilocks demo --help`` answers at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

LONGEST_LOSS_WINDOW = 50
"""The last loss is a mean over a sixth of the run, and over no more steps than this."""


SMALLEST = 2.0**-126
LARGEST = 2.0**127
"""Between the two a scale or a limit, and its reciprocal, are both normal float32 numbers."""


@dataclass(frozen=True)
class Settings:
    """One run of the demo.

    Args:
        steps: how many optimizer steps.
        seed: of the initial parameters and of the batches.
        accumulation: how many equal micro-batches stand for a global batch. One is computed; its
            loss is divided by this count and its gradient multiplied by it. The gradient in exact
            arithmetic is the same for every count; in fp16 it shrinks on its way and may be lost.
        scale: ``"dynamic"``, a number for a static scale, or None for no scaling.
        initial_scale: where the dynamic scale starts.
        growth_interval: the dynamic scale doubles after this many clean steps in a row. The
            library's default is 2,000; 300 steps are too few to see that.
        clip: the largest norm of all gradients together, or None.
        rows: windows of text in a micro-batch.
        length: characters in a window.
        width: the size of the residual stream.
        layers: transformer blocks.
        heads: attention heads a block.
        learning_rate: of AdamW.
    """

    steps: int = 300
    seed: int = 0
    accumulation: int = 1024
    scale: float | Literal["dynamic"] | None = "dynamic"
    initial_scale: float = 2.0**16
    growth_interval: int = 15
    clip: float | None = 1.0
    rows: int = 32
    length: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation", "growth_interval", "rows", "length", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}.")
        for name, value in (("scale", self.scale), ("clip", self.clip)):
            if isinstance(value, (int, float)) and not SMALLEST <= value <= LARGEST:
                raise ValueError(
                    f"{name} must be between {SMALLEST:.3g} and {LARGEST:.3g}, got {value}."
                )
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"heads must divide width {self.width}, got {self.heads}.")


@dataclass(frozen=True)
class Step:
    """What one step did. ``norm`` is unscaled and before clipping; ``number`` counts from 1."""

    number: int
    loss: float
    scale: float
    norm: float
    clipped: bool
    skipped: bool
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Underflow:
    """Shares of the gradients entering the last layer, at the first step, that fp16 zeroes."""

    unscaled: float
    scaled: float


@dataclass(frozen=True)
class Summary:
    """A run, or the part of it that was done, in a few numbers.

    Args:
        settings: what was asked for.
        steps: how many steps were done; with an interrupt fewer than asked for.
        skipped: how many of them left the parameters as they were.
        clipped: how many had their gradients scaled down to the limit.
        scale_first: the scale of the first step.
        scale_last: the scale of the last step.
        loss_first: the loss of the first step, before anything was learned.
        loss_last: the mean loss of the last ``loss_window`` steps.
        loss_window: a sixth of the steps, 50 at most.
        culprits: parameter name to how many skipped steps it was a culprit of.
        underflow: what fp16 rounds to zero at the first step; None if it was not measured.
        parameters: how many numbers the model trains; 0 if it was not counted.
        seconds: wall-clock time of the training loop.
    """

    settings: Settings
    steps: int
    skipped: int
    clipped: int
    scale_first: float
    scale_last: float
    loss_first: float
    loss_last: float
    loss_window: int
    culprits: Mapping[str, int] = field(default_factory=dict)
    underflow: Underflow | None = None
    parameters: int = 0
    seconds: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """Returns what ``json.dumps`` takes; a loss that is not finite becomes None."""
        plain = asdict(self)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in plain.items()
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Summary:
        """Returns the Summary that ``to_plain`` was called on; a None loss becomes NaN."""
        values = {entry.name: plain[entry.name] for entry in fields(cls)}
        values["settings"] = Settings(**values["settings"])
        if values["underflow"] is not None:
            values["underflow"] = Underflow(**values["underflow"])
        for name in ("loss_first", "loss_last"):
            if values[name] is None:
                values[name] = math.nan
        return cls(**values)


def summarize(
    settings: Settings,
    steps: Sequence[Step],
    *,
    underflow: Underflow | None = None,
    parameters: int = 0,
    seconds: float = 0.0,
) -> Summary:
    """Sums up the steps done so far; there must be at least one."""
    window = min(LONGEST_LOSS_WINDOW, math.ceil(len(steps) / 6))
    culprits = Counter(name for step in steps if step.skipped for name in step.culprits)
    return Summary(
        settings=settings,
        steps=len(steps),
        skipped=sum(step.skipped for step in steps),
        clipped=sum(step.clipped for step in steps),
        scale_first=steps[0].scale,
        scale_last=steps[-1].scale,
        loss_first=steps[0].loss,
        loss_last=sum(step.loss for step in steps[-window:]) / window,
        loss_window=window,
        culprits=dict(culprits),
        underflow=underflow,
        parameters=parameters,
        seconds=seconds,
    )
