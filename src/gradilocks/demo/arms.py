"""What is compared: the Setup that all arms share, and the Arms with what they differ in.

No torch here, so that ``gradilocks demo --help`` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ARMS", "MADE_BY", "Arm", "Setup", "arm_named", "computed"]

MADE_BY = "gradilocks demo"
"""How the files of the demo say whose they are."""


@dataclass(frozen=True)
class Setup:
    """What every arm of an experiment has in common.

    Args:
        steps: how many optimizer steps.
        accumulation: how many equal micro-batches make a global batch. One of them is computed.
        rows: windows of text in a micro-batch.
        length: characters in a window; a character is a token here.
        width: the size of the residual stream.
        layers: transformer blocks.
        heads: attention heads a block.
    """

    steps: int = 300
    accumulation: int = 1024
    rows: int = 32
    length: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4

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


@dataclass(frozen=True)
class Arm:
    """One way to train: what an arm does differently from the others is in here, and only that.

    Args:
        name: as ``--arm`` and the files have it.
        title: as people read it.
        format: what matrix products are stored in.
        scaled: whether the loss is scaled, by ``DynamicScale`` as it comes: from 2^16, doubled
            after 2,000 clean steps, halved after an overflow.
        clip: the largest norm of all gradients together, or None.
        optimizer: torch's class, with its own defaults but for the rate.
        rate: the learning rate, the same from the first step to the last: no warm-up.
        source: where optimizer, rate and limit are from.
    """

    name: str
    title: str
    format: Literal["fp32", "fp16"]
    scaled: bool
    clip: float | None
    optimizer: Literal["AdamW", "SGD"]
    rate: float
    source: str


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

_COMPUTED = (
    "Each step computes one micro-batch of {rows} x {length} = {micro:,} characters. It stands for "
    "{accumulation:,} equal ones, a global batch of {all:,}: the loss is divided by "
    "{accumulation:,} before the backward pass, as in accumulation, and each parameter's gradient "
    "is multiplied by {accumulation:,} in fp32 after it, in place of adding up {accumulation:,} "
    "equal ones. What fp16 has rounded to zero in between stays zero."
)


def computed(setup: Setup) -> str:
    """Says exactly what a step computes."""
    return _COMPUTED.format(
        rows=setup.rows,
        length=setup.length,
        micro=setup.micro_batch,
        accumulation=setup.accumulation,
        all=setup.global_batch,
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
