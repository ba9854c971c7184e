"""A learning-rate schedule that does not run ahead: it steps for steps that were taken.

Whether a step was taken is known on the device. It is sent to the host without waiting and looked
at when it has arrived; until then the step counts as taken. If it was not, the schedule stands
still once later, so that it is never more than the steps on their way ahead of the optimizer.
Beside other ranks it is looked at after a fixed number of steps, as all must have the same rate.
"""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import inner_schedules, note_stepped, sees_steps
from gradilocks.errors import BadState
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.ranks.layout import has_other_ranks
from gradilocks.step.host_copy import LAG, HostCopy

__all__ = ["Flag", "Listeners", "Scheduler"]

_logger = logging.getLogger("gradilocks")
_PENDING = "gradilocks"
_OWN = frozenset(
    ("_scheduler", "_control", "_since", "_unconfirmed", "_ahead", "_replayed", "_together")
)
"""The attributes of a Scheduler; all others are those of the one inside."""


class Flag:
    """Whether one step was skipped, on its way to the host."""

    def __init__(self, row: Tensor | None, *, known: float | None = None) -> None:
        self._known = known
        if row is not None and capturing():
            self._known = 0.0  # A replay tells nobody.
        elif row is not None:
            self._copy = HostCopy(row[:1])

    @property
    def at_once(self) -> bool:
        """Whether it has been known from the start, as on a CPU."""
        return self._known is not None or self._copy.at_once

    def skipped(self, *, wait: bool = False) -> bool | None:
        """None if it is not known yet."""
        if self._known is None and (wait or self._copy.arrived()):
            if wait:
                self._copy.wait()
            (self._known,) = self._copy.read()
        return None if self._known is None else self._known > 0

    def overflowed(self, *, wait: bool = False) -> bool | None:
        """Whether it was skipped for NaN or Inf, not by a clip policy; None if not known yet."""
        skipped = self.skipped(wait=wait)
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
    says so through `logging`, and stands still the next time. Beside other ranks it is learned of
    four steps late, on all of them, so that no two ever have different rates. Steps that are
    replayed in a CUDA graph count as taken.

    Example:
        >>> schedule = control.scheduler(torch.optim.lr_scheduler.LinearLR(optimizer))
        >>> control.step()
        >>> schedule.step()
    """

    def __init__(
        self, scheduler: Any, control: Any, params: Iterable[Tensor], *, every_call: bool = False
    ) -> None:
        fits = callable(getattr(scheduler, "step", None)) and hasattr(scheduler, "state_dict")
        if not fits or isinstance(scheduler, torch.optim.Optimizer):
            raise TypeError(
                "scheduler() takes an LR scheduler such as "
                f"torch.optim.lr_scheduler.CosineAnnealingLR(...), got {type(scheduler).__name__}."
            )
        mine = {id(param) for param in params}
        for optimizer in _optimizers(scheduler):
            if not mine.intersection(map(id, _parameters([optimizer]))):
                raise ValueError(
                    f"{type(scheduler).__name__} is a schedule of an optimizer that this control "
                    "does not step, so its steps say nothing about it. Call scheduler() of the "
                    "control that steps it."
                )
        self._scheduler = scheduler
        self._control: Callable[[], Any] = weakref.ref(control)
        self._since: list[Flag] = []
        self._unconfirmed: deque[list[Flag]] = deque()
        self._ahead = 0
        self._replayed = False
        self._every_call = every_call
        self._together = has_other_ranks()
        if _PENDING in getattr(scheduler, "__dict__", ()):  # It has loaded a state of ours.
            _, pending = _split_state(scheduler.state_dict())
            self._resume(*_check_pending(pending))
            del scheduler.__dict__[_PENDING]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the scheduler inside: frameworks ask for isinstance(..., LRScheduler)."""
        return type(self._scheduler)

    def is_of(self, optimizers: Iterable[Any]) -> bool:
        """Whether it schedules one of these, or what wraps one."""
        theirs = {id(param) for param in _parameters(optimizers)}
        return any(id(param) in theirs for param in _parameters(_optimizers(self._scheduler)))

    @property
    def ahead(self) -> int:
        """How many steps the schedule is known to be ahead and will stand still for."""
        return self._ahead

    def note(self, row: Tensor) -> None:
        """Called by the control when a step has been judged.

        Args:
            row: the numbers of the step, of which the first says whether it was skipped.
        """
        self._replayed = self._replayed or capturing()
        self._since = _fewest([*self._since, Flag(row)])

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the schedule if a step has been taken since the last call.

        Args:
            args: handed to the scheduler's `step`, as the metric of ReduceLROnPlateau.
            kwargs: likewise.
        """
        self._settle()
        if not self._since and not self._replayed and not self._every_call:
            return  # No step has been tried since the last call.
        flags = self._since
        # Of ranks one may know already what another does not.
        told = [None if self._together and not f.at_once else f.skipped() for f in flags]
        skipped = bool(flags) and all(told)
        if not skipped and not self._ahead:
            with self._without_warning():  # First: if it raises, nothing is counted.
                self._scheduler.step(*args, **kwargs)
        elif not skipped:
            self._ahead -= 1
        self._since = []
        if not skipped and flags and False not in told:
            self._unconfirmed.append(flags)  # Not known yet: taken, until we hear otherwise.

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, which a bare scheduler loads as well; waits for steps on their way.

        If the schedule is ahead, or a step has not been counted yet, that is said under the key
        "gradilocks", which torch's schedulers carry along and do not look at.
        """
        self._settle(wait=True)
        told = [flag.skipped(wait=True) for flag in self._since]
        since = None if not told else "skipped" if all(told) else "taken"
        saved = dict(self._scheduler.state_dict())
        if self._ahead or since is not None:
            saved[_PENDING] = {"ahead": self._ahead, "since": since, "at": _counters(saved)}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from `state_dict()`, or from that of the scheduler itself."""
        inner, pending = _split_state(state_dict)
        if not isinstance(inner, Mapping) or not set(inner) & set(self._scheduler.state_dict()):
            raise BadState(
                f"the state_dict is none of {type(self._scheduler).__name__}: {inner!r:.80}."
            )
        ahead, since = _check_pending(pending)
        self._scheduler.load_state_dict(inner)
        self._resume(ahead, since)

    def _resume(self, ahead: int, since: str | None) -> None:
        self._ahead = ahead
        self._since = [] if since is None else [Flag(None, known=float(since == "skipped"))]
        self._unconfirmed = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> Scheduler:
        """With its control, as torch's schedules are copied with their optimizer."""
        control = copy.deepcopy(self._control(), memo)
        made = Scheduler.__new__(Scheduler)
        memo[id(self)] = made
        made._scheduler = copy.deepcopy(self._scheduler, memo)
        told = [flag.skipped(wait=True) for flag in self._since]
        self._settle(wait=True)
        made._since = [Flag(None, known=float(bool(skipped))) for skipped in told]
        made._unconfirmed, made._ahead, made._replayed = deque(), self._ahead, self._replayed
        made._together, made._every_call = self._together, self._every_call
        made._control = (lambda: None) if control is None else weakref.ref(control)
        if control is not None:
            control._schedules.add(made)
        return made

    def __reduce__(self) -> Any:
        raise TypeError(
            "a schedule of a GradientControl cannot be pickled. Save its state_dict() instead."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the scheduler holds is set there, as Accelerate does with `_step_count`."""
        inner = self.__dict__.get("_scheduler")
        if name not in _OWN and name in getattr(inner, "__dict__", ()):
            setattr(inner, name, value)
        else:
            object.__setattr__(self, name, value)

    def _settle(self, *, wait: bool = False) -> None:
        """Looks at steps that were counted unconfirmed, oldest first, as far as flags are here."""
        while self._unconfirmed:
            if self._together and not wait and len(self._unconfirmed) <= LAG:
                return
            told = [flag.skipped(wait=wait or self._together) for flag in self._unconfirmed[0]]
            if None in told and False not in told:
                return
            self._unconfirmed.popleft()
            if all(told):
                self._ahead += 1
                _logger.info(
                    "the learning-rate schedule is a step ahead: a step that it counted was "
                    "skipped. It stands still once."
                )

    @contextmanager
    def _without_warning(self) -> Iterator[None]:
        """torch warns if it does not see that a step came first; the control has seen to it."""
        seen = True
        for optimizer in {id(o): o for o in _optimizers(self._scheduler)}.values():
            note_stepped(optimizer)
            seen = seen and sees_steps(optimizer)
        if seen:
            yield
            return
        with warnings.catch_warnings():  # An optimizer that was copied, or wrapped anew.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
            yield


def _fewest(flags: list[Flag]) -> list[Flag]:
    """As few flags as say the same: one that was taken, or those that are not known yet.

    An epoch has many steps, and each flag on its way holds pinned memory and an event.
    """
    for place, flag in enumerate(flags):
        told = flag.skipped()
        if told is False:
            return [flag]
        if told is None:  # Later ones arrive later.
            return flags[max(place - 1, 0) :]
    return flags[-1:]


def _optimizers(scheduler: Any) -> list[Any]:
    inner = [each for s in inner_schedules(scheduler) for each in _optimizers(s)]
    optimizer = getattr(scheduler, "optimizer", None)
    return inner if optimizer is None else [optimizer, *inner]


def _parameters(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _counters(state: Mapping[str, Any]) -> list[Any]:
    """Where a schedule stands, and those that it is made of."""
    inner = [each for s in state.get("_schedulers", ()) for each in _counters(s)]
    return [state.get("last_epoch"), state.get("_step_count"), *inner]


def _split_state(state: Any) -> tuple[Any, Mapping[str, Any]]:
    """A state of ours or of torch's → that of the scheduler itself, and what we said beside it."""
    if not isinstance(state, Mapping):
        return state, {}
    if set(state) in ({"scheduler", "ahead"}, {"scheduler", "ahead", "since"}):
        return state["scheduler"], state  # As version 0.1.0 saved it.
    inner = {key: value for key, value in state.items() if key != _PENDING}
    pending = state.get(_PENDING, {})
    if not isinstance(pending, Mapping):
        raise BadState(f"{_PENDING} in the state_dict must be a dict, got {pending!r:.80}.")
    if pending.get("at") != _counters(inner):
        pending = {}  # A bare scheduler has loaded it, stepped, and saved it again.
    return inner, pending


def _check_pending(pending: Mapping[str, Any]) -> tuple[int, str | None]:
    ahead, since = pending.get("ahead", 0), pending.get("since")
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise BadState(f"ahead in the state_dict must be 0 or more, got {ahead!r}.")
    if since not in (None, "taken", "skipped"):
        raise BadState(
            f"since in the state_dict must be 'taken', 'skipped' or None, got {since!r}."
        )
    return ahead, since
