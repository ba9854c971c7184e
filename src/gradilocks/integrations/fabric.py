"""Lightning Fabric: `fabric.backward` and `optimizer.step` of its users → one GradientControl.

A Fabric, a model and optimizers enter, a control leaves that stands where Fabric's precision plugin
would ask for a scaler. Fabric's own loop stays as it is written: it scales by the control's scale
and steps by the control's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gradilocks import GradientControl, optim
from gradilocks.integrations.lightning_precision import (
    ControlledPrecision,
    in_front_of,
    needs_closure,
    rank_options,
    scale_for,
)

__all__ = ["control_for"]


def control_for(
    fabric: Any,
    model: nn.Module | Mapping[str, nn.Module],
    *optimizers: Any,
    scale: object = "auto",
    adopt: bool = False,
    **options: Any,
) -> GradientControl:
    """A GradientControl for models and optimizers that `fabric.setup` has returned.

    From then on `fabric.backward(loss)` scales by it and `optimizer.step()` steps by it, so a loop
    that is there already stays as it is; `control.backward(loss)` and `control.step()` do the same.
    The scaler of `precision="16-mixed"` gives way: its settings are where the control begins.

    Args:
        fabric: a Fabric, of `lightning` or of `lightning_fabric`.
        model: what names the parameters: the module, or a mapping from a prefix to a module.
        optimizers: all that the control is to step.
        scale: "auto" scales dynamically where Fabric itself scales, and not at all elsewhere; else
            as GradientControl takes it.
        adopt: whether torch's Adam, AdamW and SGD become those of `gradilocks.optim`; another
            optimizer raises TypeError then.
        options: the further options of GradientControl: clip, record, on_nonfinite and so on.

    Returns:
        The control. `fabric.save(path, {"control": control, ...})` and `fabric.load` keep its
        state.

    Raises:
        ValueError: a control is there already, or Fabric's precision scales or steps in a way that
            a control cannot take the place of, as DeepSpeed's.

    Example:
        >>> model, optimizer = fabric.setup(model, optimizer)  # doctest: +SKIP
        >>> control = control_for(fabric, model, optimizer, clip=1.0)  # doctest: +SKIP
    """
    if not callable(getattr(fabric, "backward", None)) or not hasattr(fabric, "strategy"):
        raise TypeError(
            "control_for() takes a Fabric, then its model and optimizers, as control_for(fabric, "
            f"model, optimizer, clip=1.0); got {type(fabric).__name__} first."
        )
    if not optimizers:
        raise TypeError(
            "control_for() takes the optimizers that the control is to step, and got none: "
            "control_for(fabric, model, optimizer)."
        )
    native = fabric.strategy.precision
    if isinstance(native, ControlledPrecision):
        raise ValueError(
            "this Fabric has a control already, and fabric.backward(loss) cannot tell which of two "
            "is meant. Make one over all optimizers: control_for(fabric, {'first': one, 'second': "
            "another}, optimizer, other_optimizer)."
        )
    plugin = in_front_of(native, _FabricPrecision, used_by="control_for()")
    modules = model.values() if isinstance(model, Mapping) else [model]
    options = {**options, **rank_options(options, fabric.strategy, modules)}
    scale = scale_for(scale, native)
    for optimizer in optimizers if adopt else ():
        optim.adopt(optimizer)
    control = _FabricControl(*map(_bare, optimizers), model=model, scale=scale, **options)
    control.fabric = fabric
    plugin.follow(control, scales=scale is not None)
    fabric.strategy.precision = plugin
    return control


def _bare(optimizer: Any) -> Any:
    """What Fabric has wrapped: its wrapper steps by the precision plugin, which is the control."""
    wrapped = any(kind.__name__ == "_FabricOptimizer" for kind in type(optimizer).__mro__)
    return optimizer.optimizer if wrapped else optimizer


class _FabricControl(GradientControl):
    """A control whose `backward` is Fabric's: the models that Fabric has set up insist on it."""

    fabric: Any

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.fabric.backward(loss, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, policies: str = "control") -> None:
        # `fabric.load` calls it, and what `control_for` was given is the user's to change.
        super().load_state_dict(state_dict, policies=policies)


class _FabricPrecision(ControlledPrecision):
    """What Fabric asks of a precision plugin."""

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        inner: Any = super()
        inner.backward(self.scaled(tensor), model, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        if kwargs:
            raise TypeError(
                f"a GradientControl steps {type(optimizer).__name__}, and takes a closure alone; "
                f"got {', '.join(kwargs)}."
            )
        assert self.control is not None
        if not any(each is optimizer for each in self.control.optimizers):
            raise ValueError(
                f"this {type(optimizer).__name__} was set up by a Fabric whose steps are a "
                "GradientControl's, and it is none of those that the control was given: its "
                "gradients may carry the control's scale. Give it all that Fabric steps: "
                "control_for(fabric, {'first': model, 'second': other}, optimizer, another), or "
                "control.bind(...) where it has taken the place of another."
            )
        if closure is not None and needs_closure(optimizer):
            return self.step_by_control(optimizer, closure)
        result = None if closure is None else closure()
        self.step_by_control(optimizer)
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        self.unscale_for(optimizer)
