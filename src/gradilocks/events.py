"""Step records, which a control passes to its subscribers after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from gradilocks.outcome import Outcome


@dataclass(frozen=True)
class StepRecord:
    """Record of one step of a GradientControl. Creating it does not wait for the device."""

    control: Any
    """The GradientControl."""
    outcome: Outcome
    """Norm, scale, limit, skip flag and culprits, read lazily."""
    loss: Tensor | None
    """0-d: sum of the unscaled losses given to `backward` since the previous step; None if there was none."""
    optimizers: tuple[int, ...]
    """Indices of the optimizers that stepped."""
    learning_rates: tuple[Any, ...]
    """Learning rate of each of their param groups, a number or a tensor."""
    time: float
    """`time.time()` at the end of the step."""
    is_unscaled: bool = False
    """True if the outcome's statistics are of unscaled gradients: after `unscale_`, or without scaling."""


Callback = Callable[[StepRecord], object]

PROCESS_WIDE: list[Callback] = []
"""Called after every step of every control in this process."""


def subscribe(callback: Callback, callbacks: list[Callback] = PROCESS_WIDE) -> Callable[[], None]:
    """Adds a callback to a list; returns a function that removes it."""
    if not callable(callback):
        raise TypeError(f"subscribe() takes a function of one StepRecord, got {type(callback).__name__}.")
    callbacks.append(callback)

    def unsubscribe() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return unsubscribe
