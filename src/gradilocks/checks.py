"""What users hand to a GradientControl, checked: what came, what was expected, the way out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from gradilocks.clip import Chain
from gradilocks.eager import users_line
from gradilocks.errors import BadState, NoGradients
from gradilocks.names import Names
from gradilocks.step.framework_wrappers import refuse_second_scaler
from gradilocks.step.table import every_parameter, refuse_twice

__all__ = [
    "IN_A_PATTERN",
    "check_closure",
    "check_give_up_after",
    "check_loss",
    "check_parameters",
    "check_policies_from",
    "check_scalar_loss",
    "checked_optimizers",
    "no_gradients",
    "refuse_misfits",
    "refuse_patterns",
    "warn_of_misfits",
    "warn_of_strangers",
]

IN_A_PATTERN = frozenset("*?")
"""What makes a text surely a pattern: a dot and a bracket may be in the name of a group, too."""


def checked_optimizers(optimizers: Sequence[Any]) -> tuple[Any, ...]:
    for optimizer in optimizers:
        if isinstance(optimizer, type) or not (
            hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))
        ):
            came = (
                f"the class {optimizer.__name__}"
                if isinstance(optimizer, type)
                else repr(type(optimizer).__name__)
            )
            raise TypeError(
                "GradientControl takes optimizers, objects with param_groups and step(), got "
                f"{came}. Write GradientControl(optimizer, model=model)."
            )
        refuse_second_scaler(optimizer)
    return tuple(optimizers)


def check_parameters(optimizers: Sequence[Any], names: Names) -> None:
    params = list(every_parameter(optimizers))
    if not params:
        raise ValueError("the optimizer has no parameters, so there are no gradients to control.")
    refuse_twice(params, names)
    for param in params:
        if param.is_meta:
            raise ValueError(
                f"{names(param)} is on the meta device and has no values. Give the model real "
                "storage first, for example model.to_empty(device='cpu')."
            )


def warn_of_strangers(model: Any, params: Iterable[Tensor], names: Names) -> None:
    """Warns if the model owns none of the optimizers' parameters: it cannot name them."""
    if model is not None and not names.knows_any(params):
        warnings.warn(
            "model= has none of the parameters that the optimizer was given, so they will not be "
            "called by its names. Is it the model that is trained?",
            stacklevel=users_line(),
        )


def refuse_misfits(policy: Any, names: Names, *, loaded: bool = False) -> None:
    """Raises if a group or a pattern of the policy fits no parameter of the optimizers.

    Args:
        policy: a clip policy.
        names: of the optimizers' parameters.
        loaded: whether the policy's settings are those of a checkpoint.
    """
    every = names.of(every_parameter(names.optimizers))
    for message in policy.misfits(every, names.groups()).values():
        raise _misfit(message, loaded=loaded)


def _misfit(message: str, *, loaded: bool) -> ValueError:
    if not loaded:
        return ValueError(message)
    return BadState(
        f"the clip policy in the state_dict does not fit: {message} To keep the one that this "
        "control was made with: load_state_dict(..., policies='control')."
    )


def refuse_patterns(policy: Any, model: Any, *, loaded: bool = False) -> None:
    """Raises if what is surely a pattern of names fits nothing in the model; a group may still
    come with an optimizer.

    Args:
        policy: a clip policy.
        model: names the parameters; None if there is none.
        loaded: as in `refuse_misfits`.
    """
    if model is None:
        return
    every = Names(model, ()).every()
    for part in policy.policies if isinstance(policy, Chain) else (policy,):
        for key, message in part.misfits(every, [(-1, None)] * len(every)).items():
            # AdaptiveClip, which goes by units, knows no groups.
            if isinstance(key, str) and (part.by_unit or set(key) & IN_A_PATTERN):
                raise _misfit(message, loaded=loaded)


def warn_of_misfits(policy: Any, each: Iterable[Names]) -> None:
    """Warns of groups and patterns that fit no parameter of the optimizers that came so far.

    Args:
        policy: a clip policy.
        each: names the parameters of one optimizer each, or of several.
    """
    names: list[str] = []
    groups: list[tuple[int, str | None]] = []
    for one in each:
        names += one.of(every_parameter(one.optimizers))
        groups += one.groups()
    for message in policy.misfits(names, groups).values():
        warnings.warn(
            f"{message} If it is meant for an optimizer that has not stepped yet, all is well.",
            stacklevel=users_line(),
        )


def check_give_up_after(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"give_up_after must be an int or None, got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"give_up_after must be at least 1, or None for never, got {value}.")


def check_policies_from(policies: object) -> None:
    if policies not in ("checkpoint", "control"):
        raise ValueError(f"policies must be 'checkpoint' or 'control', got {policies!r}.")


def check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {type(loss).__name__}.")
    if not loss.is_floating_point():
        raise TypeError(f"loss must be a real floating-point tensor, got {loss.dtype}.")
    if not loss.requires_grad:
        raise ValueError(
            "loss does not require grad, so it has no gradients. Was it computed under "
            "torch.no_grad(), detached, or rebuilt from .item()?"
        )


def check_scalar_loss(loss: Tensor) -> None:
    check_loss(loss)
    if loss.numel() != 1:
        raise ValueError(
            f"loss must be a scalar, got shape {tuple(loss.shape)}. Reduce it first, for "
            "example with loss.mean() or loss.sum()."
        )


def no_gradients(names: Names) -> NoGradients:
    """The error of a step that finds no gradient."""
    known = names.model is not None and "torch.distributed.fsdp" in sys.modules
    if known and not names.knows_any(every_parameter(names.optimizers)):
        return NoGradients(
            "no parameter of the optimizer has a gradient, and none of them is in the model any "
            "more: fully_shard() (FSDP2) replaces a model's parameters, and so does FSDP1. Shard "
            "the model first, then make the optimizer of model.parameters(), then the control."
        )
    return NoGradients(
        "no parameter of the optimizer has a gradient. Check that the loss depends on the "
        "parameters the optimizer was given, that they require grad, and that nothing has "
        "cleared the gradients after backward()."
    )


def check_closure(closure: object, optimizers: int) -> None:
    """`step` takes a closure or nothing; who comes from GradScaler may hand it an optimizer."""
    if not callable(closure) or isinstance(closure, Tensor):
        raise TypeError(
            f"closure must be a function that returns the loss, got {type(closure).__name__}. The "
            "control knows its optimizers: call control.step()."
        )
    if optimizers != 1:
        raise ValueError(
            f"step(closure) drives one optimizer, this control has {optimizers}. Give each "
            "optimizer that needs a closure a GradientControl of its own."
        )
