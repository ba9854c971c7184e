"""Precision plugins of Lightning and Fabric, with a GradientControl in front of them.

The plugin that was chosen enters, one leaves that is the same (its class, its contexts, its name in
checkpoints) but for the loss, which carries the control's scale, and the step, which is the
control's. Lightning's Trainer and Fabric ask a plugin for the same things in slightly different
ways: `lightning.py` and `fabric.py` say what is their own. Nothing of Lightning's is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn, optim

from gradilocks import DynamicScale, GradientControl, GradScaler
from gradilocks.errors import NoGradients

__all__ = ["ControlledPrecision", "in_front_of", "needs_closure", "rank_options", "scale_for"]

_STEPS = ("Precision", "MixedPrecision", "FSDPPrecision")
"""The plugins whose `optimizer_step` does what a control does, and nothing else."""

Controlled = TypeVar("Controlled", bound="ControlledPrecision")


class ControlledPrecision:
    """What a plugin with a control in front does in Lightning and Fabric alike; a mixin."""

    native: Any
    """The plugin as it was chosen, untouched."""
    control: GradientControl | None = None
    scales = False
    scaler: Any = None
    """As the plugin has it: None, or the control as a torch.amp.GradScaler."""

    def __reduce__(self) -> Any:
        # The class is made at run time, and a copy has no control: it is the plugin itself.
        return _itself, (self.native,)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as it is to enter the plugin's own code."""
        if self.control is None or self.scaler is not None:  # The plugin will ask the scaler.
            return loss
        return self.control.scale_loss(loss)

    def step_by_control(self, optimizer: Any, closure: Callable[[], Tensor] | None = None) -> None:
        """Steps that optimizer by the control's decision; with nothing to step on, as torch does.

        torch's optimizers pass over parameters without a gradient, its scaler insists on one.
        """
        assert self.control is not None
        try:
            self.control.step(closure, only=optimizer)
        except NoGradients:
            if self.scaler is not None:
                raise

    def unscale_for(self, optimizer: Any) -> None:
        """Makes the gradients of that optimizer true for somebody who looks at them."""
        assert self.control is not None
        if self.scales and not self.control.unscaled:
            self.control.unscale_(only=optimizer)

    def follow(self, control: GradientControl, *, scales: bool) -> None:
        """Steps by that control, which also stands where the plugin has its scaler, if it has one.

        Args:
            control: over the optimizers that the plugin will be asked to step.
            scales: whether it has a scale, so that gradients are not as they seem.
        """
        self.control, self.scales = control, scales
        if getattr(self.native, "scaler", None) is not None:
            self.scaler = control.as_scaler(policies="control")


def _itself(plugin: Any) -> Any:
    return plugin


def in_front_of(native: Any, kind: type[Controlled], *, used_by: str) -> Controlled:
    """A plugin like `native`, of its class and of `kind`.

    Args:
        native: the plugin that was chosen.
        kind: what is different.
        used_by: who asks, for the error.

    Raises:
        ValueError: it scales or steps by itself, so that a control would be the second one.
    """
    base = type(native)
    stepping = next((k for k in base.__mro__ if "optimizer_step" in vars(k)), base)
    ours = stepping.__name__ in _STEPS
    if not ours or not stepping.__module__.startswith(("lightning", "pytorch_lightning")):
        raise ValueError(
            f"{used_by} takes the step, and {base.__name__} has an optimizer_step of its own "
            f"(of {stepping.__module__}), which would be left out. Use a precision that has none, "
            "as '16-mixed', 'bf16-mixed' or '32-true', or leave the control out."
        )
    if isinstance(getattr(native, "scaler", None), GradScaler):
        raise ValueError(
            f"{base.__name__} has a gradilocks.GradScaler already, and {used_by} would be a second "
            "one. Leave one of them out: what the scaler was given, scale= and clip= take."
        )
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    made: Controlled = object.__new__(type(base.__name__, (kind, base), names))
    made.__dict__.update(native.__dict__)
    made.native = native
    return made


def needs_closure(optimizer: Any) -> bool:
    """Whether it cannot step without a closure, as LBFGS, which evaluates the loss itself."""
    if isinstance(optimizer, optim.LBFGS):
        return True
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def scale_for(scale: object, native: Any) -> object:
    """What GradientControl takes as `scale`: "auto" begins where the plugin's scaler would have."""
    if not isinstance(scale, str) or scale != "auto":
        return scale
    scaler = getattr(native, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    settings = ("growth_factor", "backoff_factor", "growth_interval")
    state = scaler.state_dict()
    return DynamicScale(init_scale=state["scale"], **{name: state[name] for name in settings})


def rank_options(
    options: Mapping[str, Any], strategy: Any, models: Iterable[nn.Module]
) -> dict[str, Any]:
    """What a strategy says of the ranks, where the user has said nothing.

    ModelParallelStrategy has a mesh of all ranks, on whose dimensions they hold equal or sharded
    parameters. FullyShardedDataParallel leaves plain tensors that are parts, over its group.
    """
    if {"mesh", "process_group", "copies"} & {k for k, v in options.items() if v is not None}:
        return {}
    if hasattr(type(strategy), "device_mesh"):
        return {"mesh": strategy.device_mesh}
    modules: Iterable[Any] = (each for model in models for each in model.modules())
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            shards = module.sharding_strategy.name != "NO_SHARD"
            return {"process_group": module.process_group} if shards else {}
    return {}
