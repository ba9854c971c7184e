"""A learning-rate schedule that does not run ahead: it steps for steps that were taken.

Whether a step was taken is known on the device. It is sent to the host without waiting and looked
at when it has arrived; until then the step counts as taken. If it was not, the schedule stands
still once later, so that it is never more than the steps on their way ahead of the optimizer.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from gradilocks.errors import BadState
from gradilocks.kernels.captured import capturing
from gradilocks.record import fetch

__all__ = ["Flag", "Listeners", "Scheduler"]

_logger = logging.getLogger("gradilocks")


class Flag:
    """Whether one step was skipped, on its way to the host."""

    def __init__(self, row: Tensor) -> None:
        self._known: float | None = None
        self._event: Any = None
        if capturing():
            self._known = 0.0  # A replay tells nobody.
        elif row.device.type == "cuda":
            self._host = torch.empty(1, dtype=row.dtype, device="cpu", pin_memory=True)
            self._host.copy_(row[:1], non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(row.device))
        else:
            self._known = fetch(row[:1])[0]

    def skipped(self, *, wait: bool = False) -> bool | None:
        """None if it is not known yet."""
        if self._known is None and (wait or self._event.query()):
            if wait:
                self._event.synchronize()
            self._known = fetch(self._host)[0]
        return None if self._known is None else self._known > 0

    def overflowed(self) -> bool | None:
        """Whether it was skipped for NaN or Inf, not by a clip policy; None if not known yet."""
        skipped = self.skipped()
        return skipped if skipped is None else skipped and self._known != 2


class Listeners(weakref.WeakSet["Scheduler"]):
    """The schedules of a control; a copy of the control has none."""

    def __reduce__(self) -> Any:
        return Listeners, ()


class Scheduler:
    """One of torch's LR schedulers, stepped only for steps that a GradientControl has taken.

    Made by `control.scheduler(...)`. Call `step()` where the scheduler's own would be called:
    after `control.step()`, or once an epoch, which counts if one of its steps was taken. On a GPU
    a skipped step may be learned of one step late: then the schedule has moved on once too often,
    says so through `logging`, and stands still the next time. Steps that are replayed in a CUDA
    graph count as taken.

    Example:
        >>> schedule = control.scheduler(torch.optim.lr_scheduler.LinearLR(optimizer))
        >>> control.step()
        >>> schedule.step()
    """

    def __init__(self, scheduler: Any) -> None:
        fits = callable(getattr(scheduler, "step", None)) and hasattr(scheduler, "state_dict")
        if not fits or isinstance(scheduler, torch.optim.Optimizer):
            raise TypeError(
                "scheduler() takes an LR scheduler such as "
                f"torch.optim.lr_scheduler.CosineAnnealingLR(...), got {type(scheduler).__name__}."
            )
        self._scheduler = scheduler
        self._since: list[Flag] = []
        self._waiting: deque[list[Flag]] = deque()
        self._owed = 0
        self._replayed = False

    @property
    def ahead(self) -> int:
        """How many steps the schedule is known to be ahead and will stand still for."""
        return self._owed

    def note(self, row: Tensor) -> None:
        """For the control: a step has been judged."""
        self._replayed = self._replayed or capturing()
        self._since.append(Flag(row))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the schedule if a step has been taken since the last call.

        Args:
            args: handed to the scheduler's `step`, as the metric of ReduceLROnPlateau.
            kwargs: likewise.
        """
        self._settle()
        if not self._since and not self._replayed:
            return  # No step has been tried since the last call.
        flags, self._since = self._since, []
        told = [flag.skipped() for flag in flags]
        if flags and all(told):
            return
        if flags and False not in told:  # Not known yet: taken, until we hear otherwise.
            self._waiting.append(flags)
        if self._owed:
            self._owed -= 1
            return
        self._say_stepped()
        self._scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's, and how far it is ahead. Waits for steps that are on their way."""
        self._settle(wait=True)
        return {"scheduler": self._scheduler.state_dict(), "ahead": self._owed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from `state_dict()`, or from that of the scheduler itself."""
        if set(state_dict) == {"scheduler", "ahead"}:
            ahead = state_dict["ahead"]
            if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
                raise BadState(f"ahead in the state_dict must be 0 or more, got {ahead!r}.")
            self._scheduler.load_state_dict(state_dict["scheduler"])
            self._owed = ahead
        else:
            self._scheduler.load_state_dict(state_dict)
            self._owed = 0
        self._since, self._waiting = [], deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def _settle(self, *, wait: bool = False) -> None:
        """Looks at the steps that were not known, oldest first, as far as they have arrived."""
        while self._waiting:
            told = [flag.skipped(wait=wait) for flag in self._waiting[0]]
            if None in told and False not in told:
                return
            self._waiting.popleft()
            if all(told):
                self._owed += 1
                _logger.info(
                    "the learning-rate schedule is a step ahead: a step that it counted was "
                    "skipped. It stands still once."
                )

    def _say_stepped(self) -> None:
        # torch warns if it finds that no step came first, though the control has seen to it.
        for optimizer in {id(o): o for o in _optimizers(self._scheduler)}.values():
            optimizer._opt_called = True


def _optimizers(scheduler: Any) -> list[Any]:
    inner = [each for s in getattr(scheduler, "_schedulers", ()) for each in _optimizers(s)]
    optimizer = getattr(scheduler, "optimizer", None)
    return inner if optimizer is None else [optimizer, *inner]
