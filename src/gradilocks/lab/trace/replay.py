"""Calls of a bad step enter; they are run once more, under hooks; where NaN or Inf arose leaves.

A loss lies outside of the model, so each call is run by itself: forward with what it was given and
the random numbers that it drew, backward with the gradients that its outputs received. Of all that
is found, what came first in the step counts. Needs parameters that are still those of the step.
Nothing is left behind: gradients, buffers and generators are put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradilocks.eager import UNCOMPILED
from gradilocks.lab.tensors import tensors_in
from gradilocks.lab.trace.finding import Finding, damaged_among, if_grown
from gradilocks.lab.trace.kept_calls import KeptCall, KeptStep
from gradilocks.lab.trace.step_trace import StepTrace
from gradilocks.lab.unchanged import unchanged
from gradilocks.names import is_compiled
from gradilocks.runfile import Trace

__all__ = ["Replayed", "replay"]


class Replayed(NamedTuple):
    """What running a step once more has shown."""

    trace: Trace | None
    """None if nothing was NaN or Inf this time, or nothing could be run."""
    doubt: str
    """Why it was not just the same, in half a sentence; "" if it was."""


class _Seen(NamedTuple):
    when: int
    """The place in time of what was run once more."""
    finding: Finding


def replay(
    step: int,
    kept: KeptStep,
    models: Sequence[nn.Module],
    *,
    loss_is_bad: bool | None,
    doubt: str = "",
) -> Replayed:
    """Runs the calls that were kept once more, and says where NaN or Inf arose.

    Args:
        step: its number.
        kept: the calls of it.
        models: outermost modules, by which modules are named.
        loss_is_bad: whether the loss of the step was NaN or Inf, if that is known.
        doubt: a reason for which the parameters are not those of the step; "" if there is none.
    """
    damaged = damaged_among(models, f"before step {step:,}")
    if damaged is not None:
        return Replayed(damaged, doubt)
    if not kept.calls:
        return Replayed(None, kept.missing or "no call of the model was seen in it")
    doubts = [doubt, kept.missing]
    if any(map(is_compiled, models)):
        doubts.append("the model is compiled, and was run as it is written")
    seen: list[_Seen] = []
    with unchanged(models, doing="traced"), UNCOMPILED, torch.enable_grad():
        for call in kept.calls:
            doubts.append(call.incomplete)
            if call.args is not None and call.module() is not None:
                if call.inputs_changed:
                    doubts.append("what the model was given has been changed in place since")
                unknown = call.generators.unknown()
                seen += _run(call, models, loss_is_bad)
                if any(unknown.moved()):
                    doubts.append(
                        "the model draws from Python's or NumPy's random numbers, and where those "
                        "stood is not known"
                    )
    first = min(seen, key=lambda each: each.when, default=None)
    doubt = next(filter(None, doubts), "")
    if first is None:
        return Replayed(None, doubt)
    finding = first.finding
    if kept.others and finding.where == "input":  # A frozen model may have made what came in.
        finding = replace(finding, where="outside")
    return Replayed(if_grown(finding.trace(), models), doubt)


def _run(call: KeptCall, models: Sequence[nn.Module], loss_is_bad: bool | None) -> list[_Seen]:
    """What one call shows."""
    module, args = call.module(), call.args
    assert module is not None
    assert args is not None
    found: list[_Seen] = []
    in_backward = False

    def note(finding: Finding) -> None:
        when = call.came_back if in_backward and finding.is_of_backward else call.began
        found.append(_Seen(when, finding))

    call.generators.restore()
    origins: dict[int, Tensor] = {}
    args, kwargs = _again(args, origins), _again(dict(call.kwargs), origins)
    trace = StepTrace(models, note, root=module, replays=origins, loss_is_bad=loss_is_bad)
    try:
        with call.precision.again():
            output = module(*args, **kwargs)
        in_backward = True
        pairs = [
            (tensor, call.received[place])
            for place, tensor in tensors_in(output, "output")
            if place in call.received and tensor.requires_grad
        ]
        if pairs:
            trace.watch_parameters()
            _backward(pairs, module, (args, kwargs))
        trace.settle()
    finally:
        trace.remove()
    return found


def _backward(pairs: Sequence[tuple[Tensor, Tensor]], module: nn.Module, given: Any) -> None:
    """Runs outputs backward, and adds nothing to anybody's gradients."""
    leaves = [tensor for _, tensor in tensors_in(given, "") if tensor.requires_grad]
    inputs = [*leaves, *(param for param in module.parameters() if param.requires_grad)]
    grad = inspect.unwrap(torch.autograd.grad)  # What others have put around it is for training.
    outputs = [tensor for tensor, _ in pairs]
    fitting = [g.to(t.dtype) if g.dtype is not t.dtype else g for t, g in pairs]
    if inputs:
        grad(outputs, inputs, fitting, allow_unused=True)


def _again(thing: Any, origins: dict[int, Tensor]) -> Any:
    """What was given, cut off from what it was computed from: backward ends here.

    `origins` gets, by the id of what stands for a tensor, that tensor.
    """
    if isinstance(thing, Tensor):
        if thing.is_leaf and not thing.requires_grad:
            return thing
        fresh = thing.detach().requires_grad_(thing.requires_grad)
        origins[id(fresh)] = thing
        return fresh
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_again(each, origins) for each in thing))
    if isinstance(thing, (list, tuple)):
        return type(thing)(_again(each, origins) for each in thing)
    if type(thing) is dict:
        return {name: _again(value, origins) for name, value in thing.items()}
    return thing
