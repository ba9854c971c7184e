"""Whose function runs when `optimizer.step()` is called, and what it reads.

An optimizer enters; what is known of the step that it runs itself leaves, or None. What takes the
decision inside its own pass reads `grad_scale` and `found_inf` off itself, and whoever sets
them must know that they arrive. A wrapper (Lightning's, Fabric's, a user's) forwards reads of
`_step_supports_amp_scaling` to the optimizer inside it, keeps for itself what is set on it, and may
even be an instance of that optimizer's class: it would step with the scale still in.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from gradilocks._torch import AMP_FLAG

__all__ = [
    "OwnStep",
    "has_own_amp_flag",
    "inner_optimizers",
    "is_ours",
    "own_step",
    "register_guard",
    "register_ours",
    "undecorated",
    "weakly",
    "why_not_inside",
]

_HANDED_OVER = {"grad_scale", "found_inf"}
_SET: Any = object.__setattr__
_GET: Any = object.__getattribute__


@dataclass(frozen=True)
class OwnStep:
    """What is known of the function that `optimizer.step()` runs with `optimizer` as its `self`."""

    reads_decision: bool
    """Whether it reads `grad_scale` and `found_inf` off the optimizer.

    True if it is that of `gradilocks.optim`, or names both in its code or in that of a method of
    the optimizer which it names, as torch's fused optimizers do and others that keep torch's
    contract. Somebody else's code that names both may also log or clear them around the step of an
    optimizer inside; so there the optimizer must have its groups and the flag itself, and hold no
    other optimizer. Nothing else is a proof: not the flag, which wrappers forward or copy; not the
    class, which they imitate; not that a subclass calls the step of its base, for it may look at
    gradients before and write weights after.
    """
    is_ours: bool
    """Whether it is that of `gradilocks.optim`."""
    is_proven: bool
    """Whether it is code that we know: that of torch or of `gradilocks.optim`."""
    goes_by_groups: bool
    """Whether it is torch's code, which goes by `fused` in the groups, or calls some step."""
    code: CodeType
    """What is inside torch's decorators."""


def own_step(optimizer: Any) -> OwnStep | None:
    """The step that `optimizer` runs itself, or None if it is not known to run one itself.

    It is not known if attributes of the object are forwarded or kept elsewhere, if it has no `step`
    of its own, or if another function has been put in its place. Decorators of torch's own
    (profiler and step hooks, `no_grad`, an LR scheduler's note that a step was taken) are looked
    through: they call what they wrap, on the same object.
    """
    global _latest
    kind: Any = type(optimizer)
    if kind.__setattr__ is not _SET or kind.__getattribute__ is not _GET:
        return None
    try:  # Without `__getattr__`, which would bring that of the optimizer inside.
        attributes = _GET(optimizer, "__dict__")
    except AttributeError:
        return None
    step, by_itself = attributes.get("step"), False
    if step is None:
        step, by_itself = getattr(kind, "step", None), True
        latest = _latest
        if latest[0] is kind and latest[1] is step:
            return latest[2]
    elif isinstance(step, MethodType):  # As accelerate leaves it after a step.
        step = step.__func__ if step.__self__ is optimizer else None
    else:
        step = _wrapped_by_scheduler(step, optimizer)
    if not isinstance(step, FunctionType):
        return None
    by_class = _examined.get(step)
    if by_class is None:
        by_class = _examined[step] = weakref.WeakKeyDictionary()
    found = by_class.get(kind)
    if found is None:
        found = by_class[kind] = _examine(step, kind)
    if found.reads_decision and not found.is_proven and _may_step_another(optimizer, attributes):
        return dataclasses.replace(found, reads_decision=False)
    if by_itself and found.is_proven:
        _latest = kind, step, found
    return found


def is_ours(optimizer: Any) -> bool:
    """Whether it is stepped by `gradilocks.optim`, and not by a wrapper or a subclass of it."""
    step = own_step(optimizer)
    return step is not None and step.is_ours


def register_ours(step: Any) -> None:
    """For `gradilocks.optim`, whose step reads the decision where its code does not show it."""
    _ours.add(undecorated(step))


def register_guard(step: Any) -> None:
    """For `gradilocks run --guard`: its steps call what they wrap, on the same object, or nothing.

    They are looked through like torch's own decorators.
    """
    _guards.add(step)


def undecorated(function: FunctionType) -> FunctionType:
    """The function inside torch's decorators; `functools.wraps` of others proves nothing."""
    while _is_torchs(function) or function in _guards:
        inner = function.__dict__.get("__wrapped__")
        if not isinstance(inner, FunctionType):
            break
        function = inner
    return function


def has_own_amp_flag(optimizer: Any) -> bool:
    """Whether who steps has `_step_supports_amp_scaling` itself, and does not forward it."""
    owner = getattr(optimizer.step, "__self__", optimizer)
    flag = inspect.getattr_static(owner, AMP_FLAG, False)
    return isinstance(flag, (bool, int)) and bool(flag)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that `optimizer` holds in its attributes, those inside them, and so on."""
    found: list[Any] = []
    seen = {id(optimizer)}
    waiting = [optimizer]
    while waiting:
        for value in _held_by(waiting.pop()):
            if id(value) not in seen and _is_an_optimizer(value):
                found.append(value)
                waiting.append(value)
            seen.add(id(value))
    return found


def why_not_inside(optimizer: Any) -> str:
    """For an error message: why an optimizer that could take the decision does not get it.

    Begins with a space; empty if the optimizer is none that could.
    """
    name = type(optimizer).__name__
    inside = inner_optimizers(optimizer)
    if inside:
        return (
            f" This {name} wraps an optimizer and is not known to hand the scale on, fused or not: "
            f"use the {type(inside[-1]).__name__} inside it."
        )
    groups = getattr(optimizer, "param_groups", ())
    if any(group.get("fused") for group in groups) and not hasattr(optimizer, AMP_FLAG):
        return (
            f" This {name} is fused, but it was copied or unpickled, and torch's copy forgets that "
            "it unscales by itself: make a new one over the copied parameters and load its "
            "state_dict."
        )
    step = own_step(optimizer)
    if getattr(optimizer, AMP_FLAG, False) and (step is None or not step.reads_decision):
        return (
            f" The step of this {name} is not the one that its fused class brings and is not known "
            "to unscale: use the class's own step."
        )
    return ""


def weakly(optimizer: Any) -> Callable[[], Any]:
    """What returns the optimizer without keeping it alive, unless its class admits nothing else."""
    try:
        return weakref.ref(optimizer)
    except TypeError:  # A class with slots and none for references.
        return lambda: optimizer


# What was found, by function and class, and only as long as they live.
_examined: weakref.WeakKeyDictionary[FunctionType, weakref.WeakKeyDictionary[type, OwnStep]]
_examined = weakref.WeakKeyDictionary()
# The latest class whose own step is known code: the same one asks several times a step, and a look
# into two weak dictionaries takes 1.5 µs.
_latest: tuple[Any, Any, OwnStep | None] = (None, None, None)
_ours: weakref.WeakSet[FunctionType] = weakref.WeakSet()
_guards: weakref.WeakSet[FunctionType] = weakref.WeakSet()


def _examine(step: FunctionType, kind: type) -> OwnStep:
    """What the code of `step` tells, as a method of the class `kind`."""
    function = undecorated(step)
    names = set(_names_in(function.__code__))
    # As `self.name` finds them: a class below may have a method of its own that reads nothing.
    called = [inspect.getattr_static(kind, name, None) for name in names - {"step"}]
    for method in called:
        if isinstance(method, FunctionType):
            names.update(_names_in(undecorated(method).__code__))
    ours = function in _ours
    # One that takes the whole scaler has the older contract, and reads nothing else.
    older = "grad_scaler" in inspect.signature(function).parameters
    return OwnStep(
        reads_decision=ours or (names >= _HANDED_OVER and not older),
        is_ours=ours,
        is_proven=ours or _is_torchs(function),
        goes_by_groups=_is_torchs(function) or "step" in function.__code__.co_names,
        code=function.__code__,
    )


def _may_step_another(optimizer: Any, attributes: dict[str, Any]) -> bool:
    """Whether somebody's optimizer may be a wrapper: not all is its own, or one is inside it."""
    if "param_groups" not in attributes or not has_own_amp_flag(optimizer):
        return True
    return bool(inner_optimizers(optimizer))


def _is_torchs(function: FunctionType) -> bool:
    # Not `__module__` and not `__name__`, which `functools.wraps` copies.
    return str(function.__globals__.get("__name__")).startswith("torch.")


def _wrapped_by_scheduler(step: object, optimizer: Any) -> object:
    """What an LR scheduler of torch has wrapped for this very optimizer; None if it is not that.

    A copy of the optimizer's attributes brings it to an object that it does not step.
    """
    if not isinstance(step, FunctionType):
        return None
    if step.__globals__.get("__name__") != "torch.optim.lr_scheduler":
        return None
    for cell in step.__closure__ or ():
        if isinstance(cell.cell_contents, weakref.ref) and cell.cell_contents() is optimizer:
            return step.__dict__.get("__wrapped__")
    return None


def _names_in(code: CodeType) -> Iterator[str]:
    """Attributes and strings that the code names, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _held_by(holder: Any) -> Iterator[Any]:
    """The values of an object's attributes and slots, and what is in lists and dicts among them."""
    try:
        attributes = _GET(holder, "__dict__")
    except AttributeError:
        attributes = {}
    # Without what every optimizer has, and a large model makes long.
    passed_over = ("state", "param_groups", "defaults")
    values = [value for name, value in attributes.items() if name not in passed_over]
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                values.append(_GET(holder, name))
            except AttributeError:  # Not set, or a private name.
                continue
    for value in values:
        yield value
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from list(value.values())


def _is_an_optimizer(value: Any) -> bool:
    try:
        return (
            not isinstance(value, type)
            and hasattr(value, "param_groups")
            and callable(getattr(value, "step", None))
        )
    except Exception:  # A weak reference whose object is gone, or whatever else people keep.
        return False
