"""Frameworks' wrappers around an optimizer: which of them hand the step on untouched, and to whom.

An optimizer enters; the optimizers that really step when its `step()` is called leave. Lightning,
Fabric, Accelerate, torchtitan and torch's ZeRO put an object of theirs around the optimizer. Its
`step` must be called, for they count steps and run hooks there; but what reads the decision is the
optimizer inside it. Where the wrapper's code is known to do nothing with gradients and weights
on the way, the decision is set on the one inside. Every other wrapper, and these when their
framework does more (a hook that looks at gradients, a clip of its own), is `None` here: its
gradients are made true before its step, which is right for all of them and slower.

Nothing is imported to find out: a wrapper's class is known by the module that defines it. The
private names of frameworks that are read here are in `integrations.framework_names`.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from gradilocks.step.own_step import is_ours, own_step, undecorated

__all__ = [
    "KINDS",
    "every_stepper",
    "ours_inside",
    "refuse_second_scaler",
    "steppers",
    "take_new_step",
    "unwrapped",
]


class _Wrapper(NamedTuple):
    """A class of wrappers, by what is known of its `step`."""

    inside: Callable[[Any], Sequence[Any]]
    """The optimizers that it holds."""
    hands_on: Callable[[Any], bool]
    """Whether its step does nothing to gradients and weights, but by the step of those inside."""
    scaler: Callable[[Any], Any] = lambda _: None
    """The scaler through which it would step, if it has one."""
    waits: Callable[[Any], bool] = lambda _: False
    """Whether its step would do nothing at the moment."""
    take_new_step: Callable[[Any], None] = lambda _: None
    """Takes over that the optimizer inside has another step, and is fused, from here on."""


KINDS: weakref.WeakKeyDictionary[type, _Wrapper | None] = weakref.WeakKeyDictionary()
"""What is known of each class of optimizers that has been asked for; None for one that is no known
wrapper. To be looked into before a call of `steppers`, which a bare optimizer need not pay."""


def steppers(optimizer: Any) -> tuple[Any, ...] | None:
    """The optimizers that step, untouched, when `optimizer.step()` is called.

    Returns:
        Those inside known wrappers, through chains of them; None if `optimizer` is no such wrapper
        or does more at the moment than to hand the step on.
    """
    wrapper = _kind_of(optimizer)
    if wrapper is None or not _is_plain(optimizer) or not wrapper.hands_on(optimizer):
        return None
    found: list[Any] = []
    for inner in wrapper.inside(optimizer):
        if _kind_of(inner) is None:
            found.append(inner)
            continue
        further = steppers(inner)
        if further is None:
            return None
        found += further
    return tuple(found)


def every_stepper(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers inside known wrappers, whatever the wrappers do; a bare one itself."""
    wrapper = _kind_of(optimizer)
    if wrapper is None:
        return (optimizer,)
    return tuple(each for inner in wrapper.inside(optimizer) for each in every_stepper(inner))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of frameworks, such as that of a Lightning Trainer.

    Known are Lightning's, Fabric's and Accelerate's wrappers, torchtitan's container if it holds
    one optimizer, and torch's ZeroRedundancyOptimizer, also one around the other. Anything else is
    returned as it is: a wrapper that nobody knows may do more than to hand the step on.

    Args:
        optimizer: as a framework handed it out.

    Example:
        >>> inner = gradilocks.optim.unwrapped(self.optimizers())  # In a LightningModule.
        >>> type(inner)
        <class 'torch.optim.adamw.AdamW'>
    """
    inside = every_stepper(optimizer)
    return inside[0] if len(inside) == 1 else optimizer


def ours_inside(optimizer: Any) -> Any:
    """The optimizer of `gradilocks.optim` that steps, with the same groups; None if there is none.

    Itself, or the only one inside a wrapper that hands on and shows its groups as they are.
    """
    inside = steppers(optimizer) or (optimizer,)
    same = len(inside) == 1 and inside[0].param_groups is optimizer.param_groups
    return inside[0] if same and is_ours(inside[0]) else None


def take_new_step(optimizer: Any) -> None:
    """Tells known wrappers that the optimizers inside have become ours (`optim.adopt`)."""
    wrapper = _kind_of(optimizer)
    if wrapper is not None:
        for inner in wrapper.inside(optimizer):
            take_new_step(inner)
        wrapper.take_new_step(optimizer)


def refuse_second_scaler(optimizer: Any, *, steps: bool = False) -> None:
    """Raises if a framework would scale, unscale or skip by itself, beside whoever asks.

    Args:
        optimizer: perhaps a wrapper.
        steps: whether its step is to be called now; then also if it would do nothing.
    """
    wrapper = _kind_of(optimizer)
    if wrapper is None:
        for kind in type(optimizer).__mro__:
            if f"{kind.__module__}.{kind.__qualname__}" in _STEP_ALONE:
                raise ValueError(
                    f"{type(optimizer).__name__} belongs to a framework that scales, clips and "
                    "skips inside its own step, on gradients that it keeps for itself. A second "
                    "scale and clip beside them cannot be right: set both in that framework's "
                    "configuration, or train without it."
                )
        return
    name = type(optimizer).__name__
    scaler = wrapper.scaler(optimizer)
    if scaler is not None and _is_enabled(scaler) and not _is_a_controls(scaler):
        raise ValueError(
            f"this {name} steps through a scaler of its framework's ({type(scaler).__name__}), "
            "which would divide by a scale of its own and decide about the skip a second time. "
            "Turn mixed precision with float16 off in the framework, or hand over the optimizer "
            "inside, gradilocks.optim.unwrapped(optimizer), and keep the framework's scaler out of "
            "backward() and step()."
        )
    if steps and wrapper.waits(optimizer):
        raise ValueError(
            f"this {name} would do nothing now: its framework is accumulating gradients. Call "
            "step() and zero_grad() only after the last part, as under "
            "`if accelerator.sync_gradients:`."
        )
    for inner in wrapper.inside(optimizer):
        refuse_second_scaler(inner, steps=steps)


def _kind_of(optimizer: Any) -> _Wrapper | None:
    """What is known of the class; by the function that its `step` is, so a subclass may rename it.

    A subclass with a step of its own is not known.
    """
    kind = type(optimizer)
    if kind in KINDS:
        return KINDS[kind]
    step = inspect.getattr_static(kind, "step", None)
    found = None
    if isinstance(step, FunctionType):
        step = undecorated(step)
        module = str(step.__globals__.get("__name__"))
        name, wrapper = _KNOWN.get(module, ("", None))
        home = getattr(sys.modules.get(module), name, None)
        theirs = None if home is None else vars(home).get("step")
        if isinstance(theirs, FunctionType) and undecorated(theirs) is step:
            found = wrapper
    KINDS[kind] = found
    return found


def _is_plain(optimizer: Any) -> bool:
    """Whether `optimizer.step` is that of its class, and nobody has put another in its place."""
    step = own_step(optimizer)
    known = inspect.getattr_static(type(optimizer), "step")
    return step is not None and step.code is undecorated(known).__code__


def _is_enabled(scaler: Any) -> bool:
    return not hasattr(scaler, "is_enabled") or scaler.is_enabled() is not False


def _is_a_controls(scaler: Any) -> bool:
    """Whether it is what `control.as_scaler()` makes, which knows that a step is going on."""
    return getattr(type(scaler), "steps_by_a_control", False) is True


def _comes_from(owner: Any, name: str, *places: tuple[str, str]) -> bool:
    """Whether `owner.name` is one of the functions `places`, given as (module, qualified name)."""
    if name in getattr(owner, "__dict__", {}):
        return False
    # Not `type(owner)`, for Lightning's wrapper holds its strategy by a weak proxy.
    function = inspect.getattr_static(owner.__class__, name, None)
    if not isinstance(function, FunctionType):
        return False
    return (str(function.__globals__.get("__name__")), function.__qualname__) in places


# --- Lightning and Fabric -------------------------------------------------------------------------


def _lightning(package: str) -> _Wrapper:
    """LightningOptimizer: the strategy's and the precision plugin's steps are in between.

    These call `on_before_optimizer_step` of the module and of callbacks, which look at gradients,
    and with automatic optimization a clip.
    """
    precision = f"{package}.plugins.precision"

    def hands_on(optimizer: Any) -> bool:
        strategy = vars(optimizer)["_strategy"]
        module = getattr(strategy, "lightning_module", None)
        plugin = getattr(strategy, "precision_plugin", None)
        if module is None or module.automatic_optimization:
            return False
        ddp = f"{package}.strategies.ddp", "DDPStrategy.optimizer_step"
        alone = f"{package}.strategies.strategy", "Strategy.optimizer_step"
        averages = getattr(strategy, "_model_averager", None) is not None
        if averages or not _comes_from(strategy, "optimizer_step", alone, ddp):
            return False
        if not _comes_from(
            plugin,
            "optimizer_step",
            (f"{precision}.precision", "Precision.optimizer_step"),
            (f"{precision}.amp", "MixedPrecision.optimizer_step"),
            (f"{precision}.fsdp", "FSDPPrecision.optimizer_step"),
        ):
            return False
        for name in ("_wrap_closure", "_after_closure", "_clip_gradients"):
            if not _comes_from(plugin, name, (f"{precision}.precision", f"Precision.{name}")):
                return False
        hook = "on_before_optimizer_step"
        return _comes_from(module, hook, (f"{package}.core.hooks", f"ModelHooks.{hook}")) and all(
            _comes_from(callback, hook, (f"{package}.callbacks.callback", f"Callback.{hook}"))
            for callback in module.trainer.callbacks
        )

    def scaler(optimizer: Any) -> Any:
        plugin = getattr(vars(optimizer)["_strategy"], "precision_plugin", None)
        return getattr(plugin, "scaler", None)

    return _Wrapper(lambda optimizer: (vars(optimizer)["_optimizer"],), hands_on, scaler)


def _fabric(package: str) -> _Wrapper:
    """_FabricOptimizer: the strategy's and the precision plugin's steps are in between."""
    precision = f"{package}.plugins.precision"

    def hands_on(optimizer: Any) -> bool:
        strategy = vars(optimizer)["_strategy"]
        if hasattr(strategy, "model"):  # As DeepSpeed's, whose model is stepped instead.
            return False
        base = f"{package}.strategies.strategy", "Strategy.optimizer_step"
        return _comes_from(strategy, "optimizer_step", base) and _comes_from(
            strategy.precision,
            "optimizer_step",
            (f"{precision}.precision", "Precision.optimizer_step"),
            (f"{precision}.amp", "MixedPrecision.optimizer_step"),
            (f"{precision}.fsdp", "FSDPPrecision.optimizer_step"),
        )

    def scaler(optimizer: Any) -> Any:
        return getattr(vars(optimizer)["_strategy"].precision, "scaler", None)

    return _Wrapper(lambda optimizer: (vars(optimizer)["_optimizer"],), hands_on, scaler)


# --- Accelerate, torch, torchtitan ----------------------------------------------------------------


def _accelerated_hands_on(optimizer: Any) -> bool:
    # On XLA its step adds up the gradients of all ranks first.
    distributed = getattr(optimizer.accelerator_state, "distributed_type", None)
    return (
        (optimizer.scaler is None or _is_a_controls(optimizer.scaler))
        and optimizer.gradient_state.sync_gradients
        and getattr(distributed, "value", distributed) != "XLA"
    )


def _accelerated_takes_new_step(optimizer: Any) -> None:
    """It keeps the step of the one inside, twice, and makes both anew when it is unpickled."""
    optimizer.__setstate__({})


def _zero_takes_new_step(optimizer: Any) -> None:
    """Its groups are copied into those of the one inside at each step."""
    for mine, inner in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
        mine.update({key: value for key, value in inner.items() if key != "params"})


def _container_takes_new_step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.update({key: key == "fused" for key in ("fused", "foreach") if key in group})


def _zero_hands_on(optimizer: Any) -> bool:
    """After the local step the ranks send each other their parameters, as they then are.

    A fused SGD of torch's that has to make buffers is skipped by the host (`must_skip_on_host`),
    and ranks whose part needs none would wait in vain for those parameters.
    """
    if not type(optimizer).__module__.startswith("torch."):  # A subclass may do more on the way.
        return False
    inner = optimizer.optim
    if is_ours(inner) or not isinstance(inner, torch.optim.SGD):
        return True
    return all(group["momentum"] == 0 for group in optimizer.param_groups)


_KNOWN: dict[str, tuple[str, _Wrapper]] = {
    **{
        f"{package}.core.optimizer": ("LightningOptimizer", _lightning(package))
        for package in ("lightning.pytorch", "pytorch_lightning")
    },
    **{
        f"{package}.wrappers": ("_FabricOptimizer", _fabric(package))
        for package in ("lightning.fabric", "lightning_fabric")
    },
    "accelerate.optimizer": (
        "AcceleratedOptimizer",
        _Wrapper(
            lambda optimizer: (optimizer.optimizer,),
            _accelerated_hands_on,
            scaler=lambda optimizer: optimizer.scaler,
            waits=lambda optimizer: not optimizer.gradient_state.sync_gradients,
            take_new_step=_accelerated_takes_new_step,
        ),
    ),
    "torch.distributed.optim.zero_redundancy_optimizer": (
        "ZeroRedundancyOptimizer",
        _Wrapper(
            lambda optimizer: (optimizer.optim,),
            _zero_hands_on,
            take_new_step=_zero_takes_new_step,
        ),
    ),
    "torchtitan.components.optimizer": (
        "OptimizersContainer",
        _Wrapper(
            lambda optimizer: tuple(optimizer.optimizers),
            lambda _: True,
            take_new_step=_container_takes_new_step,
        ),
    ),
}
"""By the module that defines the step: the class there, and what is known of it."""

_STEP_ALONE = {
    "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper",
    "accelerate.utils.megatron_lm.MegatronLMOptimizerWrapper",
    "deepspeed.runtime.DeepSpeedOptimizer",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
    "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
}
"""Classes whose step scales, clips and skips, or does nothing because an engine does all that."""
