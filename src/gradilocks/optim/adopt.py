"""An optimizer of torch that somebody has made enters; the same object leaves, stepping as ours.

Frameworks and scripts make their optimizers themselves, and hand them to schedules, wrappers and
hooks before anybody else sees them. So the object stays, with its groups, state and hooks, and what
it is changes: its class, and the functions that have been put around its step.
"""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor

from gradilocks._torch import rewrapped_by_schedule
from gradilocks.names import Names
from gradilocks.optim.adam import Adam, AdamW
from gradilocks.optim.fused_optimizer import FusedOptimizer
from gradilocks.optim.optimizer_state import check_group
from gradilocks.optim.sgd import SGD
from gradilocks.step.framework_wrappers import every_stepper, take_new_step
from gradilocks.step.own_step import own_step, undecorated
from gradilocks.step.table import every_parameter, refuse_twice

__all__ = ["adopt"]

_Optimizer = TypeVar("_Optimizer")

# By these names also while `gradilocks run --swap-optimizer` is on.
_OURS: dict[type, type[FusedOptimizer]] = {
    next(kind for kind in ours.__mro__ if kind.__module__.startswith("torch.optim.")): ours
    for ours in (Adam, AdamW, SGD)
}


def adopt(optimizer: _Optimizer) -> _Optimizer:
    """Turns a torch.optim Adam, AdamW or SGD into that of gradilocks.optim, in place.

    Groups, state, hooks and schedules stay; it goes on as a new optimizer of gradilocks.optim would
    that has loaded its `state_dict`. Inside a framework's wrapper (`unwrapped`) the one that steps
    is adopted, so hand over the wrapper where there is one. One that is ours already stays as it
    is.

    Args:
        optimizer: torch's, or a subclass that changes nothing but the constructor; perhaps in a
            wrapper, with schedules around its step.

    Returns:
        The same object.

    Raises:
        TypeError: it is no such optimizer, steps in a way of its own, or has a parameter of a dtype
            for which there is no kernel. Nothing has changed then.
        ValueError: it has a setting that ours has not, such as `differentiable=True`. Likewise.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        >>> gradilocks.optim.adopt(optimizer)  # The schedule goes on.
    """
    inside = [each for each in every_stepper(optimizer) if not isinstance(each, FusedOptimizer)]
    classes = [_class_for(each) for each in inside]
    for each, kind in zip(inside, classes, strict=True):
        _become(each, kind)
    if inside:
        take_new_step(optimizer)
    return optimizer


def _class_for(optimizer: Any) -> type:
    """The class that an optimizer is to have; raises if it cannot be adopted."""
    theirs: Any = type(optimizer)
    base: Any = next((kind for kind in theirs.__mro__ if kind in _OURS), None)
    if base is None:
        raise TypeError(
            "adopt() takes torch.optim's Adam, AdamW or SGD, or a known wrapper around one, got "
            f"{theirs.__name__}. gradilocks.optim has no other optimizers."
        )
    step = base.step
    code = undecorated(step).__code__
    changed = [
        name
        for kind in theirs.__mro__[: theirs.__mro__.index(base)]
        for name, value in vars(kind).items()
        if name not in _HARMLESS
        and hasattr(base, name)
        # torch puts its hooks around the step of each class that it meets.
        and not (isinstance(value, FunctionType) and undecorated(value).__code__ is code)
    ]
    if changed:
        raise TypeError(
            f"{theirs.__name__} is a torch.optim.{base.__name__} with {changed[0]} of its own, "
            "which gradilocks.optim would not call. Only a subclass that changes nothing but the "
            "constructor can be adopted."
        )
    own, around = own_step(optimizer), vars(optimizer).get("step")
    known = own is not None and own.code is code
    if isinstance(around, FunctionType):
        known = known and rewrapped_by_schedule(around, step) is not None
    if not known:
        raise TypeError(
            f"somebody has put another function in the place of the step of this "
            f"{theirs.__name__}, and what it does is not known. Adopt the optimizer before that."
        )
    names = Names(None, (optimizer,))
    for group in optimizer.param_groups:
        check_group(group, names)
    refuse_twice(list(every_parameter((optimizer,))), names)
    ours: Any = _OURS[base]
    return ours if theirs is base else _class_between(ours, theirs)


_HARMLESS = {
    "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
    "__orig_bases__", "__parameters__", "__qualname__", "__repr__", "__static_attributes__",
    "__weakref__",
}  # fmt: skip
"""What a subclass may have of its own."""


@functools.cache
def _class_between(ours: Any, theirs: Any) -> type:
    """Ours, that is also of a user's class, which changes nothing but the constructor."""
    own = {"__init__": theirs.__init__, "__module__": theirs.__module__, "__doc__": theirs.__doc__}
    return type(theirs.__name__, (ours, theirs), {**own, "__reduce_ex__": _reduced})


def _reduced(optimizer: Any, protocol: int) -> Any:
    """Such a class cannot be found by its name: the two that it is made of can."""
    ours, theirs = type(optimizer).__bases__
    return _blank, (ours, theirs), optimizer.__getstate__()


def _blank(ours: type, theirs: type) -> Any:
    kind: Any = _class_between(ours, theirs)
    return kind.__new__(kind)


def _become(optimizer: Any, kind: Any) -> None:
    """Changes the class, and makes what is around the step anew."""
    around = vars(optimizer).get("step")
    optimizer.__class__ = kind
    for param in every_parameter((optimizer,)):
        state = optimizer.state.get(param, {})
        for key, value in list(state.items()):
            # As load_state_dict does; moments of another dtype are somebody's own doing.
            moments = isinstance(value, Tensor) and key != "step" and param.is_floating_point()
            if moments and value.dtype != param.dtype:
                state[key] = value.to(param.dtype)
    # As after an unpickling: missing settings, counts as tensors, torch's hooks around the class's
    # step, and all that our own constructors prepare.
    optimizer.__setstate__({})
    optimizer.defaults.setdefault("master_weights", False)  # For groups that are added later.
    if isinstance(around, FunctionType):
        optimizer.step = rewrapped_by_schedule(around, kind.step)
    elif around is not None:  # A bound method, as accelerate leaves it after a step.
        optimizer.step = MethodType(kind.step, optimizer)
