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

from gradilocks._torch import function_modes, seen_by_function_modes
from gradilocks.eager import UNCOMPILED
from gradilocks.lab.tensors import tensors_in
from gradilocks.lab.trace.finding import Finding, damaged_among, if_grown
from gradilocks.lab.trace.kept_calls import KeptCall, KeptStep
from gradilocks.lab.trace.no_collectives import MeetsOthers, NoCollectives
from gradilocks.lab.trace.step_trace import StepTrace
from gradilocks.lab.unchanged import unchanged
from gradilocks.names import is_compiled
from gradilocks.runfile import Trace, describe_error

__all__ = ["NOT_AGAIN", "Replayed", "replay"]

NOT_AGAIN = "its loss was NaN or Inf, and run once more all of it was finite"
_NO_CALL = "no call of the model was seen in it, which compiled code that makes the call would hide"
_ALIKE = 1e-3
"""Of gradients that were added up in another order or format: the part in which they differ."""
_MEETS = "the model meets other ranks as it runs, and they would have to run it together"


class Replayed(NamedTuple):
    """What running a step once more has shown."""

    trace: Trace | None
    """None if nothing was NaN or Inf this time, or nothing could be run."""
    doubt: str
    """Why it was not just the same, in half a sentence; "" if it was."""
    same_gradients: bool = False
    """Whether the gradients that came of it are those that there are, but for what is not finite
    there and a common factor: then nothing is missing of what went into them."""
    error: Exception | None = None
    """What a call has raised; the others were run all the same."""


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
        return Replayed(None, kept.missing or _NO_CALL)
    doubts = [doubt, kept.missing]
    if any(is_compiled(part) for model in models for part in model.modules()):
        doubts.append("the model is compiled, and was run as it is written")
    seen: list[_Seen] = []
    raised: Exception | None = None
    gradients, alone = _Gradients(models), NoCollectives()
    with (
        unchanged(models, doing="traced"),
        UNCOMPILED,
        torch.enable_grad(),
        seen_by_function_modes(),
        alone,
    ):
        for call in kept.calls:
            doubts.append(call.incomplete)
            module = call.module()
            if call.args is not None and module is not None:
                if call.inputs_changed:
                    doubts.append("what the model was given has been changed in place since")
                if call.training != module.training:
                    doubts.append("the model was switched between training and evaluation since")
                if call.modes != function_modes():
                    doubts.append("the model was called under a mode that is not there any more")
                unknown = call.generators.unknown()
                try:
                    seen += _run(call, models, loss_is_bad, gradients)
                except Exception as error:  # Short of memory, or a forward that cannot run twice.
                    raised = raised or error
                    doubts.append(f"running it once more failed ({describe_error(error)})")
                if any(unknown.moved()):
                    doubts.append(
                        "the model draws from Python's or NumPy's random numbers, and where those "
                        "stood is not known"
                    )
    if alone.met:  # What came before that was run as it was; of Inf, a mask may have been next.
        doubts, seen = [_MEETS], [each for each in seen if each.finding.seen.nan]
    if loss_is_bad and gradients.are_bad and not seen:  # Then they came from that loss.
        doubts.append(NOT_AGAIN)
    first = min(seen, key=lambda each: each.when, default=None)
    doubt = next(filter(None, doubts), "")
    if first is None:
        return Replayed(None, doubt, gradients.are_same(), raised)
    finding = first.finding
    if kept.others and finding.where == "input":  # A frozen model may have made what came in.
        finding = replace(finding, where="outside")
    return Replayed(if_grown(finding.trace(), models), doubt, error=raised)


class _Gradients:
    """Those of a step that hold NaN or Inf, and what comes of running it once more."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._held = {
            id(param): param.grad
            for model in models
            for param in model.parameters()
            if type(param.grad) is Tensor
            and param.grad.layout is torch.strided
            and not bool(param.grad.isfinite().all())
        }
        self._sums: dict[int, Tensor] = {}

    @property
    def are_bad(self) -> bool:
        """Whether there are any."""
        return bool(self._held)

    def add(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """One call was run backward."""
        for param, gradient in zip(params, gradients, strict=True):
            if id(param) in self._held and gradient is not None:
                before = self._sums.get(id(param))
                self._sums[id(param)] = gradient if before is None else before + gradient

    def are_same(self) -> bool:
        """Whether they are the same where they are finite, but for a factor that all have, as of a
        scale or a clip."""
        if not self._held or self._sums.keys() != self._held.keys():
            return False
        pairs = []
        for key, held in self._held.items():
            finite = held.isfinite()
            pairs.append((held[finite].double(), self._sums[key][finite].double()))
        there, again = (torch.cat([each[i] for each in pairs]) for i in (0, 1))
        size = float(again.dot(again))
        if not size > 0.0:
            return False
        factor = float(again.dot(there)) / size
        return factor > 0.0 and bool((there - factor * again).norm() <= _ALIKE * there.norm())


def _run(
    call: KeptCall, models: Sequence[nn.Module], loss_is_bad: bool | None, gradients: _Gradients
) -> list[_Seen]:
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
            _backward(pairs, module, (args, kwargs), gradients)
        trace.settle()
    except MeetsOthers:
        trace.settle()
    finally:
        trace.remove()
    return found


def _backward(
    pairs: Sequence[tuple[Tensor, Tensor]], module: nn.Module, given: Any, gradients: _Gradients
) -> None:
    """Runs outputs backward, and adds nothing to anybody's gradients."""
    leaves = [tensor for _, tensor in tensors_in(given, "") if tensor.requires_grad]
    inputs = [*leaves, *(param for param in module.parameters() if param.requires_grad)]
    grad = inspect.unwrap(torch.autograd.grad)  # What others have put around it is for training.
    outputs = [tensor for tensor, _ in pairs]
    fitting = [g.to(t.dtype) if g.dtype is not t.dtype else g for t, g in pairs]
    if inputs:
        gradients.add(inputs, grad(outputs, inputs, fitting, allow_unused=True))


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
