"""Calls of a bad step enter; they are run once more, under hooks; where NaN or Inf arose leaves.

A loss lies outside of the model, so each call is run by itself: forward with what it was given and
the random numbers that it drew, backward with the gradients that its outputs received. Of all that
is found, what came first in the step counts. Needs parameters that are still those of the step.
Nothing is left behind: gradients, buffers and generators are put back.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradilocks._torch import function_modes, is_functorch_tensor, seen_by_function_modes
from gradilocks.eager import UNCOMPILED
from gradilocks.lab.tensors import tensors_in
from gradilocks.lab.trace.finding import Finding, Magnitude, damaged_among, if_grown, magnitude
from gradilocks.lab.trace.kept_calls import KeptCall, KeptInput, KeptStep
from gradilocks.lab.trace.no_collectives import MeetsOthers, NoCollectives
from gradilocks.lab.trace.step_trace import StepTrace
from gradilocks.lab.unchanged import unchanged, version_of
from gradilocks.names import is_compiled
from gradilocks.runfile import Trace, describe_error

__all__ = ["NOT_AGAIN", "Replayed", "replay"]

NOT_AGAIN = "its loss was NaN or Inf, and run once more all of it was finite"
_NO_CALL = "no call of the model was seen in it, which compiled code that makes the call would hide"
_FINITE = Magnitude("", (), "", 0.0, 0, 0)
_ALIKE, _ALIKE_IN_HALF = 1e-4, 1e-2
"""Of what was computed twice, by kernels that add up in any order: the part in which it differs."""
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
    if _holds_bad_tensors(models):
        doubts.append("tensors that the model keeps in attributes are NaN or Inf by now")
    seen: list[_Seen] = []
    runs: list[_Run] = []
    raised: Exception | None = None
    gradients, alone = _Gradients(models), NoCollectives()
    with unchanged(models), UNCOMPILED, torch.enable_grad(), seen_by_function_modes(), alone:
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
                run = _Run(call, models, loss_is_bad, gradients)
                try:
                    run()
                except Exception as error:  # Short of memory, or a forward that cannot run twice.
                    raised = raised or error
                    doubts.append(f"running it once more failed ({describe_error(error)})")
                if call.came_back or _goes_on_in(call, kept.calls):
                    runs.append(run)
                if any(unknown.moved()):
                    doubts.append(
                        "the model draws from Python's or NumPy's random numbers, and where those "
                        "stood is not known"
                    )
    # A call that gave other numbers counts only if no other tells, or if its own were not finite.
    same = [run for run in runs if not run.doubt]
    for run in same if any(run.found for run in same) else runs:
        seen += run.found
    first = min((each.when for each in seen), default=math.inf)
    doubts += [
        run.doubt
        for run in runs
        if run.doubt
        and ((run.was_bad and run.began <= first) or not any(each.found for each in same))
    ]
    if alone.met:  # What came before that was run as it was; of Inf, a mask may have been next.
        doubts, seen = [_MEETS], [each for each in seen if each.finding.seen.nan]
    if loss_is_bad and gradients.are_bad and not seen:  # Then they came from that loss.
        doubts.append(NOT_AGAIN)
    doubt = next(filter(None, doubts), "")
    if not seen:
        return Replayed(None, doubt, gradients.are_same(), raised)
    finding = min(seen, key=lambda each: each.when).finding
    if kept.others and finding.where == "input":  # Another model may have made what came in.
        finding = replace(finding, where="outside")
    doubt = doubt or finding.doubt
    return Replayed(if_grown(finding.trace(), models), doubt, error=raised)


def _holds_bad_tensors(models: Sequence[nn.Module]) -> bool:
    """Whether modules keep what is not finite, and may not have been so when they were called.

    A hidden state, say. Buffers are looked at by themselves, before their module runs.
    """
    attributes = (
        each for model in models for part in model.modules() for each in vars(part).values()
    )
    held = (each for each in attributes if isinstance(each, Tensor))
    bad = (each for each in held if not (magnitude(each, "") or _FINITE).finite)
    return any(bool((each.isnan() | (each == math.inf)).any()) for each in bad)  # No mask.


def _goes_on_in(call: KeptCall, calls: Sequence[KeptCall]) -> bool:
    """Whether what a call returned, and what was not run backward, was given to one that was."""
    made = {_address(each.values) for each in call.returned.values()} - {0}
    given = (each for other in calls if other.came_back for each in other.inputs)
    return any(_address(each.values) in made for each in given)


def _address(tensor: Tensor) -> int:
    """Of the memory of its elements; 0 if it has none by itself."""
    plain = tensor.layout is torch.strided and not is_functorch_tensor(tensor)
    return tensor.untyped_storage().data_ptr() if plain else 0


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
        """Whether they are the same to the bit where they are finite, but for a factor that all
        have and that is a power of two, as a scale is: then nothing else went into them."""
        if not self._held or self._sums.keys() != self._held.keys():
            return False
        pairs = []
        for key, held in self._held.items():
            finite = held.isfinite()
            pairs.append((held[finite].double(), self._sums[key][finite].double()))
        there, again = (torch.cat([each[i] for each in pairs]) for i in (0, 1))
        size, shared = float(again.abs().sum()), float(there.abs().sum())
        if not (0.0 < size < math.inf and 0.0 < shared < math.inf):
            return False
        return torch.equal(there, again * 2.0 ** round(math.log2(shared / size)))


class _Run:
    """One call, run once more.

    Attributes:
        found: what it shows.
        doubt: why it was not the same, in half a sentence; "" if it was, or nobody can say.
        was_bad: whether what it returned then was NaN or Inf.
        began: when that was.
    """

    def __init__(
        self,
        call: KeptCall,
        models: Sequence[nn.Module],
        loss_is_bad: bool | None,
        gradients: _Gradients,
    ) -> None:
        self._call, self._gradients = call, gradients
        self.found: list[_Seen] = []
        self.doubt = ""
        self.began = call.began
        self.was_bad = not all(
            (magnitude(each.values, "") or _FINITE).finite for each in call.returned.values()
        )
        self._in_backward = False
        self._leaves: list[Tensor] = []
        self._origins: dict[int, KeptInput] = {}
        self._args, self._kwargs = call.again(self._input)
        module = call.module()
        assert module is not None
        self._module = module
        self._trace = StepTrace(
            models,
            self._note,
            root=module,
            replays=self._origins,
            loss_is_bad=loss_is_bad,
            received=None if call.incomplete else call.received,
        )

    def _input(self, kept: KeptInput) -> Tensor:
        """A copy of what was given, cut off from what it was computed from: backward ends here."""
        if isinstance(kept.values, nn.Parameter):
            return kept.values
        fresh = kept.values.detach()
        if kept.requires_grad:
            leaf = (fresh if kept.has_graph else fresh.clone()).requires_grad_()
            self._leaves.append(leaf)
            fresh = leaf.clone() if kept.has_graph else leaf
        else:
            fresh = fresh.clone()
        self._origins[id(fresh)] = kept
        return fresh

    def _note(self, finding: Finding) -> None:
        late = self._in_backward and finding.is_of_backward
        self.found.append(_Seen(self._call.came_back if late else self._call.began, finding))

    def __call__(self) -> None:
        call, trace = self._call, self._trace
        call.generators.restore()
        try:
            with call.precision.again():
                output = self._module(*self._args, **self._kwargs)
            self._in_backward = True
            outputs = dict(tensors_in(output, "output"))
            again = self._compare(outputs)
            pairs = [
                (tensor, call.received[place])
                for place, tensor in outputs.items()
                if place in call.received and tensor.requires_grad
            ]
            if pairs and again:
                trace.watch_parameters()
                self._backward(pairs)
            trace.settle()
        except MeetsOthers:
            trace.settle()
        finally:
            trace.remove()

    def _compare(self, outputs: Mapping[str, Tensor]) -> bool:
        """Whether what came out is what came out then; False if it was not finite then and is."""
        for place, kept in self._call.returned.items():
            now = outputs.get(place)
            if now is None or now.shape != kept.values.shape:
                self.doubt = self.doubt or "run once more it returned something else"
            elif version_of(kept.values) != kept.version:
                self.doubt = self.doubt or "what it returned has been changed in place since"
            elif not _alike(kept.values, now.detach()):
                if bool(now.isfinite().all()) and not bool(kept.values.isfinite().all()):
                    self.doubt = "what it returned was NaN or Inf, and run once more it was finite"
                    return False
                self.doubt = self.doubt or "run once more it gave other numbers"
        return True

    def _backward(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Runs outputs backward, and adds nothing to anybody's gradients."""
        trained = (param for param in self._module.parameters() if param.requires_grad)
        inputs = [*self._leaves, *trained]
        grad = inspect.unwrap(torch.autograd.grad)  # What others put around it is for training.
        outputs = [tensor for tensor, _ in pairs]
        fitting = [g.to(t.dtype) if g.dtype is not t.dtype else g for t, g in pairs]
        for tensor, gradient in zip(outputs, fitting, strict=True) if outputs[1:] else ():
            # What one has received has in it what came by way of another that follows from it.
            tensor.register_hook(lambda _, whole=gradient: whole)  # type: ignore[no-untyped-call]
        if inputs:
            self._gradients.add(inputs, grad(outputs, inputs, fitting, allow_unused=True))


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for rounding, and not finite at the same places."""
    if not (one.is_floating_point() or one.is_complex()) or one.layout is not torch.strided:
        return True
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    left, right = one[finite], other[finite].to(one.dtype)
    if torch.equal(left, right):
        return True
    rounding = _ALIKE if one.dtype in (torch.float32, torch.float64) else _ALIKE_IN_HALF
    return bool((left.float() - right.float()).norm() <= rounding * left.float().norm())
