"""Optimizers that people put around optimizers, one of each kind, in their own style.

Each forwards or imitates what it wraps, so that it seems to take `grad_scale` and `found_inf`, and
calls the step of what is inside it. `WRAPPERS` has them by what they do; `MAKERS` has what is
inside.
"""

from __future__ import annotations

import functools
import types

import torch

from gradilocks import optim

MAKERS = {
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD momentum fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adagrad fused": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "Adam foreach": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "our AdamW": lambda params: optim.AdamW(params, lr=0.1),
    "our SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


class Forwards:
    """Everything but `step` is the inner optimizer's."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, closure=None):
        return self.inner.step(closure)


class LogsBoth(Forwards):
    """Looks at what a scaler sets, for a log, and hands nothing on."""

    def step(self, closure=None):
        self.__dict__.setdefault("log", []).append(
            (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        return self.inner.step(closure)


class ClearsBoth(Forwards):
    """Takes away what a scaler may have left on the inner optimizer."""

    def step(self, closure=None):
        self.inner.__dict__.pop("grad_scale", None)
        self.inner.__dict__.pop("found_inf", None)
        return self.inner.step(closure)


class ForwardsStepToo:
    """Nothing is its own."""

    def __init__(self, inner):
        self._wrapped = inner

    def __getattr__(self, name):
        return getattr(self._wrapped, name)


class ForwardsWrites:
    """What is set on it goes to the inner optimizer's wrapper of settings, as a proxy may do."""

    def __init__(self, inner):
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "settings", {})

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __setattr__(self, name, value):
        self.settings[name] = value

    def __delattr__(self, name):
        self.settings.pop(name, None)

    def step(self, closure=None):
        return self.inner.step(closure)


class ForwardsByGetattribute:
    """Looks everything up in the inner optimizer first."""

    def __init__(self, inner):
        object.__setattr__(self, "inner", inner)

    def __getattribute__(self, name):
        if name in ("inner", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "inner"), name)


class HasSlots:
    __slots__ = ("__weakref__", "found_inf", "grad_scale", "inner")

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name in ("grad_scale", "found_inf"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure=None):
        return self.inner.step(closure)


class OnlySlots:
    """Cannot be referred to weakly either."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, closure=None):
        return self.inner.step(closure)


class Imitates:
    """As Lightning's and Fabric's: an instance of the inner optimizer's class as well."""

    def __init__(self, inner):
        self._optimizer = inner
        name, bases = "Imitated" + type(inner).__name__, (type(self), type(inner))
        self.__class__ = type(name, bases, {})

    def __getattr__(self, name):
        return getattr(self._optimizer, name)

    def step(self, closure=None):
        return self._optimizer.step(closure)


class CopiesAttributes:
    """As Lightning's once did: has the inner optimizer's attributes, flag included, as its own."""

    def __init__(self, inner):
        self.__dict__ = {k: v for k, v in inner.__dict__.items() if k != "step"}
        self.optimizer = inner
        name, bases = "Copied" + type(inner).__name__, (type(self), type(inner))
        self.__class__ = type(name, bases, {})

    def step(self, closure=None):
        return self.optimizer.step(closure)


def derived(inner):
    """A class made on the spot below the optimizer's own, with its attributes."""

    class Derived(type(inner)):
        def __init__(self):
            self.__dict__.update(inner.__dict__)

        def step(self, closure=None):
            return inner.step(closure)

    return Derived()


def derived_in_disguise(inner):
    """The same, and its step bears every mark of the one inside."""

    class Derived(type(inner)):
        def __init__(self):
            self.__dict__.update(inner.__dict__)

        @functools.wraps(type(inner).step)
        def step(self, closure=None):
            return inner.step(closure)

    return Derived()


class HasProperties(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that holds one, property by property."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    @property
    def _step_supports_amp_scaling(self):
        return getattr(self.optimizer, "_step_supports_amp_scaling", False)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class SharesGroups(torch.optim.Optimizer):
    """As Lookahead and ZeroRedundancyOptimizer: groups shared, state of its own, says it can."""

    def __init__(self, base_optimizer):
        self.optim = base_optimizer
        super().__init__(base_optimizer.param_groups, base_optimizer.defaults)
        self.param_groups = base_optimizer.param_groups
        flag = getattr(base_optimizer, "_step_supports_amp_scaling", False)
        self._step_supports_amp_scaling = flag

    def step(self, closure=None):
        return self.optim.step(closure)


class TakesScalerForNothing(Forwards):
    """Has the older contract's parameter for the sake of its signature."""

    def step(self, closure=None, grad_scaler=None):
        return self.inner.step(closure)


def with_the_inner_step(inner):
    """An object whose own attribute is the inner optimizer's bound method."""
    wrapper = Forwards(inner)
    wrapper.step = inner.step
    return wrapper


def with_a_replaced_step(inner):
    """The optimizer itself; what steps it is somebody's function."""
    real = inner.step
    inner.step = lambda *args, **kwargs: real(*args, **kwargs)
    return inner


def with_anothers_step(inner):
    """An optimizer of the same class and parameters, bound to the step of the one inside."""
    other = type(inner)(inner.param_groups[0]["params"], lr=1e3)
    other._step_supports_amp_scaling = getattr(inner, "_step_supports_amp_scaling", False)
    other.param_groups = inner.param_groups
    other.inner = inner
    other.step = inner.step
    return other


def with_a_schedule_inside(inner):
    """Copied attributes bring an LR scheduler's step, which steps the one inside."""
    torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1.0)
    other = type(inner)(inner.param_groups[0]["params"], lr=1e3)
    other.__dict__.update(inner.__dict__)
    other.inner = inner
    return other


def with_a_bound_function(inner):
    """A function bound to the optimizer, as libraries that replace a step bind theirs."""
    real = inner.step
    inner.step = types.MethodType(lambda self, closure=None: real(closure), inner)
    return inner


def with_a_step_below(inner):
    """The optimizer itself, its class replaced by one below it."""
    before = type(inner)

    def step(self, closure=None):
        return before.step(self, closure)

    inner.__class__ = type("Below" + before.__name__, (before,), {"step": step})
    return inner


class Several:
    """Two wrappers deep, in a list."""

    def __init__(self, inner):
        self.all = [Forwards(Imitates(inner))]

    def __getattr__(self, name):
        return getattr(self.all[0], name)

    def step(self, closure=None):
        for each in self.all:
            each.step(closure)


WRAPPERS = {
    "forwards": Forwards,
    "logs both names": LogsBoth,
    "clears both names": ClearsBoth,
    "forwards step too": ForwardsStepToo,
    "forwards writes": ForwardsWrites,
    "forwards by getattribute": ForwardsByGetattribute,
    "has slots": HasSlots,
    "only slots": OnlySlots,
    "imitates": Imitates,
    "copies attributes": CopiesAttributes,
    "derived": derived,
    "derived in disguise": derived_in_disguise,
    "has properties": HasProperties,
    "shares groups": SharesGroups,
    "takes a scaler for nothing": TakesScalerForNothing,
    "with the inner step": with_the_inner_step,
    "with a replaced step": with_a_replaced_step,
    "with another's step": with_anothers_step,
    "with a schedule inside": with_a_schedule_inside,
    "with a bound function": with_a_bound_function,
    "with a step below": with_a_step_below,
    "several": Several,
}


class TrueGradients(Forwards):
    """As LARS: scales each gradient by its norm before the inner step, so it must be true."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(1.0 + param.grad.norm())
        return self.inner.step(closure)


class SlowWeights(Forwards):
    """As Lookahead: writes the weights after the inner step, so it must not be called to skip."""

    def __init__(self, inner):
        super().__init__(inner)
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def step(self, closure=None):
        returned = self.inner.step(closure)
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for param, slow in zip(params, self.slow, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)
        return returned


def state_of(optimizer):
    """What the optimizer inside remembers, by position."""
    state = optimizer.state
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        place: {name: torch.as_tensor(value).clone() for name, value in state[param].items()}
        for place, param in enumerate(params)
        if state.get(param)
    }
