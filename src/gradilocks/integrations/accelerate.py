"""Accelerate: a GradientControl behind `accelerator.backward`, `clip_grad_norm_` and the prepared optimizers."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import SCALER_NAME
from torch import Tensor

from gradilocks.clip import ClipByNorm, ClipByValue
from gradilocks.control import GradientControl
from gradilocks.dropin.control_scaler import ControlScaler
from gradilocks.outcome import Outcome
from gradilocks.scale import DynamicScale
from gradilocks.step.phase import Phase
from gradilocks.torch_private import mark_stepped

__all__ = ["ControlledOptimizer", "control_for"]


def control_for(accelerator: Accelerator, model: Any, optimizer: Any, **options: Any) -> GradientControl:
    """Creates a GradientControl that steps prepared optimizers.

    `accelerator.backward`, `clip_grad_norm_`, `optimizer.step`, `optimizer_step_was_skipped`, `save_state` and
    `load_state` then use the control, and prepared schedulers do not advance for skipped steps.

    Args:
        accelerator: the Accelerator, after `prepare`.
        model: the model that `prepare` returned, or a mapping from prefixes to models.
        optimizer: the optimizer that `prepare` returned; a list if the accelerator has prepared several.
        options: arguments of GradientControl. By default `scale` is that of Accelerate: dynamic with
            mixed_precision="fp16" on a GPU (with the settings of GradScalerKwargs), otherwise None.

    Examples:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        control = control_for(accelerator, model, optimizer, clip=1.0)
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(
            f"{accelerator.distributed_type.value} scales, clips and steps in its own engine, which a GradientControl "
            "cannot replace. `gradilocks run` records such a script."
        )
    wrappers = [_wrapper(accelerator, item) for item in _as_list(optimizer)]
    missing = [wrapper for wrapper in accelerator._optimizers if wrapper not in wrappers]
    if missing:
        raise ValueError(
            f"the accelerator has prepared {len(accelerator._optimizers)} optimizers, control_for() got "
            f"{len(wrappers)} of them. Pass all in one call: control_for(accelerator, {{'a': model_a, 'b': model_b}}, "
            "[optimizer_a, optimizer_b])."
        )
    options.setdefault("scale", _scale_policy(accelerator.scaler))
    control = GradientControl(*(wrapper.optimizer for wrapper in wrappers), model=model, **options)
    accelerator.scaler = _AcceleratorScaler(control)
    for wrapper in wrappers:
        _replace_step(wrapper, control, accelerator.scaler)
    for scheduler in accelerator._schedulers:
        if scheduler.step_with_optimizer:
            _skip_with_control(scheduler, control)
    methods = _Methods(accelerator, control)
    for name in ("unscale_gradients", "clip_grad_norm_", "clip_grad_value_", "load_state"):
        setattr(accelerator, name, getattr(methods, name))
    return control


class ControlledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A prepared optimizer that a GradientControl steps."""

    control: GradientControl
    _outcome: Outcome | None = None

    def step(self, closure: Any = None) -> None:
        """Takes or skips a step at the end of an accumulation."""
        mark_stepped(self)
        if not self.gradient_state.sync_gradients:
            return
        control = self.control
        if self.accelerator_state.is_fsdp2 and not control._losses and _creates_state(self.optimizer):
            self.optimizer.step(closure)
        elif closure is not None or len(control.optimizers) == 1:
            self._outcome = control.step(closure)
            self.scaler.update()
        else:
            self._outcome = control.step(only=self.optimizer)  # The scaler updates the scale before the next backward.

    @property
    def step_was_skipped(self) -> bool:
        """True if the latest step was skipped. Waits for the device."""
        return self._outcome is not None and self._outcome.skipped


class _AcceleratorScaler(ControlScaler):
    """The control's scaler. Updates the scale when all optimizers of an iteration have stepped.

    Accelerate calls `update` after the step of each optimizer, when the gradients of the next one are still scaled.
    """

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss by the scale."""
        self._update_scale()
        return super().scale(outputs)

    def state_dict(self) -> dict[str, Any]:
        """The state of the control."""
        self._update_scale()
        return super().state_dict()

    def _update_scale(self) -> None:
        if any(phase.pending is not None for phase in self.control._phases):
            self.update()


class _Methods:
    """Replacements for methods of an Accelerator.

    Args:
        accelerator: the Accelerator whose methods are replaced.
        control: the control of its optimizers.
    """

    def __init__(self, accelerator: Accelerator, control: GradientControl) -> None:
        self._accelerator, self._control = accelerator, control

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divides the gradients by the scale in place, unless they are already unscaled."""
        control = self._control
        for item in control.optimizers if optimizer is None else _as_list(optimizer):
            inner = getattr(item, "optimizer", item) if isinstance(item, AcceleratedOptimizer) else item
            if control._phases[control._indices(inner)[0]].phase is Phase.SCALED:
                control.unscale_(only=inner)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Returns the norm of the unscaled gradients over all ranks. The control clips them within the step.

        Args:
            parameters: all parameters of an optimizer.
            max_norm: the clip of the control, or math.inf to measure only.
            norm_type: order of the norm.
        """
        control = self._control
        ids = {id(parameter) for parameter in _as_list(parameters)}
        covered = [optimizer for optimizer in control.optimizers if _trainable(optimizer) <= ids]
        if len(covered) != 1:
            raise ValueError(
                f"clip_grad_norm_() got all parameters of {len(covered)} optimizers. The control clips the gradients "
                "of each optimizer by their norm, so pass all parameters of one. For parts of a model, use "
                "control_for(..., clip=ClipPerGroup(...))."
            )
        policy = ClipByNorm(float(max_norm), float(norm_type))
        if max_norm != math.inf or norm_type != 2:
            self._check_clip(f"clip_grad_norm_(max_norm={max_norm:g}, norm_type={norm_type:g})", policy)
        self.unscale_gradients(covered[0])
        return control.norm(only=covered[0])

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Does nothing: the control clips within the step."""
        self._check_clip(f"clip_grad_value_({clip_value:g})", ClipByValue(float(clip_value)))

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Loads a state. One that was saved without a scaler leaves the control's state unchanged."""
        accelerator = self._accelerator

        def load_control(models: Any, folder: str) -> None:
            file = Path(folder) / SCALER_NAME
            if file.is_file():
                self._control.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

        hook = accelerator.register_load_state_pre_hook(load_control)
        scaler, accelerator.scaler = accelerator.scaler, None  # With a scaler, Accelerate requires the file.
        try:
            type(accelerator).load_state(accelerator, input_dir, *args, **kwargs)
        finally:
            accelerator.scaler = scaler
            hook.remove()

    def _check_clip(self, call: str, policy: object) -> None:
        """Raises ValueError for a clip that the control does not apply."""
        if policy not in self._control._clip:
            raise ValueError(
                f"{call} needs control_for(..., clip={policy!r}), which clips within the step. The control has "
                f"clip={list(self._control._clip)!r}."
            )


def _wrapper(accelerator: Accelerator, optimizer: Any) -> AcceleratedOptimizer:
    """Returns the prepared form of an optimizer."""
    for wrapper in accelerator._optimizers:
        if optimizer is wrapper or optimizer is wrapper.optimizer:
            if isinstance(wrapper, ControlledOptimizer):
                raise ValueError("this optimizer already has a control: optimizer.control.")
            return wrapper
    raise ValueError(
        f"this accelerator has not prepared this {type(optimizer).__name__}. Call control_for() after "
        "model, optimizer = accelerator.prepare(model, optimizer)."
    )


def _replace_step(wrapper: AcceleratedOptimizer, control: GradientControl, scaler: ControlScaler) -> None:
    wrapper.__class__ = ControlledOptimizer
    wrapper.control, wrapper.scaler = control, scaler
    if "step" in vars(wrapper):  # An LR scheduler of the prepared optimizer has wrapped the step of the former class.

        @functools.wraps(wrapper.step)
        def step(self: ControlledOptimizer, closure: Any = None) -> None:
            ControlledOptimizer.step(self, closure)

        wrapper.step = types.MethodType(step, wrapper)


def _skip_with_control(scheduler: Any, control: GradientControl) -> None:
    """Replaces the step of a prepared scheduler: skipped steps do not advance it, and no step waits for the flag."""
    optimizer = scheduler.optimizers[0].optimizer if len(scheduler.optimizers) == 1 else None
    inner = types.SimpleNamespace(
        optimizer=optimizer,
        step=scheduler.step,
        state_dict=scheduler.state_dict,
        load_state_dict=scheduler.load_state_dict,
    )
    wrapped = control.scheduler(inner)

    def step(*args: Any, **kwargs: Any) -> None:
        (wrapped if scheduler.gradient_state.sync_gradients else inner).step(*args, **kwargs)

    scheduler.optimizers = []  # Accelerate would read the skip flag of every optimizer.
    scheduler.step, scheduler.state_dict, scheduler.load_state_dict = step, wrapped.state_dict, wrapped.load_state_dict


def _scale_policy(scaler: Any) -> object:
    """The policy of the scaler that Accelerate has created."""
    if isinstance(scaler, ControlScaler):  # From a control before `accelerator.free_memory()`.
        return scaler.control._state.policy
    if scaler is None or not scaler.is_enabled():
        return None
    return DynamicScale(
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def _creates_state(optimizer: Any) -> bool:
    """True for the step in which torch.distributed.checkpoint creates optimizer state: all learning rates are 0."""
    return all(float(group["lr"]) == 0.0 for group in optimizer.param_groups)


def _trainable(optimizer: Any) -> set[int]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {id(param) for param in params if param.requires_grad}


def _as_list(value: Any) -> list[Any]:
    is_one = isinstance(value, (Tensor, torch.optim.Optimizer)) or not isinstance(value, Iterable)
    return [value] if is_one else list(value)
