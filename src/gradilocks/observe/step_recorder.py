"""A script's losses, clips and steps enter as StepEvents; Samples for the Recorder leave.

Nothing waits for a device, nothing that the script can see changes, and a failure of ours ends the
recording and not the script: whatever listens to it has a Guard around it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_not
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradilocks._torch import unseen_by_modes
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.kernels.reference import rounded, total_norm
from gradilocks.names import Names, name_parameters, prefixed
from gradilocks.observe.between_steps import Losses, parameters_of
from gradilocks.observe.gradient_reader import ClippedGradients, GradientReader, Reading
from gradilocks.observe.process_end import SignalsHeld
from gradilocks.observe.script_models import are_whole, owners_of
from gradilocks.record import Recorder, Sample, Weights
from gradilocks.record.journal import Journal
from gradilocks.step.events import Clip, Step, StepListener
from gradilocks.step.table import every_parameter
from gradilocks.values import moved

__all__ = ["Guard", "ScriptRecorder", "StepRecorder"]


class Guard:
    """Does our own work so that the script notices nothing of it, nor of its failure.

    Args:
        on_failure: told of the first error, after which nothing is done any more.
        after_failure: called from then on whenever something was to be done; may raise.

    Attributes:
        closed: whether nothing is done any more.
        failed: whether that is so because something has failed.
    """

    def __init__(
        self,
        on_failure: Callable[[Exception], None],
        after_failure: Callable[[], None] | None = None,
    ) -> None:
        self._on_failure, self._after_failure = on_failure, after_failure
        self._pid = os.getpid()
        self.closed = self.failed = False

    def __call__(self, act: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Calls `act` with these arguments."""
        if not (self.closed or os.getpid() != self._pid or capturing()):
            with SignalsHeld(), torch.no_grad(), unseen_by_modes():
                try:
                    act(*args, **kwargs)
                except Exception as error:
                    self.closed = self.failed = True
                    self._on_failure(error)
        if self.failed and self._after_failure is not None:
            self._after_failure()

    def around(self, listener: StepListener) -> StepListener:
        """Hears what `listener` wants to hear, and hands it on."""
        guarded = StepListener()
        for name, unheard in vars(StepListener).items():
            if callable(unheard) and getattr(type(listener), name) is not unheard:
                setattr(guarded, name, functools.partial(self, getattr(listener, name)))
        return guarded


class ScriptRecorder(Recorder):
    """Closed by the end of the session alone, which knows how the script ended.

    A Recorder closes itself when Python begins to leave; threads and `atexit` functions of the
    script may still step an optimizer then.
    """

    _log_on = "first"  # The ranks of torchrun share a terminal.

    def close(self, *, status: str = "finished", exit: int = 0, error: str | None = None) -> None:
        """Leaves it open, whoever asks: `finish` closes it."""

    def finish(self, *, status: str, exit: int, error: str | None) -> None:
        """Closes it, with how the script ended."""
        super().close(status=status, exit=exit, error=error)


class _Introduction:
    """The parameters that an optimizer had when the recorder was told of it, and its index there.

    A script that trains one model after another needs their memory, but weak references to them
    would make `torch.utils.swap_tensors` refuse them. So the optimizer, which holds them anyway,
    keeps this object, and we refer weakly to that. A copy of the optimizer gets an empty list.
    """

    def __init__(self, index: int, params: list[Tensor], *, whole: bool) -> None:
        self.index, self._params, self.whole = index, params, whole
        self.ids = frozenset(map(id, params))  # Theirs as long as this object lives.

    def __reduce__(self) -> Any:
        return list, ()

    def is_of(self, params: list[Tensor]) -> bool:
        """Whether these are the same parameters."""
        return len(params) == len(self._params) and not any(map(is_not, params, self._params))

    def kept_by(self, optimizer: Any) -> Callable[[], _Introduction | None]:
        """Gives it to the optimizer, and returns what finds it as long as that lives."""
        try:
            vars(optimizer)["_gradilocks_introduction"] = self
        except TypeError:  # A class with slots.
            return lambda: self
        return weakref.ref(self)


@dataclass
class _Attempt:
    """A step that has begun."""

    index: int
    params: list[Tensor]
    detail: bool
    whole: bool
    lr: Any = None
    reading: Reading | None = None
    loss: Tensor | None = None
    weights: Weights | None = None
    clip: dict[str, Any] = field(default_factory=dict)


class StepRecorder(StepListener):
    """Records every optimizer of this process.

    `make_recorder` is called at the first step, and `warn` told if weights cannot be recorded.

    Attributes:
        losses: listens by itself to what is run backward.
        seen: how many steps of optimizers and scalers have come by.
        partly: whether some were of what this rank holds of a model on several.
    """

    def __init__(
        self, make_recorder: Callable[[], ScriptRecorder], warn: Callable[[str], None]
    ) -> None:
        self._make_recorder, self._warn = make_recorder, warn
        self._reads_weights = True
        self.seen = 0
        self.partly = False
        self._introductions: dict[int, Callable[[], _Introduction | None]] = {}  # By optimizer.
        self._attempts: dict[Step, _Attempt] = {}
        self._journals: WeakKeyDictionary[Any, Journal] = WeakKeyDictionary()  # By control.
        self._reader = GradientReader()
        self.losses = Losses()
        self._clipping: ClippedGradients | None = None
        self.recorder: ScriptRecorder | None = None

    def recorder_now(self) -> ScriptRecorder:
        """The recorder, made when it is first needed."""
        if self.recorder is None:
            self.recorder = self._make_recorder()
        return self.recorder

    # --- steps ---------------------------------------------------------------------------------

    def step_begins(self, step: Step) -> None:
        if step.is_of_control:
            self._control_begins(step)
            return
        (optimizer,) = step.optimizers
        params = list(step.parameters())
        if not params:
            return
        recorder, known = self.recorder_now(), self._introduced(optimizer, params)
        attempt = _Attempt(known.index, params, recorder.wants_detail(known.index), known.whole)
        self.partly = self.partly or not known.whole
        lr = optimizer.param_groups[0].get("lr")
        attempt.lr = lr if isinstance(lr, (int, float, Tensor)) else None
        self._attempts[step] = attempt
        if not step.has_closure:
            self._read(step, attempt)

    def _read(self, step: Step, attempt: _Attempt, loss: object = None) -> None:
        """Reads the gradients, and the loss that they came from."""
        attempt.reading = self._reader.read(attempt.params, detail=attempt.detail)
        step.statistics = attempt.reading.statistics
        attempt.loss = self.losses.take()
        if attempt.loss is None and isinstance(loss, Tensor) and loss.numel() == 1:
            attempt.loss = loss.detach().clone()
        attempt.clip = attempt.reading.clip

    def update_begins(self, step: Step) -> None:
        attempt = self._attempts.get(step)
        if attempt is not None:
            self._read_weights(attempt)

    def _read_weights(self, attempt: _Attempt) -> None:
        """Keeps what the parameters are, right before they change."""
        if attempt.detail and attempt.weights is None and self._reads_weights:
            try:
                attempt.weights = Weights(attempt.params)
            except Exception as error:  # Detail is worth less than the steps.
                self._reads_weights = False
                self._warn(f"weights are not recorded: {type(error).__name__}: {error}")

    # What the first evaluation of a closure leaves is what the step is judged by. Losses from
    # before the step stay: the closure may hold the last micro-batch, or nothing. If it computes
    # the loss anew it clears the gradients, which is seen where that is done.

    def closure_begins(self, step: Step) -> None:
        attempt = self._attempts.get(step)
        if attempt is not None and attempt.reading is not None:
            self.losses.start()

    def closure_ended(self, step: Step, loss: object, *, failed: bool) -> None:
        attempt = self._attempts.get(step)
        if attempt is None:
            return
        if failed:
            self.losses.start()
        elif attempt.reading is None:
            self._read(step, attempt, loss)

    def step_failed(self, step: Step) -> None:
        self._attempts.pop(step, None)
        if step.is_of_control:
            self.losses.start()

    def step_ended(self, step: Step) -> None:
        if step.is_of_control:
            self._journal(step.driver).step_ended(step)
            self.losses.start()
            return
        attempt = self._attempts.pop(step, None)
        if attempt is None:
            return
        self.losses.end()
        self.seen += 1
        reading = attempt.reading
        if reading is None or self.recorder is None:
            return
        found = reading.statistics
        norm = weight = update = None
        if found is not None:
            norm = rounded(total_norm(found.norms, 2.0), double=reading.double)
            if isinstance(step.carried, Tensor):
                norm = norm / moved(step.carried.detach(), norm.device)
        if attempt.detail:
            home = attempt.params[0].device if found is None else found.norms.device
            self._read_weights(attempt)  # If a scaler held the step back, nobody has yet.
            if attempt.weights is not None:
                weight, update = attempt.weights.moved_by_step(home)
        if step.clipped is not None:
            attempt.clip = {"limit": step.limit, "clipped": step.clipped}
        sample = Sample(
            loss=attempt.loss,
            scale=step.scale,
            norm=norm,
            skip=step.skip,
            rejected=step.rejected,
            lr=attempt.lr,
            statistics=found,
            carried=step.carried,
            places=reading.places,
            elements=reading.elements,
            weight=weight,
            update=update,
            of_rank=not attempt.whole,
            **attempt.clip,
        )
        self.recorder.step(attempt.index, sample)

    def _introduced(self, optimizer: Any, params: list[Tensor]) -> _Introduction:
        """What the recorder was told of an optimizer."""
        find = self._introductions.get(id(optimizer))
        known = None if find is None else find()
        if known is not None and known.is_of(params):
            return known
        models = owners_of(params)
        names, whole = name_parameters(models, params), are_whole(params, models)
        index = self.recorder_now().add_optimizer(optimizer, names=names)
        made = _Introduction(index, params, whole=whole)
        self._introductions[id(optimizer)] = made.kept_by(optimizer)
        self.losses.optimizer_made(optimizer)
        return made

    # --- a script's own GradientControls -------------------------------------------------------

    def loss_counted(self, control: Any, loss: Tensor, *, first: bool, averaged: int = 0) -> None:
        self._journal(control).loss_counted(control, loss, first=first, averaged=averaged)

    def _control_begins(self, step: Step) -> None:
        journal = self._journal(step.driver)
        if journal.loss is None and not step.scales:
            # Not by way of the control: what `loss.backward()` was called on has no scale here.
            journal.loss = self.losses.take()
        journal.step_begins(step)

    def _journal(self, control: Any) -> Journal:
        journal = self._journals.get(control)
        if journal is None:
            journal = Journal(self.recorder_now(), find_names=_found_names)
            self._journals[control] = journal
        return journal

    # --- clips ---------------------------------------------------------------------------------

    def clip_begins(self, clip: Clip) -> None:
        detail = clip.by_value or self._wants_detail({id(param) for param in clip.params})
        self._clipping = self._reader.before_clip(clip.params, detail=detail)

    def _wants_detail(self, params: set[int]) -> bool:
        """Whether a step that these are clipped for may be recorded in detail."""
        for known in [find() for find in self._introductions.values()]:
            if known is not None and not known.ids.isdisjoint(params):
                params = params - known.ids
                if self.recorder is None or self.recorder.wants_detail(known.index):
                    return True
        return bool(params)  # Of an optimizer that has not stepped yet, whose first step is.

    def clip_ended(self, clip: Clip) -> None:
        gradients, self._clipping = self._clipping, None
        if gradients is not None:
            self._reader.after_clip(gradients, clip)

    def gradients_clear(self, owner: Any) -> None:
        self._reader.gradients_clear(parameters_of(owner))


def _found_names(names: Names) -> Names:
    """Names from the models that are alive, for a control that was given none."""
    if names.has_model:
        return names
    models = owners_of(every_parameter(names.optimizers))
    return Names(prefixed(models), names.optimizers)
