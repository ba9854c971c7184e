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
    """True if `unscale_` was called, so that the outcome's statistics are of unscaled gradients."""


Callback = Callable[[StepRecord], object]

_process_wide: list[Callback] = []


def subscribe_all(callback: Callback) -> Callable[[], None]:
    """Calls `callback` after every step of every control in this process; returns a function that unsubscribes it."""
    return _subscribe(_process_wide, callback)


class Subscribers:
    """The callbacks of one control."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []

    def __bool__(self) -> bool:
        return bool(self._callbacks or _process_wide)

    def add(self, callback: Callback) -> Callable[[], None]:
        """Registers a callback; returns a function that removes it."""
        if not callable(callback):
            raise TypeError(f"subscribe() takes a function of one StepRecord, got {type(callback).__name__}.")
        return _subscribe(self._callbacks, callback)

    def send(self, record: StepRecord) -> None:
        """Calls every callback with the record."""
        for callback in [*self._callbacks, *_process_wide]:
            callback(record)

    def log(self, numbers: dict[str, Any]) -> None:
        """Passes logged numbers to every callback that has a `log` method, as recorders do."""
        for callback in [*self._callbacks, *_process_wide]:
            log = getattr(callback, "log", None)
            if log is not None:
                log(**numbers)


def _subscribe(callbacks: list[Callback], callback: Callback) -> Callable[[], None]:
    callbacks.append(callback)

    def unsubscribe() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return unsubscribe
