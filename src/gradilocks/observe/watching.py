"""Steps of a script's optimizers enter, Samples for the Recorder leave.

`hooks.py` says when something happens; here is what becomes of it. Nothing waits for a device,
nothing that the script can see changes, and a failure of ours ends the watching and not the script.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradilocks._torch import unseen_by_modes, version
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.lab.trace import Tracer
from gradilocks.observe.clips import Clips
from gradilocks.observe.ending import Held
from gradilocks.observe.looking import Look, Looks
from gradilocks.observe.losses import Losses
from gradilocks.observe.naming import name_parameters, owners_of
from gradilocks.record import Recorder, Sample
from gradilocks.record.weights import Weights
from gradilocks.step.gradients import every_parameter
from gradilocks.step.own_step import weakly
from gradilocks.step.total import rounded, total_norm
from gradilocks.values import moved

__all__ = ["Attempt", "Watch"]

_Result = TypeVar("_Result")


@dataclass
class _Known:
    """An optimizer that has been seen."""

    optimizer: Callable[[], Any]
    index: int
    params: list[weakref.ref[Tensor]]
    """Weakly: a script that trains one model after another needs their memory."""

    def is_still(self, optimizer: Any, params: list[Tensor]) -> bool:
        """Whether this is that optimizer, with the same parameters."""
        same = self.optimizer() is optimizer and len(params) == len(self.params)
        return same and all(ref() is param for ref, param in zip(self.params, params, strict=True))


@dataclass
class Attempt:
    """A step that has begun."""

    known: _Known
    params: list[Tensor]
    detail: bool
    scale: Tensor | float = 1.0
    carried: Tensor | float = 1.0
    look: Look | None = None
    loss: Tensor | None = None
    lr: Any = None
    weights: Weights | None = None
    frame: FrameType | None = None
    """Of torch's wrapper around the step, once that has begun."""
    scaled: bool = False
    """Whether a scaler drives the step, and ends it."""
    more: dict[str, Any] = field(default_factory=dict)


class Watch:
    """Watches every optimizer of this process.

    Args:
        make_recorder: called at the first step.
        trace: whether models are traced after a step with NaN or Inf.
        warn: told in words when watching had to end.
    """

    def __init__(
        self, make_recorder: Callable[[], Recorder], *, trace: bool, warn: Callable[[str], None]
    ) -> None:
        self._make_recorder = make_recorder
        self._trace = trace
        self._warn = warn
        self._pid = os.getpid()
        self._stopped = False
        self._weighs = True
        self.failed = False
        """Whether watching had to end before the script did."""
        self.seen = 0
        """How many steps have come by."""
        self._known: dict[int, _Known] = {}
        self._running: dict[int, Attempt] = {}  # By optimizer: steps that have begun.
        self._driven: tuple[Any, ...] = ()  # Optimizers that a control of ours steps.
        self._place: dict[int, int] = {}  # By parameter: its optimizer's index.
        self._tracers: dict[int, list[Tracer]] = {}  # By an optimizer's first parameter.
        self._tracer_of: WeakKeyDictionary[nn.Module, Tracer] = WeakKeyDictionary()
        self.looks = Looks()
        self.losses = Losses()
        self._alive: dict[int, Callable[[], Any]] = {}  # Optimizers, also before their first step.
        self._grads_then: dict[int, _GradThen] = {}  # By parameter: when the first loss came.
        self._without: set[int] = set()  # Parameters that had no gradient then.
        self._made: list[weakref.ref[Tensor]] = []  # Those of them that the losses gave one.
        self.clips = Clips()
        self.recorder: Recorder | None = None

    def safely(self, act: Callable[[], _Result]) -> _Result | None:
        """Does our own work so that the script notices nothing of it, nor of its failure."""
        if self._stopped or os.getpid() != self._pid or capturing():
            return None
        with Held(), torch.no_grad(), unseen_by_modes():
            try:
                return act()
            except Exception as error:
                self._stopped = self.failed = True
                self._running.clear()
                self._warn(f"watching ended, the script goes on: {type(error).__name__}: {error}")
                return None

    def recorder_now(self) -> Recorder:
        """The recorder, made when it is first needed."""
        if self.recorder is None:
            self.recorder = self._make_recorder()
        return self.recorder

    @contextmanager
    def driving(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Inside, a GradientControl steps these optimizers and tells of it itself."""
        before, self._driven = self._driven, (*self._driven, *optimizers)
        try:
            yield
        finally:
            self._driven = before
            self.losses.start()

    def is_driven(self, optimizer: Any) -> bool:
        """Whether a GradientControl steps it, or what wraps it, and tells of the step itself."""
        if any(each is optimizer for each in self._driven):
            return True
        return bool(self._driven) and _shares(optimizer, every_parameter(self._driven))

    # --- steps ---------------------------------------------------------------------------------

    def begin(
        self,
        optimizer: Any,
        *,
        scale: Tensor | float = 1.0,
        carried: Tensor | float = 1.0,
        look: bool = True,
    ) -> Attempt | None:
        """A step of `optimizer` begins; its gradients are read unless a closure will make them."""
        params = list(every_parameter([optimizer]))
        if not params or self._is_inside_another(optimizer, params):
            return None
        known = self._introduced(optimizer, params)
        assert self.recorder is not None
        detail = self.recorder.wants_detail(known.index)
        attempt = Attempt(known, params, detail, scale, carried)
        lr = optimizer.param_groups[0].get("lr")
        attempt.lr = lr if isinstance(lr, (int, float, Tensor)) else None
        self._running[id(optimizer)] = attempt
        if look:
            self.look(attempt)
        return attempt

    def _is_inside_another(self, optimizer: Any, params: list[Tensor]) -> bool:
        """Whether an optimizer of the same parameters is in the midst of a step, as SAM is."""
        return any(
            running.params[0] is params[0] and running.known.optimizer() is not optimizer
            for running in self._running.values()
        )

    def look(self, attempt: Attempt, loss: object = None) -> None:
        """Reads the gradients, and the loss that they came from."""
        params = attempt.params
        attempt.look = self.looks.look(params, detail=attempt.detail)
        attempt.loss = self.losses.take()
        if attempt.loss is None and isinstance(loss, Tensor) and loss.numel() == 1:
            attempt.loss = loss.detach().clone()
        attempt.more = self.clips.taken(params)

    def weigh(self, attempt: Attempt) -> None:
        """Keeps what the parameters are, right before they change."""
        if attempt.detail and attempt.weights is None and self._weighs:
            try:
                attempt.weights = Weights(attempt.params)
            except Exception as error:  # Detail is worth less than the steps.
                self._weighs = False
                self._warn(f"weights are not recorded: {type(error).__name__}: {error}")

    def attempt_of(self, optimizer: Any) -> Attempt | None:
        """The step of `optimizer` that has begun and not ended."""
        return self._running.get(id(optimizer))

    def attempt_around(self, optimizer: Any) -> Attempt | None:
        """The step that a scaler has begun of what wraps `optimizer`."""
        for running in self._running.values():
            mine = running.known.optimizer() is optimizer
            if running.scaled and not mine and _shares(optimizer, running.params):
                return running
        return None

    def drop(self, attempt: Attempt) -> None:
        """The step raised: it is none."""
        self._running = {k: v for k, v in self._running.items() if v is not attempt}

    def conclude(
        self,
        attempt: Attempt,
        *,
        skip: Tensor | bool = False,
        rejected: Tensor | bool = False,
    ) -> None:
        """The step is over: hands its Sample to the recorder."""
        self.drop(attempt)
        self.losses.end()
        self.seen += 1
        if attempt.look is None or self.recorder is None:
            return
        known, found = attempt.known, attempt.look.statistics
        norm = weight = update = None
        if found is not None:
            norm = rounded(total_norm(found.norms, 2.0), double=attempt.look.double)
            if isinstance(attempt.carried, Tensor):
                norm = norm / moved(attempt.carried.detach(), norm.device)
        if attempt.detail:
            home = attempt.params[0].device if found is None else found.norms.device
            self.weigh(attempt)  # A step that a scaler held back was not weighed.
            if attempt.weights is not None:
                weight, update = attempt.weights.moved_by_step(home)
        sample = Sample(
            loss=attempt.loss,
            scale=attempt.scale,
            norm=norm,
            skip=skip,
            rejected=rejected,
            lr=attempt.lr,
            statistics=found,
            carried=attempt.carried,
            places=attempt.look.places,
            elements=attempt.look.elements,
            weight=weight,
            update=update,
            **attempt.more,
        )
        self.recorder.step(known.index, sample)
        if found is not None:
            self.notice(attempt.params, (found.nan + found.inf).sum() > 0)

    def notice(self, params: Sequence[Tensor], bad: Tensor) -> None:
        """Tells the tracers of these parameters' models whether a step had NaN or Inf: 1 or 0."""
        if self._trace:
            for tracer in self._traced(params):
                tracer.note(bad.reshape(1).to(torch.float32))

    # --- losses --------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any, gradients: Any) -> None:
        """`torch.autograd.backward(tensors, gradients)` is about to run.

        If the losses that wait gave gradients to parameters, and those have none any more, nothing
        is left of those losses: the script has dropped them without `zero_grad`.
        """
        made = [param for ref in self._made if (param := ref()) is not None]
        if self.losses.waiting and made and all(param.grad is None for param in made):
            self.losses.start()
        if not self.losses.waiting:
            params = list(self._params_alive())
            self._grads_then = {id(p): _GradThen.of(p) for p in params if len(self._alive) > 1}
            self._without, self._made = {id(p) for p in params if p.grad is None}, []
        self.losses.note_backward(tensors, gradients)

    def backward_ended(self) -> None:
        """`torch.autograd.backward` has run."""
        if self.losses.waiting:
            found = (p for p in self._params_alive() if id(p) in self._without)
            made = [p for p in found if p.grad is not None]
            self._made += [weakref.ref(p) for p in made]  # Weakly: see _Known.
            self._without.difference_update(map(id, made))

    def before_clearing(self, owner: Any) -> None:
        """The gradients of a model or an optimizer are about to be cleared.

        With them go the losses that they came from, unless gradients of another optimizer came from
        those losses too: such have changed since the first of them was run backward.
        """
        if isinstance(owner, nn.Module):
            cleared: list[Tensor] = list(owner.parameters())
        else:
            cleared = list(every_parameter([owner]))
        if all(param.grad is None for param in cleared) or not self._alive:
            return
        gone = {id(param) for param in cleared}
        others = (p for p in self._params_alive() if id(p) not in gone and p.grad is not None)
        then = self._grads_then
        if all(id(p) in then and then[id(p)].is_still(p) for p in others):
            self.losses.start()

    def note_optimizer(self, optimizer: Any) -> None:
        """An optimizer was made, or is met at its step: losses may be for it."""
        self._alive[id(optimizer)] = weakly(optimizer)

    def _params_alive(self) -> Iterator[Tensor]:
        """The parameters of every optimizer that there is, each of them once."""
        self._alive = {key: ref for key, ref in self._alive.items() if ref() is not None}
        optimizers = [ref() for ref in self._alive.values()]
        there = [o for o in optimizers if isinstance(getattr(o, "param_groups", None), list)]
        yield from {id(param): param for param in every_parameter(there)}.values()

    # --- clips ---------------------------------------------------------------------------------

    def before_clip(self, params: Sequence[Tensor], *, detail: bool) -> list[Tensor] | None:
        """Gradients are about to be clipped."""
        if not detail:
            indices = {self._place.get(id(param)) for param in params}
            detail = any(
                index is None or self.recorder is None or self.recorder.wants_detail(index)
                for index in indices
            )
        return self.looks.before_clip(params, detail=detail)

    def after_clip(
        self,
        params: Sequence[Tensor],
        seen: Sequence[Tensor] | None,
        *,
        norm: object,
        limit: Any,
        order: Any,
    ) -> None:
        """Gradients that together had `norm` were bounded to `limit`."""
        self.looks.clipped(seen or ())
        changed = self.looks.changed(seen or ())
        self.clips.by_norm(params, norm=norm, limit=limit, order=float(order), changed=changed)

    def after_value_clip(
        self, params: Sequence[Tensor], seen: Sequence[Tensor] | None, *, bound: Any
    ) -> None:
        """Every element was bounded."""
        self.looks.clipped(seen or ())
        largest = self.looks.largest(seen or ())
        clipped = False if largest is None else (largest > bound).any().to(torch.float32)
        self.clips.by_value(params, clipped=clipped)

    # --- optimizers ----------------------------------------------------------------------------

    def _introduced(self, optimizer: Any, params: list[Tensor]) -> _Known:
        known = self._known.get(id(optimizer))
        if known is not None and known.is_still(optimizer, params):
            return known
        index = self.recorder_now().add_optimizer(optimizer, names=name_parameters(params))
        refs = [weakref.ref(param) for param in params]
        known = _Known(weakly(optimizer), index, refs)
        self._known[id(optimizer)] = known
        self.note_optimizer(optimizer)
        self._place.update((id(param), index) for param in params)
        return known

    def _traced(self, params: Sequence[Tensor]) -> list[Tracer]:
        key = id(params[0])
        if key not in self._tracers:
            models = owners_of(params)
            for model in models:
                if model not in self._tracer_of:
                    self._tracer_of[model] = Tracer(model, recorder=self.recorder_now())
            self._tracers[key] = [self._tracer_of[model] for model in models]
        return self._tracers[key]

    def findings(self) -> tuple[str, ...]:
        """What tracing has found, in sentences, each of them once."""
        every = {id(t): t for tracers in self._tracers.values() for t in tracers}.values()
        return tuple(dict.fromkeys(each.text for tracer in every for each in tracer.findings))

    def close(self) -> None:
        """Takes the tracers' hooks away."""
        self._stopped = True
        for tracers in self._tracers.values():
            for tracer in tracers:
                tracer.close()


def _shares(optimizer: Any, params: Iterable[Tensor]) -> bool:
    """Whether the first parameter of `optimizer` is one of these."""
    first = next(every_parameter([optimizer]), None)
    return first is not None and any(param is first for param in params)


@dataclass(frozen=True)
class _GradThen:
    """A gradient at one moment: by it is seen whether a backward pass has changed it since."""

    grad: weakref.ref[Tensor] | None
    version: int

    @staticmethod
    def of(param: Tensor) -> _GradThen:
        grad = param.grad
        if grad is None:
            return _GradThen(None, 0)
        return _GradThen(weakref.ref(grad), 0 if grad.is_inference() else version(grad))

    def is_still(self, param: Tensor) -> bool:
        now = _GradThen.of(param)  # One tensor has one weakref.
        return self.grad is now.grad and self.version == now.version
