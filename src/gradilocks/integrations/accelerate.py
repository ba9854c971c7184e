"""Accelerate's training loop, with the whole step of a GradientControl in it.

An Accelerator enters `take_control` before its `prepare`; a GradientControl leaves. From then on
`accelerator.backward`, `clip_grad_norm_`, `unscale_gradients`, `optimizer.step`, `scheduler.step`,
`optimizer_step_was_skipped`, `save_state` and `load_state` are those of the control, in any
precision, and the script stays as it is. A control beside an Accelerator would not do: Accelerate
clips and unscales before it, and finds out about skipped steps in a way that is wrong for fused
optimizers.

Needs the `accelerate` package.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks import (
    ClipByNorm,
    ClipByValue,
    DynamicScale,
    GradientControl,
    Outcome,
    chain,
    get_total_norm,
    optim,
)
from gradilocks.errors import MissingPackage

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import SCALER_NAME, extract_model_from_parallel
except ImportError as error:
    raise MissingPackage("Accelerate is not installed: pip install accelerate") from error

__all__ = ["ControlledAccelerator", "ControlledOptimizer", "ControlledScheduler", "take_control"]

_logger = logging.getLogger("gradilocks")


def take_control(
    accelerator: Accelerator,
    *,
    clip: object = None,
    scale: object = "auto",
    record: object = None,
    config: Mapping[str, Any] | None = None,
    adopt: bool = False,
    **settings: Any,
) -> GradientControl:
    """Has a GradientControl take every step of the optimizers that `accelerator` will prepare.

    Args:
        accelerator: before its first `prepare`.
        clip: None, a number (the largest norm) or a clip policy. With None the `max_norm` of
            `accelerator.clip_grad_norm_` clips, at the steps at which it is called.
        scale: "auto" scales if the Accelerator does, so with `mixed_precision="fp16"`, and begins
            with its numbers (`GradScalerKwargs`); or "dynamic", None, a number or a scale policy.
        record: a path for a run file, a folder ("runs/") in which it gets a name of its own, a
            Recorder, or None.
        config: with a path as `record`, what its header is to tell of how the run was made.
        adopt: whether torch's Adam, AdamW and SGD become those of `gradilocks.optim` when they are
            prepared; another optimizer raises TypeError then.
        settings: whatever else `GradientControl` takes, as `on_nonfinite="raise"`.

    Returns:
        The control. Its optimizers are bound to it by `accelerator.prepare`.

    Raises:
        ValueError: the Accelerator has prepared an optimizer already, has a control, or leaves the
            step to somebody else (DeepSpeed, Megatron-LM, XLA, FSDP version 1, MS-AMP).

    Example:
        >>> accelerator = Accelerator(mixed_precision="bf16")
        >>> control = take_control(accelerator, clip=1.0, record="runs/a.jsonl")
        >>> model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    """
    _refuse_unfit(accelerator)
    if scale == "auto":
        scale = _scale_of(accelerator.scaler)
    control = GradientControl(scale=scale, clip=clip, record=record, config=config, **settings)
    kind = type(accelerator)
    if kind is Accelerator:
        accelerator.__class__ = ControlledAccelerator
    else:  # Somebody's own: what it overrides stays.
        home = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        accelerator.__class__ = type(kind.__name__, (ControlledAccelerator, kind), home)
    accelerator.begin_control(control, clip=clip, adopt=adopt)
    return control


def _scale_of(scaler: Any) -> DynamicScale | None:
    """The rule of the scaler that Accelerate has made, if it has."""
    if scaler is None or not scaler.is_enabled():
        return None
    return DynamicScale(
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def _refuse_unfit(accelerator: Any) -> None:
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"take_control() takes an accelerate.Accelerator, got {type(accelerator).__name__}."
        )
    if isinstance(accelerator, ControlledAccelerator):
        raise ValueError("this Accelerator has a control already: accelerator.gradient_control.")
    if accelerator._optimizers:
        raise ValueError(
            "take_control() comes before accelerator.prepare(): this Accelerator has prepared "
            f"{len(accelerator._optimizers)} optimizer(s) already, which step without the control."
        )
    strategy = accelerator.distributed_type
    owners = {
        DistributedType.DEEPSPEED: "DeepSpeed",
        DistributedType.MEGATRON_LM: "Megatron-LM",
        DistributedType.XLA: "XLA",
    }
    if strategy in owners:
        raise ValueError(
            f"{owners[strategy]} scales, clips and steps by itself, so a GradientControl cannot. "
            "gradilocks run records such a script from outside."
        )
    if strategy == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP version 1 flattens parameters, and which rank holds what of them Accelerate does "
            "not tell. Use FullyShardedDataParallelPlugin(fsdp_version=2), or a loop of your own "
            "with GradientControl(..., process_group=model.process_group)."
        )
    if str(getattr(accelerator.fp8_backend, "value", accelerator.fp8_backend)).upper() == "MSAMP":
        raise ValueError("MS-AMP's optimizers scale by themselves, so a GradientControl cannot.")


class ControlledAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose optimizers are stepped by a GradientControl; made by `take_control`."""

    gradient_control: GradientControl
    """What `take_control` has returned."""
    scaler: Any

    def begin_control(self, control: GradientControl, *, clip: object, adopt: bool) -> None:
        """For `take_control`: what it was told."""
        self.gradient_control = control
        self.had_scaler = self.scaler is not None
        """Whether Accelerate has made a scaler of its own."""
        self.scaler = control.as_scaler(policies="control")
        self._own_clip, self._adopts = clip, adopt
        self._is_bound = False
        self._bound_to: list[Any] = []  # The optimizers and models that the control knows of.
        self._waiting_schedules: list[ControlledScheduler] = []  # For the control to be bound.
        self._has_loss = False
        # The clip that the script has called for, and whether for the coming step.
        self._asked_clip: Any = None
        self._asks_now = False
        self._schedule_knows = False

    # --- preparing ------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; the control is bound to all optimizers prepared so far."""
        prepared = super().prepare(*args, **kwargs)
        self._bind()
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's."""
        self._is_bound = False
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerate's; the optimizer that it returns steps by the control."""
        if self._adopts and not isinstance(optimizer, AcceleratedOptimizer):
            optim.adopt(optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self.has_lomo_optimizer:
            raise ValueError(
                "LOMO updates the parameters during backward, so nothing is left for a "
                "GradientControl to decide. Use another optimizer, or no take_control()."
            )
        prepared.__class__ = ControlledOptimizer
        prepared.accelerator = self
        self._is_bound = False
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerate's; the schedule that it returns waits for skipped steps by the control."""
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__ = ControlledScheduler
            if self._is_bound:
                prepared.wait_for(self.gradient_control)
            else:
                self._waiting_schedules.append(prepared)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's; the control lets go too, and goes on with what is prepared next."""
        self._is_bound = self._has_loss = False
        self._bound_to, self._waiting_schedules = [], []
        self.gradient_control.release()
        return super().free_memory(*objects)

    def _bind(self) -> None:
        """Tells the control of the optimizers, when there are others than it knows of."""
        if self._is_bound or not self._optimizers:
            return
        optimizers = list(map(_innermost, self._optimizers))
        models = _trained(self._models, optimizers)
        now = [*optimizers, *models.values()]
        # Not for another model alone, as one to evaluate.
        if len(now) != len(self._bound_to) or any(map(operator.is_not, now, self._bound_to)):
            self.gradient_control.bind(*optimizers, model=models.get("", models) or None)
            self._bound_to = now
        for schedule in self._waiting_schedules:
            schedule.wait_for(self.gradient_control)
        self._waiting_schedules = []
        self._is_bound = True

    # --- a step ---------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerate's, of the loss times the control's scale."""
        self._bind()
        super().backward(loss, **kwargs)
        self._has_loss = True

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Makes the gradients true in place; nothing to do if they are, or carry no scale.

        Args:
            optimizer: one, or several, whose gradients; None for all.
        """
        self._bind()
        if optimizer is None:
            optimizer = self._optimizers
        control = self.gradient_control
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            inner = _innermost(each)
            waits = any(p.grad is not None for p in _parameters([inner]))
            if waits and not control.is_unscaled(inner):
                self.scaler.unscale_(inner)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """The norm of the true gradients, which the coming step will clip to `max_norm`.

        The gradients are unscaled in place, as Accelerate does it, but clipped inside the step. Of
        parameters that are only some of those that are trained, or of several optimizers, torch's
        own function clips them now.

        Args:
            parameters: as torch's.
            max_norm: the bound. If `take_control` was given a clip it must be the same one, or
                math.inf, which measures alone.
            norm_type: the p of the norm.

        Returns:
            0-d, on the device, without a wait.
        """
        self._bind()
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        policy = ClipByNorm(float(max_norm), float(norm_type))
        of = self._whose(given)
        if policy.max_norm == math.inf:
            return self._norm_of(given, of, policy.order)
        if self._own_clip is not None:
            self._refuse_another(policy)
            if not of:
                raise ValueError(_SOME_ALONE)
        elif not of or len(self._optimizers) > 1:
            return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[no-any-return]
        else:
            self._ask_for(policy)
        return self._norm_of(given, of, policy.order)

    def _ask_for(self, policy: ClipByNorm | ClipByValue) -> None:
        """Has the coming step clip by that, after what it was asked for already."""
        wanted: Any = policy
        if self._asks_now and self._asked_clip not in (None, policy):
            wanted = chain(self._asked_clip, policy)
        if wanted != self._asked_clip:
            self.gradient_control.set_clip(wanted)
            self._asked_clip = wanted
        self._asks_now = True

    def _norm_of(self, params: list[Tensor], of: list[Any], order: float) -> Tensor:
        """The norm of true gradients: of the optimizers that have just these, if there are any."""
        self.unscale_gradients(of or None)
        control = self.gradient_control
        clip = self._own_clip if self._asked_clip is None else self._asked_clip
        if of and order == getattr(clip, "order", 2.0):
            return control.norm(only=of[0] if len(of) == 1 else None)
        norm = get_total_norm([p.grad for p in params if p.grad is not None], order)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Bounds each element of the true gradients, inside the coming step.

        The gradients are unscaled in place, as Accelerate does it. Of some of the parameters, or of
        several optimizers, they are clipped at once; NaN and Inf stay as they are, as an Inf that
        is clipped would be a number, and the coming step would be taken with it.
        """
        if self._own_clip is not None:
            raise ValueError(
                f"clip_grad_value_({clip_value}) beside take_control(clip={self._own_clip!r}) "
                "would clip twice. Leave out one of them, or say both there: "
                f"take_control(clip=gradilocks.chain(ClipByValue({clip_value}), ...))."
            )
        self._bind()
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.unscale_gradients()
        if len(self._optimizers) == 1 and self._whose(given):
            self._ask_for(ClipByValue(float(clip_value)))
            return
        most = float(clip_value)
        with torch.no_grad():
            for param in given:
                grad = param.grad
                if grad is not None:
                    grad.copy_(torch.where(grad.isfinite(), grad.clamp(-most, most), grad))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest step of an optimizer was skipped. Reading it waits for the device."""
        if self._schedule_knows:
            self._schedule_knows = False
            return False
        return bool(super().optimizer_step_was_skipped)

    def let_schedule_decide(self) -> None:
        """The next to ask whether a step was skipped has a schedule that knows it by itself.

        It is told that the step was taken, without a wait.
        """
        self._schedule_knows = True

    def step_one(self, optimizer: Any, closure: Any) -> Outcome | None:
        """For the prepared optimizer: its step. None if that was none of training."""
        self._bind()
        if self._only_makes_state(optimizer):
            optimizer.step(closure)
            return None
        control = self.gradient_control
        if self._asked_clip is not None and not self._asks_now:
            control.set_clip(None)
            self._asked_clip = None
        if closure is not None:
            control.step(closure, only=optimizer)
        elif self.had_scaler or any(p.grad is not None for p in _parameters([optimizer])):
            self.scaler.step(optimizer)
            self.scaler.update()
        else:  # As torch's optimizers: nothing to do.
            return None
        self._asks_now = self._has_loss = self._schedule_knows = False
        return control.outcome

    def _only_makes_state(self, optimizer: Any) -> bool:
        """Whether torch.distributed.checkpoint steps, to have the optimizer make its state.

        It does so with learning rates and gradients of zero, before a state is saved or loaded.
        """
        if self._has_loss or any(float(group["lr"]) != 0.0 for group in optimizer.param_groups):
            return False
        grads = [p.grad for p in _parameters([optimizer]) if p.grad is not None]
        local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        return not any(bool(grad.any()) for grad in local)

    def _refuse_another(self, policy: ClipByNorm) -> None:
        own = self._own_clip
        if isinstance(own, (int, float)):
            own = ClipByNorm(float(own))
        if own != policy:
            raise ValueError(
                f"clip_grad_norm_(max_norm={policy.max_norm:g}, norm_type={policy.order:g}) beside "
                f"take_control(clip={self._own_clip!r}): one of them must be left out, or both say "
                "the same. With a clip of take_control's the call is not needed; with "
                "max_norm=math.inf it measures the norm alone."
            )

    def _whose(self, params: Sequence[Tensor]) -> list[Any]:
        """The optimizers that have just these of the gradients that are there; [] if none do."""
        given = {id(param) for param in params if param.grad is not None}
        optimizers = list(self.gradient_control.optimizers)
        for some in (optimizers, *([each] for each in optimizers)):
            if given == {id(param) for param in _parameters(some) if param.grad is not None}:
                return some
        return []

    # --- checkpoints and the end ------------------------------------------------------------------

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's, also of states that were saved without a scaler.

        From one of Accelerate's own the control takes the scale, if there is one; what policies
        have learned it has only from its own.
        """
        scaler, self.scaler = self.scaler, None  # Accelerate would insist on its file.
        hook = self.register_load_state_pre_hook(lambda _, folder: _load_scaler(scaler, folder))
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            self.scaler = scaler
            hook.remove()
        self._has_loss = False

    def end_training(self) -> None:
        """As Accelerate's; a run file that the control writes is finished."""
        if self.gradient_control.recorder is not None:
            self.gradient_control.recorder.close()
        super().end_training()


class ControlledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A prepared optimizer that is stepped by a GradientControl."""

    accelerator: ControlledAccelerator
    _outcome: Outcome | None = None

    def step(self, closure: Any = None) -> None:
        """A step of the control, when gradients are accumulated and synchronized."""
        if self.gradient_state.sync_gradients:
            # Without Accelerate's patch of the optimizer's own step, which would hide from the
            # control that a fused optimizer unscales and clips inside.
            self._outcome = self.accelerator.step_one(_innermost(self), closure) or self._outcome

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped. Reading it waits for the device."""
        return self._outcome is not None and self._outcome.skipped

    def __getstate__(self) -> dict[str, Any]:
        left = {"accelerator", "_outcome"}
        kept: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in kept.items() if name not in left}


class ControlledScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A prepared schedule that waits for skipped steps without reading whether they were."""

    optimizers: list[Any]
    _gate: Any = None

    def wait_for(self, control: GradientControl) -> None:
        """Steps with the taken steps of `control`, if the schedule goes with the optimizer."""
        if self.step_with_optimizer and self._gate is None:
            self.optimizers = []  # Whom Accelerate would ask, and wait for.
            self._gate = control.scheduler(_TakenSteps(self), every_call=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's: on each of the steps that were taken, as often as there are ranks."""
        if self._gate is None or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
        else:
            self._gate.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """That of the schedule inside, which loads it as well."""
        saved: dict[str, Any] = (self.scheduler if self._gate is None else self._gate).state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from `state_dict()`, or from that of the schedule inside."""
        (self.scheduler if self._gate is None else self._gate).load_state_dict(state_dict)


class _TakenSteps:
    """What a control steps for each step that was taken: as Accelerate does, the schedule inside.

    Args:
        prepared: the schedule that Accelerate has prepared.
    """

    def __init__(self, prepared: ControlledScheduler) -> None:
        self._prepared = prepared

    def step(self, *args: Any, **kwargs: Any) -> None:
        AcceleratedScheduler.step(self._prepared, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._prepared.scheduler, name)


def _load_scaler(scaler: Any, folder: str) -> None:
    file = Path(folder) / SCALER_NAME
    if file.is_file():
        scaler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    else:
        _logger.info("%s has no %s: the control goes on as it is.", folder, SCALER_NAME)


def _innermost(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _parameters(optimizers: Iterable[Any]) -> Iterable[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _trained(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> dict[str, nn.Module]:
    """The models that the optimizers train: one under "", or several by their classes' names."""
    mine = {id(param) for param in _parameters(optimizers)}
    found = [model for model in models if any(id(param) in mine for param in model.parameters())]
    if len(found) == 1:
        return {"": found[0]}
    named: dict[str, nn.Module] = {}
    for model in found:
        name = kind = type(extract_model_from_parallel(model)).__name__
        number = 1
        while name in named:
            number += 1
            name = f"{kind}_{number}"
        named[name] = model
    return named


_SOME_ALONE = (
    "clip_grad_norm_() was given other parameters than those of the optimizers, and take_control() "
    "was given a clip for all of them. Clip them together, or leave out clip= of take_control(): "
    "then each call clips what it is given."
)
