"""Tensors that are not finite enter; what they tell of where NaN or Inf arose leaves, as a Trace.

A module is named only if what it began with was finite: a model whose parameters are NaN or Inf
already has its first NaN wherever the first of them is used, which says nothing of where they came
from. What came into it from outside, or arose after it, is no fault of its own either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradilocks._torch import NORMS_WITH_STATISTICS
from gradilocks.names import (
    is_wrapper,
    name_parameters,
    named_modules,
    named_parameters,
    prefixed,
    unwrapped,
)
from gradilocks.runfile import Trace
from gradilocks.step.table import measurable

__all__ = [
    "Finding",
    "Magnitude",
    "damaged_among",
    "damaged_gradients",
    "if_grown",
    "in_loss",
    "lost",
    "magnitude",
    "nan_buffers",
    "unwatched_among",
]

_MOST_INPUTS = 8
_MOST_DAMAGED = 32
_MOST_NAMES = 4
# No weight of a model that learns is so large, and no number that is computed from such weights
# overflows float32 or bfloat16 unless it comes near this itself: the square of the second is 1e18.
_GROWN, _NEAR_OVERFLOW = 1e6, 1e9
_TRACE = partial(Trace, step=0, time=0.0)  # Which the Tracer fills in.


class Magnitude(NamedTuple):
    """What a tensor holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    largest: float | None
    """The largest magnitude, None if an element is not finite."""
    nan: int
    inf: int

    @property
    def finite(self) -> bool:
        """Whether no element is NaN or Inf."""
        return not (self.nan or self.inf)

    @property
    def what(self) -> str:
        """'NaN', 'Inf' or 'NaN and Inf'."""
        return " and ".join(word for word, n in (("NaN", self.nan), ("Inf", self.inf)) if n)


@torch.no_grad()
def magnitude(tensor: Tensor, name: str) -> Magnitude | None:
    """Reads a tensor, and waits for its device; None if it holds no floating-point numbers."""
    inner = None if is_lazy(tensor) else measurable(tensor, any_subclass=True)
    if inner is None:
        return None
    nan = inf = 0
    largest = 0.0
    if inner.numel():
        size = inner.abs()
        largest = float(size.amax())  # NaN if one is.
        if not math.isfinite(largest):
            nan, inf = int(torch.isnan(size).sum()), int(torch.isinf(size).sum())
    kind = str(tensor.dtype).removeprefix("torch.")
    held = None if nan or inf else largest
    return Magnitude(name, tuple(tensor.shape), kind, held, nan, inf)


@dataclass(frozen=True)
class Finding:
    """The first value that was not finite, and where it came from."""

    where: str
    """'input', 'before', 'outside', 'forward', 'between', 'backward', 'inside', 'parameter' or
    'loss'."""
    name: str
    module: nn.Module
    seen: Magnitude
    inputs: Sequence[Magnitude] = ()
    near: str = ""
    """The neighbour: a module or an argument, by where it was found."""
    buffers: Sequence[Magnitude] = ()
    """The module's own that held NaN before it ran."""
    loss_is_bad: bool | None = None
    """Whether what was run backward was itself NaN or Inf; None if that is not known."""
    doubt: str = ""
    """Why it may have been something else, in half a sentence; "" if what was seen leaves none."""

    @property
    def is_of_backward(self) -> bool:
        """Whether it came up in the backward pass, and not before."""
        return self.where in ("backward", "inside", "parameter", "loss")

    def trace(self) -> Trace:
        """As a record of the run file, without step and time."""
        origin = _ORIGINS.get(self.where, "module")
        if origin == "module":
            # Its parameters go into it as well.
            weights = _magnitudes(self.module.named_parameters(recurse=False))
            damaged = [each for each in weights if not each.finite]
            if damaged or self.buffers:
                return self._too_late(damaged)
            entered = [*weights, *self.inputs]
        else:
            entered = [*self.inputs] if self.where == "loss" else [self.seen]
        in_backward = self.where in ("backward", "inside", "parameter")
        in_backward = in_backward or (self.where == "loss" and not self.loss_is_bad)
        return _TRACE(
            phase="backward" if in_backward else "forward",
            module=self.name,
            kind=type(self.module).__name__,
            what=self.seen.what,
            inputs=_entries(entered),
            text=self._sentence(entered),
            where=origin,
        )

    def _too_late(self, damaged: Sequence[Magnitude]) -> Trace:
        prefix = f"{self.name}." if self.name else ""
        held = [each._replace(name=prefix + each.name) for each in damaged or self.buffers]
        kind = type(self.module).__name__
        if damaged:
            return _damaged_trace(held, kind, "not trained")
        return _damaged_trace(held, kind, "before it ran", buffers_of=self._who())

    def _who(self) -> str:
        kind = type(self.module).__name__
        return f"{self.name} ({kind})" if self.name else f"the model ({kind})"

    def _sentence(self, entered: Sequence[Magnitude]) -> str:
        what, who, near, seen = self.seen.what, self._who(), self.near, _shown(self.seen)
        told = {
            "input": (
                f"{what} in the input: {seen} came into {who}, before any module of the model had "
                "run: in the data, or in what the script made of it"
            ),
            "before": (
                f"{what} first in forward, between modules, before {who}: {seen} came into it, "
                "from what the script computes itself there, or from a module that is no part of "
                "the model or that ran only inside of others before"
            ),
            "outside": (
                f"{what} came into {who} from outside: {seen}. Whether it was in the data, came "
                "from another model or arose between modules is not known"
            ),
            "forward": f"{what} first in the output of {who}",
            "between": f"{what} first in forward, in what {who} computes itself, before {near}",
            "backward": f"{what} first in backward, in {who}: in the gradient of its {near}",
            "inside": (
                f"{what} first in backward, in what {who} computes itself with the output of {near}"
            ),
            "parameter": f"{what} first in backward, in {who}: in the gradient of its {near}",
            "loss": f"{what} in the loss, or in what follows {who}, {self._when_lost()}",
        }[self.where]
        if not entered or self.where in _ORIGINS:
            return told
        return f"{told}; into it went " + ", ".join(map(_shown, entered[:_MOST_INPUTS]))

    def _when_lost(self) -> str:
        if self.loss_is_bad:
            return "in forward: what was run backward was not finite"
        if self.loss_is_bad is None:
            return f"in forward or backward: first seen in the gradient of its {self.near}"
        return f"first in backward: in the gradient of its {self.near}"


# What a Trace calls what a Finding has found; all others arose in the module.
_ORIGINS = {"input": "input", "before": "before", "outside": "outside", "loss": "after"}


def damaged_among(models: Sequence[nn.Module], when: str) -> Trace | None:
    """The parameters that models train and that hold NaN or Inf; None if all are finite.

    Whatever is traced after that tells nothing. Parameters that it does not train are looked at
    only in the module that a trace names: a mask of -Inf may be one. Waits for the device. `when`
    says in words when this is looked at.
    """
    damaged: list[Magnitude] = []
    kind = ""
    for prefix, model in prefixed(models).items():
        named = named_parameters(unwrapped(model), prefix)
        trained = ((name, param) for name, param in named if param.requires_grad)
        found = [each for each in _magnitudes(trained) if not each.finite]
        damaged, kind = damaged + found, kind or (type(unwrapped(model)).__name__ if found else "")
    return _damaged_trace(damaged, kind, when) if damaged else None


def if_grown(found: Trace, models: Sequence[nn.Module]) -> Trace:
    """What was found, or that the weights had grown so large that something had to overflow.

    Where it does then first says nothing of the cause. Waits for the device.
    """
    sizes = [float(str(each["largest"])) for each in found.inputs if each["largest"] is not None]
    if found.where not in ("module", "after", "before") or max(sizes, default=0) < _NEAR_OVERFLOW:
        return found
    weights = [
        each
        for prefix, model in prefixed(models).items()
        for each in _magnitudes(named_parameters(unwrapped(model), prefix))
    ]
    largest = max(weights, key=lambda each: each.largest or 0.0)
    if (largest.largest or 0.0) < _GROWN:
        return found
    text = (
        f"{found.text}. That is an overflow, and not where it began: the weights had grown too "
        f"large before this step, {largest.name} to {largest.largest:.4g}. Lower the learning rate "
        "first, and look at what it was in the steps before"
    )
    return replace(found, where="grown", text=text)


def unwatched_among(models: Sequence[nn.Module], watched: Iterable[nn.Module]) -> str:
    """Why what arose between calls may have arisen in a module after all, in half a sentence.

    A module whose calls are kept only as parts of others' may have been called by itself, and
    nobody has seen it. Torch's own are left out: of finite values and weights they make finite
    ones, short of an overflow. "" if there are none.

    Args:
        models: outermost modules, by which modules are named.
        watched: those whose calls are kept.
    """
    seen = {id(module) for module in watched}
    names = [
        f"{name} ({type(module).__name__})"
        for prefix, model in prefixed(models).items()
        for name, module in named_modules(model, prefix)
        if id(module) not in seen
        and not is_wrapper(module)
        and not type(module).__module__.startswith("torch.")
    ]
    told = "what runs inside of other modules is watched only there, and the script may have called"
    return f"{told} {_listed(names)} by itself" if names else ""


def _damaged_trace(
    damaged: Sequence[Magnitude], kind: str, when: str, *, buffers_of: str = ""
) -> Trace:
    """The model held NaN or Inf itself, so that what was traced tells nothing.

    Args:
        damaged: parameters or buffers, by their full names.
        kind: the class of the module, or of the model, that holds them.
        when: what is known of when they did.
        buffers_of: if they are buffers: the module that holds them, in words.
    """
    names, what = [each.name for each in damaged], _what_of(damaged)
    holders = {name.rpartition(".")[0] for name in names}
    if buffers_of:
        word = "buffer" if len(names) == 1 else "buffers"
        text = (
            f"{what} in the {word} {_listed(names)} of {buffers_of} {when}: the forward of a "
            "skipped step, or of this one, may have written it"
        )
    else:  # Of many, a name would pass for the place where it began.
        whose = f"{names[0]} itself" if len(names) == 1 else f"{len(names):,} parameters themselves"
        text = f"{what} in {whose}, {when}: where that came from a trace cannot see any more"
    return _TRACE(
        phase="forward",
        module=holders.pop() if len(holders) == 1 else "",
        kind=kind,
        what=what,
        inputs=_entries(damaged),
        text=text,
        damaged=tuple(names[:_MOST_DAMAGED]),
        where="buffers" if buffers_of else "parameters",
    )


def damaged_gradients(models: Sequence[nn.Module]) -> Trace | None:
    """The gradients of the models' parameters that hold NaN or Inf; None if all are finite.

    For a step in which no module was seen to make any. Waits for the device.
    """
    params = name_parameters(models).items()
    named = ((name, param.grad) for param, name in params if param.grad is not None)
    damaged = [each for each in _magnitudes(named) if not each.finite]
    if not damaged:
        return None
    what, many = _what_of(damaged), len(damaged)
    whose = damaged[0].name if many == 1 else f"{many:,} parameters"
    return _TRACE(
        phase="backward",
        module="",
        kind=type(unwrapped(models[0])).__name__,
        what=what,
        inputs=_entries(damaged),
        text=f"{what} in the gradient{'s' * (many > 1)} of {whose}",
        where="gradients",
    )


def in_loss(models: Sequence[nn.Module]) -> Trace:
    """The loss was not finite, and all that the models computed was, when they were run again."""
    return _TRACE(
        phase="forward",
        module="",
        kind=type(unwrapped(models[0])).__name__,
        what="NaN or Inf",
        inputs=(),
        text=(
            "NaN or Inf in the loss alone, likely: run once more, all that the model computed was "
            "finite, and so are the gradients"
        ),
        where="after",
        certainty="likely",
    )


def lost(why: str) -> Trace:
    """Where it arose is not known, for this reason."""
    return _TRACE(
        phase="forward",
        module="",
        kind="",
        what="NaN or Inf",
        inputs=(),
        text=f"where it arose is not known: {why}",
        where="unknown",
        certainty="unknown",
    )


def nan_buffers(module: nn.Module) -> list[Magnitude]:
    """The module's own buffers with NaN, which no forward pass begins with on purpose.

    Not the running statistics of a norm that is training: it writes them and does not read them.
    """
    if isinstance(module, NORMS_WITH_STATISTICS) and module.training:
        return []
    return [each for each in _magnitudes(module.named_buffers(recurse=False)) if each.nan]


def _magnitudes(named: Iterable[tuple[str, Tensor]]) -> list[Magnitude]:
    found = (magnitude(tensor, name) for name, tensor in named)
    return [each for each in found if each is not None]


def _what_of(seen: Sequence[Magnitude]) -> str:
    nan, inf = (sum(getattr(each, kind) for each in seen) for kind in ("nan", "inf"))
    return seen[0]._replace(nan=nan, inf=inf).what


def _listed(names: Sequence[str]) -> str:
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES:,} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _shown(seen: Magnitude) -> str:
    shape = "x".join(map(str, seen.shape)) or "scalar"
    if seen.finite:
        return f"{seen.name} ({seen.dtype} {shape}, largest {seen.largest:.4g})"
    counts = [f"{n} {word}" for word, n in (("NaN", seen.nan), ("Inf", seen.inf)) if n]
    return f"{seen.name} ({seen.dtype} {shape}, {' and '.join(counts)})"


def _entries(seen: Sequence[Magnitude]) -> tuple[dict[str, object], ...]:
    return tuple({**each._asdict(), "shape": list(each.shape)} for each in seen[:_MOST_INPUTS])
