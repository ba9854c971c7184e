"""Learning-rate schedules that do not advance for skipped steps."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from gradilocks.step.host_copy import LAG, HostCopy

_DEBT = "gradilocks_debt"


class Scheduler:
    """Wrapper of a torch LR scheduler that does not advance for skipped steps. Created by `control.scheduler(...)`.

    Call `step()` after `control.step()`, or once per epoch: the schedule advances unless every step since the last call
    was skipped. On a GPU the host does not wait for the skip flag, which arrives a step or two later. By then the
    schedule has advanced once too often, so the next call does not advance it. With several ranks, every rank reads the
    flag exactly four steps later. Attributes of the inner scheduler, such as `get_last_lr`, are forwarded.

    Args:
        inner: a torch LR scheduler, or any object with `step` and `state_dict`.
        has_ranks: True if several ranks must keep the same learning rate.
    """

    def __init__(self, inner: Any, *, has_ranks: bool = False) -> None:
        is_scheduler = callable(getattr(inner, "step", None)) and hasattr(inner, "state_dict")
        if not is_scheduler or isinstance(inner, torch.optim.Optimizer):
            raise TypeError(
                "scheduler() takes an LR scheduler such as torch.optim.lr_scheduler.CosineAnnealingLR(...), "
                f"got {type(inner).__name__}."
            )
        self._inner, self._has_ranks = inner, has_ranks
        self._since_call: list[HostCopy] = []
        self._was_taken = False
        """True if a step was taken since the last call, among those whose flags are no longer kept."""
        self._pending: deque[tuple[int, list[HostCopy]]] = deque()
        self._calls = 0
        self._calls_ahead = 0

    def note(self, skipped: Tensor) -> None:
        """Records the 0-d skip flag of a step. Called by the control after each step."""
        if skipped.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # Replays of a captured step count as taken, even if skipped.
        self._since_call.append(HostCopy(skipped))
        if len(self._since_call) > 64:  # A copy from 64 steps ago has arrived.
            self._was_taken = self._was_taken or not self._since_call.pop(0).read()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances the schedule if a step was taken since the last call; arguments go to the inner scheduler."""
        self._calls += 1
        self._read_pending(wait=False)
        copies, self._since_call = self._since_call, []
        was_taken, self._was_taken = self._was_taken, False
        if copies and not was_taken and all(copy.is_immediate and copy.read() for copy in copies):
            return
        if self._calls_ahead:
            self._calls_ahead -= 1
        else:
            self._inner.step(*args, **kwargs)
        if not was_taken and not all(copy.is_immediate for copy in copies):
            self._pending.append((self._calls, copies))

    def _read_pending(self, *, wait: bool) -> None:
        """Reads the skip flags that have arrived and counts the calls that should not have advanced the schedule."""
        while self._pending:
            call, copies = self._pending[0]
            has_lagged = self._calls - call >= LAG
            is_ready = has_lagged if self._has_ranks else all(copy.has_arrived() for copy in copies)
            if not (is_ready or wait):
                return
            self._pending.popleft()
            self._calls_ahead += bool(copies) and all(copy.read() for copy in copies)

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner scheduler's state and the number of advances to omit. A bare scheduler can load it."""
        self._read_pending(wait=True)
        return {**self._inner.state_dict(), **({_DEBT: self._calls_ahead} if self._calls_ahead else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the `state_dict()` of this class or of a bare inner scheduler."""
        state = dict(state_dict)
        self._calls_ahead = int(state.pop(_DEBT, 0))
        self._inner.load_state_dict(state)
        self._pending.clear()
        self._since_call = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)
