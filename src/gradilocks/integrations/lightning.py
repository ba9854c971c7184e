"""Lightning: a GradientControl in the Trainer (`GradientControlCallback`) and in Fabric (`control_for`).

Both replace the precision plugin with a copy that scales the loss and steps with the control.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gradilocks.clip import ClipByNorm, ClipByValue
from gradilocks.control import GradientControl
from gradilocks.dropin.clip_functions import clip_grad_norm_, clip_grad_value_
from gradilocks.errors import ScaleMisuse
from gradilocks.scale import DynamicScale
from gradilocks.step.phase import Phase, StepGuard

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

__all__ = ["GradientControlCallback", "control_for"]


class GradientControlCallback(Callback):  # type: ignore[misc]
    """Trains with a GradientControl: `Trainer(precision="bf16-mixed", callbacks=[GradientControlCallback(clip=1.0)])`.

    The control is created when `fit` starts, and its state is saved in and loaded from the Trainer's checkpoints.
    `Trainer(gradient_clip_val=...)` becomes the clip of the control. LR schedules do not advance for skipped steps,
    except ReduceLROnPlateau.

    Args:
        scale: as in GradientControl; "auto" is DynamicScale with the settings of the precision plugin's scaler
            ("16-mixed"), or None if the plugin has no scaler.
        options: further arguments of GradientControl, such as `clip` and `record`.

    Attributes:
        control: the GradientControl of the latest `fit`; None before.
    """

    def __init__(self, *, scale: object = "auto", **options: Any) -> None:
        super().__init__()
        self._options = {"scale": scale, **options}
        self.control: GradientControl | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Creates the control. The Trainer has set up the optimizers and loads its checkpoint afterwards."""
        if sum(isinstance(callback, GradientControlCallback) for callback in trainer.callbacks) > 1:
            raise ValueError("the Trainer has several GradientControlCallbacks. Pass one.")
        plugin = _controlled_copy(trainer.strategy.precision_plugin, _TrainerPrecision)
        options = dict(self._options)
        is_manual = not pl_module.automatic_optimization
        plugin.clips_in_control = not (is_manual or _is_overridden(pl_module, "configure_gradient_clipping"))
        if trainer.gradient_clip_val and plugin.clips_in_control:
            if options.get("clip") is not None:
                raise ValueError(
                    f"Trainer(gradient_clip_val={trainer.gradient_clip_val!r}) and GradientControlCallback("
                    f"clip={options['clip']!r}) both clip the gradients. Remove one of them."
                )
            policy = ClipByValue if trainer.gradient_clip_algorithm == "value" else ClipByNorm
            options["clip"] = policy(float(trainer.gradient_clip_val))
        earlier = getattr(trainer.strategy.precision_plugin, "control", None)
        state = None if earlier is None else earlier.state_dict()
        for hook in () if earlier is None else earlier.hooks:
            hook.remove()
        # An earlier control closes its run file here, which the new one continues.
        earlier, self.control, trainer.strategy.precision_plugin = None, None, plugin
        self.control = plugin.create_control(trainer.optimizers, trainer.strategy.model, trainer.strategy, **options)
        if state is not None:
            self.control.load_state_dict(state)
        readers = [pl_module, *(callback for callback in trainer.callbacks if callback is not self)]
        plugin.unscales_for_hooks = any(_is_overridden(reader, "on_before_optimizer_step") for reader in readers)
        for config in trainer.lr_scheduler_configs:
            if not isinstance(config.scheduler, ReduceLROnPlateau):
                config.scheduler = self.control.scheduler(config.scheduler)


class _ControlledPrecision:
    """A precision plugin with a control; mixed into the class of the user's plugin."""

    control: _Control
    native: Any
    """The user's plugin."""
    scaler: Any = None
    """The control as a GradScaler, which the native plugin calls; None if that plugin has no scaler."""
    has_loss = False
    """True if a loss was scaled since the last step."""

    def create_control(self, optimizers: Any, model: Any, strategy: Any, **options: Any) -> GradientControl:
        """Creates the control with the settings of the native scaler and the mesh of ModelParallelStrategy."""
        native = getattr(self.native, "scaler", None)
        if options["scale"] == "auto":
            names = ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval")
            scales = native is not None and native.is_enabled()
            options["scale"] = DynamicScale(*(getattr(native, name)() for name in names)) if scales else None
        if type(strategy).__name__ == "ModelParallelStrategy":
            options.setdefault("mesh", strategy.device_mesh)
        self.control = _Control(*optimizers, model=model, **options)
        self.scaler = None if native is None else self.control.as_scaler()
        return self.control

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scales the loss, unless the native plugin does it with `scaler`."""
        self.control.update_scale()
        self.has_loss = True
        return loss if self.scaler is not None else self.control.scale_loss(loss)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> None:
        """Steps one of the control's optimizers. With several, the scale is updated before the next loss."""
        if not any(optimizer is own for own in self.control.optimizers):
            raise ValueError(
                f"this {type(optimizer).__name__} does not belong to the GradientControl. Pass all optimizers to "
                "control_for(); in a Trainer, return them from configure_optimizers()."
            )
        self.has_loss = False
        has_more_optimizers = closure is None and len(self.control.optimizers) > 1
        self.control.step(closure, only=optimizer if has_more_optimizers else None)

    def unscale(self, optimizer: Any) -> None:
        """Unscales the gradients of one optimizer, unless they are already unscaled."""
        if self.control._phases[self.control._indices(optimizer)[0]].phase is Phase.SCALED:
            self.control.unscale_(only=optimizer)

    def clip(self, optimizer: Any, *, norm: float | None = None, value: float | None = None, p: float = 2.0) -> Any:
        """Clips the gradients in place, unless they contain NaN or Inf, which the control must find at the step."""
        if self.control._clip:
            raise ValueError(
                f"clip_gradients() and the clip of the GradientControl, {list(self.control._clip)!r}, both clip the "
                "gradients. Remove one of them."
            )
        if not any(own is optimizer for own in self.control.optimizers):
            optimizer = optimizer.optimizer  # Lightning's wrapper.
        self.unscale(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if norm is not None:
            return clip_grad_norm_(params, norm, p)
        if math.isfinite(self.control.norm(only=optimizer)):
            clip_grad_value_(params, value or 0.0)
        return None


class _TrainerPrecision(_ControlledPrecision):
    """The methods that the Trainer calls."""

    clips_in_control = True
    """True if the Trainer's clip is that of the control; False if the module calls `clip_gradients` itself."""
    unscales_for_hooks = False
    """True if a hook reads the gradients before the step."""

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(self.scale_loss(tensor), module)  # type: ignore[misc, no-any-return]

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if self.unscales_for_hooks:
            self.unscale(optimizer)
        super()._after_closure(model, optimizer)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any]) -> Any:
        if _requires_closure(optimizer):

            def evaluate() -> Any:
                loss = closure()
                self._after_closure(model, optimizer)
                return loss

            return self.step(optimizer, evaluate)
        result = closure()
        self._after_closure(model, optimizer)
        if self.has_loss or not model.automatic_optimization:  # training_step may return None.
            self.step(optimizer)
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val > 0 and not self.clips_in_control:
            self.clip(optimizer, **{"value" if gradient_clip_algorithm == "value" else "norm": float(clip_val)})

    def state_dict(self) -> dict[str, Any]:
        return self.control.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.control.load_state_dict(state_dict)


class _FabricPrecision(_ControlledPrecision):
    """The methods that Fabric calls."""

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(self.scale_loss(tensor), model, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None and _requires_closure(optimizer):
            return self.step(optimizer, closure)
        result = None if closure is None else closure()
        self.step(optimizer)
        return result


class _Guard(StepGuard):
    """Rejects steps without the control, except with lr=0: torch.distributed.checkpoint creates state that way."""

    def __call__(self, optimizer: Any, *_: Any) -> None:
        phase = self._phase()
        is_foreign = phase is not None and not phase.is_stepping
        if is_foreign and any(group.get("lr", 1.0) for group in optimizer.param_groups):
            raise ScaleMisuse(
                "optimizer.step() without the GradientControl. Remove any other control, and step the optimizer that "
                "self.optimizers() or fabric.setup() returns."
            )


class _Control(GradientControl):
    """A control that updates its scale before the next loss or checkpoint, because Lightning does not call `update`."""

    def __init__(self, *optimizers: Any, **options: Any) -> None:
        super().__init__(*optimizers, **options)
        controls = [item for item in gc.get_objects() if issubclass(type(item), GradientControl)]
        controlled = [getattr(control, "optimizers", ()) for control in controls if type(control) is not _Control]
        if any(a is b for group in controlled for a in group for b in optimizers):
            raise ValueError("the optimizer already has a GradientControl. Use that control or Lightning's, not both.")
        pairs = zip(optimizers, self._phases, strict=True)
        self.hooks = [optimizer.register_step_pre_hook(_Guard(phase)) for optimizer, phase in pairs]

    def update_scale(self) -> None:
        """Calls `update` after `step(only=)`."""
        if any(phase.pending is not None for phase in self._phases):
            self.update()

    def state_dict(self) -> dict[str, Any]:
        self.update_scale()
        return super().state_dict()


def control_for(fabric: Any, model: Any, optimizer: Any, *, scale: object = "auto", **options: Any) -> GradientControl:
    """Creates a GradientControl behind `fabric.backward`, `fabric.clip_gradients`, `fabric.load` and `optimizer.step`.

    `fabric.clip_gradients` is for controls without `clip`. It does not raise for NaN or Inf; the step is skipped.

    Args:
        fabric, model, optimizer, options: as for `gradilocks.integrations.control_for`.
        scale: as for GradientControlCallback.
    """
    strategy = fabric.strategy
    if isinstance(strategy.precision, _ControlledPrecision):
        raise ValueError(
            "this Fabric has a GradientControl. Pass all optimizers in one call. A second training needs a new Fabric."
        )
    wrappers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [item.optimizer if _is_fabric_wrapper(item) else item for item in wrappers]
    models = model.items() if isinstance(model, Mapping) else [("", model)]
    model = {prefix: module.module if _is_fabric_wrapper(module) else module for prefix, module in models}
    plugin = _controlled_copy(strategy.precision, _FabricPrecision)
    control: GradientControl = plugin.create_control(inner, model, strategy, scale=scale, **options)
    native_load = strategy.load_checkpoint

    def clip_norm(module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, **_: Any) -> Any:
        return plugin.clip(optimizer, norm=max_norm, p=float(norm_type))

    def clip_value(module: Any, optimizer: Any, clip_val: float) -> None:
        plugin.clip(optimizer, value=clip_val)

    def load_checkpoint(path: Any, state: Any = None, **kwargs: Any) -> Any:
        # ModelParallelStrategy replaces the objects in `state` with their loaded states instead of loading them.
        keys = [key for key, value in state.items() if value is control] if isinstance(state, dict) else []
        remainder = native_load(path=path, state=state, **kwargs)
        for key in keys:
            if state[key] is not control:
                control.load_state_dict(state[key])
                state[key] = control
        return remainder

    strategy.clip_gradients_norm, strategy.clip_gradients_value = clip_norm, clip_value
    strategy.load_checkpoint, strategy.precision = load_checkpoint, plugin
    return control


def _controlled_copy(native: Any, kind: type[_ControlledPrecision]) -> Any:
    """A copy of a precision plugin, of its class and `kind`; ValueError if it has its own `optimizer_step`."""
    native = getattr(native, "native", native)
    base = type(native)
    definer = next(kind for kind in base.__mro__ if "optimizer_step" in vars(kind))
    if definer.__name__ not in ("Precision", "MixedPrecision", "FSDPPrecision"):
        raise ValueError(
            f"{definer.__name__} steps the optimizer itself, which a GradientControl cannot replace. Use "
            "precision='32-true', 'bf16-mixed' or '16-mixed'. `gradilocks run` records such a script."
        )
    plugin = copy.copy(native)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}  # They are the key in checkpoints.
    plugin.__class__ = type(base.__name__, (kind, base), names)
    plugin.native = native
    return plugin


def _requires_closure(optimizer: Any) -> bool:
    """True for optimizers such as LBFGS, which evaluate the loss themselves."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_overridden(owner: Any, hook: str) -> bool:
    """True if a module or callback defines a hook that is not Lightning's own."""
    return not getattr(owner, hook).__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))


def _is_fabric_wrapper(wrapper: Any) -> bool:
    return any(kind.__name__ in ("_FabricOptimizer", "_FabricModule") for kind in type(wrapper).__mro__)
