"""Which function runs when `optimizer.step()` is called, on whom, and what it reads.

An optimizer enters; the function that steps it leaves, or None where that is not known. What takes
the decision inside its own pass reads `grad_scale` and `found_inf` off itself, and whoever sets
them must know that they arrive. A wrapper (Lightning's, Fabric's, a user's) forwards reads of
`_step_supports_amp_scaling` to the optimizer inside it, keeps for itself what is set on it, and may
even be an instance of that optimizer's class: it would step with the scale still in.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

__all__ = [
    "has_torchs_step",
    "inner_optimizers",
    "is_ours",
    "own_step",
    "reads_decision",
    "register_ours",
    "says_so_itself",
    "why_not_itself",
]

_HANDED_OVER = {"grad_scale", "found_inf"}
_FLAG = "_step_supports_amp_scaling"
_SET: Any = object.__setattr__
_GET: Any = object.__getattribute__


def own_step(optimizer: Any) -> FunctionType | None:
    """The function that `optimizer.step()` runs with `optimizer` as its `self`.

    Decorators of torch's own (profiler and step hooks, `no_grad`, an LR scheduler's note that a
    step was taken) are looked through: they call what they wrap, on the same object.

    Returns:
        None if it is not known: attributes of the object are forwarded or kept elsewhere, it has no
        `step` of its own, or another function has been put in its place.
    """
    kind: Any = type(optimizer)
    if kind.__setattr__ is not _SET or kind.__getattribute__ is not _GET:
        return None
    try:  # Without `__getattr__`, which would bring that of the optimizer inside.
        kept = _GET(optimizer, "__dict__")
    except AttributeError:
        return None
    step = kept.get("step")
    if step is None:
        step = getattr(kind, "step", None)
    elif isinstance(step, MethodType):  # As accelerate leaves it after a step.
        step = step.__func__ if step.__self__ is optimizer else None
    elif not _is_a_schedulers(step, optimizer):
        return None
    return _undecorated(step)


def reads_decision(optimizer: Any) -> bool:
    """Whether what is set on `optimizer` as `grad_scale` and `found_inf` is read by its step.

    True if its own step is one of `gradilocks.optim`, or names both in its code or in that of a
    method of the same class which it names, as torch's fused optimizers do and those of others that
    keep torch's contract. Nothing else is a proof: not the flag, which wrappers forward or copy;
    not the class, which they imitate; not a subclass whose step calls that of its base, and may
    look at gradients before it or write weights after it.
    """
    step = own_step(optimizer)
    if step is None:
        return False
    known = _reads.get(step)
    if known is None:
        names = set(_names_in(step.__code__))
        for helper in names & set(home := _home_of(step, type(optimizer))):
            method = _undecorated(home[helper])
            if method is not None:
                names.update(_names_in(method.__code__))
        known = _reads[step] = step in _ours or names >= _HANDED_OVER
    return known


def is_ours(optimizer: Any) -> bool:
    """Whether it is stepped by `gradilocks.optim`, and not by a wrapper or a subclass of it."""
    return own_step(optimizer) in _ours


def register_ours(step: Any) -> None:
    """For `gradilocks.optim`, whose step reads the decision where its code does not show it."""
    function = _undecorated(step)
    assert function is not None
    _ours.add(function)


def has_torchs_step(optimizer: Any) -> bool:
    """Whether torch's own code steps it, and not that of a subclass."""
    step = own_step(optimizer)
    return step is not None and _is_torchs(step)


def says_so_itself(optimizer: Any) -> bool:
    """Whether who steps has `_step_supports_amp_scaling` itself, and does not forward it."""
    owner = getattr(optimizer.step, "__self__", optimizer)
    flag = inspect.getattr_static(owner, _FLAG, False)
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


def why_not_itself(optimizer: Any) -> str:
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
    if getattr(optimizer, _FLAG, False) and not reads_decision(optimizer):
        return (
            f" The step of this {name} is not the one that its fused class brings and is not known "
            "to unscale: use the class's own step."
        )
    return ""


# By function, and only as long as it lives.
_reads: weakref.WeakKeyDictionary[FunctionType, bool] = weakref.WeakKeyDictionary()
_ours: weakref.WeakSet[FunctionType] = weakref.WeakSet()


def _undecorated(step: object) -> FunctionType | None:
    """The function inside torch's decorators; `functools.wraps` of others proves nothing."""
    while isinstance(step, FunctionType) and _is_torchs(step):
        inner = step.__dict__.get("__wrapped__")
        if inner is None:
            break
        step = inner
    return step if isinstance(step, FunctionType) else None


def _is_torchs(function: FunctionType) -> bool:
    # Not `__module__` and not `__name__`, which `functools.wraps` copies.
    return str(function.__globals__.get("__name__", "")).startswith("torch.")


def _is_a_schedulers(step: object, optimizer: Any) -> bool:
    """Whether `step` is what an LR scheduler of torch has put on this very optimizer.

    A copy of the optimizer's attributes brings it to an object that it does not step.
    """
    if not isinstance(step, FunctionType):
        return False
    if step.__globals__.get("__name__") != "torch.optim.lr_scheduler":
        return False
    kept = [cell.cell_contents for cell in step.__closure__ or ()]
    return any(isinstance(each, weakref.ref) and each() is optimizer for each in kept)


def _home_of(step: FunctionType, kind: type) -> dict[str, Any]:
    """The attributes of the class that defines `step`.

    The last one in line: torch also puts its decorated copy on the classes below.
    """
    homes = [base for base in kind.__mro__ if _undecorated(vars(base).get("step")) is step]
    return dict(vars(homes[-1])) if homes else {}


def _names_in(code: CodeType) -> Iterator[str]:
    """Attributes and strings that the code names, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _held_by(holder: Any) -> Iterator[Any]:
    try:
        values = list(_GET(holder, "__dict__").values())
    except AttributeError:
        values = []
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
