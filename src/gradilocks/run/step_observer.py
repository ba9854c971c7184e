"""Converts the calls that `hooks.py` reports into recorded steps."""

from __future__ import annotations

import gc
import math
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradilocks.events import StepRecord
from gradilocks.kernels import STATISTICS
from gradilocks.ranks.layout import is_dtensor
from gradilocks.record import Recorder, WeightSample
from gradilocks.run.guard import Guard
from gradilocks.run.replay import CallLog, find_culprit, module_names
from gradilocks.step.gradients import dense_grads, parameters
from gradilocks.step.measure import statistics_of
from gradilocks.torch_private import supports_amp_scaling, version_of
from gradilocks.trace import Culprit, nonfinite_values

__all__ = ["StepObserver"]

MAX_REPLAYS = 20
"""Non-finite steps replayed per run. A replay takes about as long as ten steps."""
MAX_SEARCHES = 8
"""Searches for parameter names. Each takes 0.1 s, and some scripts create an optimizer for every batch."""
COLLECT_AT = 16
"""Number of existing optimizers of one class with the same shapes at which garbage is collected."""


@dataclass(eq=False)
class _OptimizerEntry:
    """An optimizer of the script, or a series of equal optimizers, each of which replaces the previous one."""

    index: int
    optimizer: weakref.ref[Any]
    signature: tuple[Any, ...]
    sample: WeightSample
    step: int = 0
    used: tuple[weakref.ref[Tensor], weakref.ref[Tensor], int] | None = None
    """A parameter, its gradient in the last step, and the gradient's version after that step."""
    has_leftover: bool = False
    """True if this gradient was not cleared before the latest backward."""


@dataclass
class _Clip:
    """A call of `clip_grad_norm_`."""

    params: set[int]
    max_norm: float
    norm: Tensor
    is_unscaled: bool


@dataclass(eq=False)
class _BackwardState:
    """Measurements and calls since the latest backward."""

    statistics: dict[int, tuple[weakref.ref[Tensor], tuple[float, ...]]] = field(default_factory=dict)
    """Gradient and statistics, by the parameter's id."""
    clips: list[_Clip] = field(default_factory=list)
    unscaled: set[int] = field(default_factory=set)
    """Ids of optimizers whose gradients a scaler has unscaled."""
    culprit: Culprit | None = None


class StepObserver:
    """Records every optimizer step of a script. Measures the gradients once, before their first use.

    Args:
        recorder: writes the run file.
        has_trace: search for the origin of NaN and Inf by replay.
        guard: "skip", "stop" or None.
    """

    def __init__(self, recorder: Recorder, *, has_trace: bool = True, guard: str | None = None) -> None:
        self.recorder = recorder
        self.last_steps: dict[int, int] = {}
        """Number of the last step of each optimizer in a file that is continued."""
        self.culprits: list[str] = []
        """Texts of the culprits, without repetitions."""
        self.calls = CallLog() if has_trace else None
        self._guard = Guard(guard) if guard else None
        self._latest = _BackwardState()
        self._losses: list[tuple[Tensor, bool]] = []
        """Losses since the last step; True for an unscaled loss."""
        self._has_stepped = False
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._entries: list[_OptimizerEntry] = []
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._searches = self._replays = 0
        self._are_weights_corrupt = False
        self._scale: float | None = None
        self._stepping: list[Any] = []
        """Optimizers, scalers and controls whose step is in progress, outermost first."""
        self._first_closure: tuple[list[tuple[Tensor, bool]], _BackwardState] | None = None
        """Losses and measurements after the first call of a closure."""

    # --- backward, unscaling, clipping --------------------------------------------------------------------------------

    def note_scaled(self, loss: Any, scaled: Any) -> None:
        """Remembers the loss that `scaler.scale(loss)` has scaled."""
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
            self._scaled = weakref.ref(scaled), loss.detach()

    def begin_backward(self, tensors: Any) -> None:
        """Called before backward from one or several tensors: keeps the losses, discards earlier measurements."""
        # LBFGS calls its closure several times per step; the first culprit is kept.
        self._latest = _BackwardState(culprit=self._latest.culprit if self._stepping else None)
        if self.calls is not None:
            self.calls.note_backward()
        if self._has_stepped:  # The loss is kept until then: several optimizers may step after one backward.
            self._losses, self._has_stepped = [], False
        for entry in self._entries if not self._stepping else ():
            entry.has_leftover = False
            if entry.used is not None and (param := entry.used[0]()) is not None and param.grad is not None:
                entry.has_leftover = param.grad is entry.used[1]() and version_of(param.grad) == entry.used[2]
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            is_scaled = self._scaled is not None and self._scaled[0]() is tensor
            loss = self._scaled[1] if is_scaled and self._scaled is not None else tensor.detach()
            if loss.numel() == 1:
                self._losses.append((loss.reshape(()).float().clone(), is_scaled))

    def note_cleared(self) -> None:
        """Called before `zero_grad`: discards losses whose gradients no step has used."""
        if not self._stepping and not self._has_stepped:
            self._losses.clear()

    def begin_unscale(self, optimizer: Any) -> None:
        """Called before `scaler.unscale_(optimizer)`."""
        self._examine(optimizer)
        self._latest.unscaled.add(id(optimizer))

    def begin_clip(self, params: Sequence[Tensor]) -> None:
        """Called before a clip function."""
        self._measure(params)
        ids = set(map(id, params))
        for entry in self._entries:
            optimizer = entry.optimizer()
            if optimizer is not None and not ids.isdisjoint(map(id, parameters([optimizer]))):
                self._examine(optimizer)

    def end_clip(self, params: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        """Called after `clip_grad_norm_`, with the norm that it returned."""
        ids = set(map(id, params))
        unscaled = bool(self._latest.unscaled)
        self._latest.clips.append(_Clip(ids, float(max_norm), norm.detach(), unscaled))

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Called before `scaler.step(optimizer)`."""
        self._scale = scaler.get_scale()
        self._examine(optimizer)
        self._stepping.append(scaler)

    def end_scaler_step(self, optimizer: Any, *, has_stepped: bool) -> None:
        """Called after `scaler.step(optimizer)`, which may have skipped the optimizer's step."""
        self._stepping.pop()
        if not has_stepped and not self._stepping:
            self._record(optimizer, is_skipped=True)
        self._scale = None

    def begin_step(self, optimizer: Any, *, has_closure: bool) -> None:
        """Called before `optimizer.step()`."""
        self._first_closure = None
        if has_closure:
            self._latest = _BackwardState()
        self._stepping = [outer for outer in self._stepping if outer is not optimizer and _is_running(outer)]
        if not self._is_inner() and not has_closure:
            self._gradients_ready(optimizer)
        self._stepping.append(optimizer)

    def end_closure(self, optimizer: Any) -> None:
        """Called after each call of the closure in `optimizer.step(closure)`. LBFGS calls it several times."""
        self._stepping.pop()
        if not self._is_inner():
            self._gradients_ready(optimizer)
            if self._first_closure is None:
                self._first_closure = list(self._losses), self._latest
        self._stepping.append(optimizer)

    def _gradients_ready(self, optimizer: Any) -> None:
        """Examines the gradients that an optimizer is about to use."""
        entry, bad = self._examine(optimizer)
        if self.recorder.is_detailed(entry.index) and self._first_closure is None:
            entry.sample.take()
        if bad and self._guard is not None:
            self._guard.apply(parameters([optimizer]), entry.step + 1, str(self._latest.culprit or "NaN or Inf"))

    def end_step(self, optimizer: Any) -> None:
        """Called after `optimizer.step()`."""
        self._stepping.pop()
        was_guarded = self._guard is not None and self._guard.restore()
        if not self._is_inner():
            if self._first_closure is not None:  # The loss and norm of a step are those at its start.
                self._losses, self._latest = self._first_closure
            is_fused_skip = self._scale is not None and supports_amp_scaling(optimizer) and bool(self._bad(optimizer))
            self._record(optimizer, is_skipped=was_guarded or is_fused_skip)

    def begin_control(self, control: Any) -> None:
        """Called before `control.step()`."""
        self._stepping.append(control)

    def end_control(self) -> None:
        """Called after `control.step()`."""
        self._stepping.pop()

    def control_step(self, record: StepRecord) -> None:
        """Records a step of a control. Called through `events.subscribe`."""
        self._has_stepped = True
        if self.calls is not None:
            bad = []
            if record.outcome.skipped and not record.outcome.rejected:
                params = parameters([record.control.optimizers[i] for i in record.optimizers])
                grads = zip(params, dense_grads(params), strict=True)
                bad = [param for param, grad in grads if grad is not None and not bool(grad.isfinite().all())]
            losses = [] if record.loss is None else [record.loss]
            self._trace(bad, record.outcome.step, self.recorder.index_of(record), losses)
        self.recorder(record)  # After the step's culprit: a repeated step number would count as a restart.
        self._note_step()

    def log(self, **numbers: Any) -> None:
        """Records the numbers of `control.log(...)`."""
        self.recorder.log(**numbers)

    def _is_inner(self) -> bool:
        """True for a step inside another step, of a control or of another optimizer."""
        return any(hasattr(outer, "param_groups") or hasattr(outer, "optimizers") for outer in self._stepping)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _measure(self, params: Sequence[Tensor]) -> None:
        """Measures the gradients that were not measured since backward. Waits for the device once."""
        statistics = self._latest.statistics
        new = [
            param
            for param in params
            if param.grad is not None and (id(param) not in statistics or statistics[id(param)][0]() is not param.grad)
        ]
        if not new:
            return
        with torch.no_grad():
            columns = statistics_of(dense_grads(new), detail=True).T.tolist()
        for param, column in zip(new, columns, strict=True):
            assert param.grad is not None
            statistics[id(param)] = weakref.ref(param.grad), tuple(column)

    def _columns(self, params: Sequence[Tensor]) -> list[tuple[float, ...]]:
        """The statistics of each parameter's gradient; zeros where there is none."""
        statistics, zeros = self._latest.statistics, (0.0,) * len(STATISTICS)
        return [statistics[id(param)][1] if id(param) in statistics else zeros for param in params]

    def _bad(self, optimizer: Any) -> list[Tensor]:
        """Parameters whose gradients contained NaN or Inf when they were measured."""
        params = parameters([optimizer])
        nan, inf = STATISTICS.index("nan"), STATISTICS.index("inf")
        return [
            param for param, column in zip(params, self._columns(params), strict=True) if column[nan] or column[inf]
        ]

    def _examine(self, optimizer: Any) -> tuple[_OptimizerEntry, list[Tensor]]:
        """Measures an optimizer's gradients and traces NaN and Inf among them."""
        entry = self._track(optimizer)
        self._measure(parameters([optimizer]))
        bad = self._bad(optimizer)
        self._trace(bad, entry.step + 1, entry.index, [loss for loss, _ in self._losses])
        return entry, bad

    def _record(self, optimizer: Any, *, is_skipped: bool) -> None:
        """Writes one step."""
        entry = self._track(optimizer)
        entry.step += 1
        params = parameters([optimizer])
        scale = self._scale or 1.0
        columns = {
            name: list(column)
            for name, column in zip(STATISTICS, zip(*self._columns(params), strict=True), strict=True)
        }
        nan, inf = int(sum(columns["nan"])), int(sum(columns["inf"]))
        norm: float = math.sqrt(sum(number * number for number in columns["norm"])) / scale
        clip = next((clip for clip in self._latest.clips if not clip.params.isdisjoint(map(id, params))), None)
        limit = None
        if clip is not None:
            unit = 1.0 if clip.is_unscaled else scale
            limit = clip.max_norm / unit
            if any(map(is_dtensor, params)):
                norm = float(clip.norm) / unit
        elif any(map(is_dtensor, params)):
            norm = math.nan  # The shards on the other ranks are not measured.
        fields: dict[str, Any] = {
            "kind": "step",
            "step": entry.step,
            "optimizer": entry.index,
            "time": time.time(),
            "scale": self._scale,
            "norm": math.nan if nan else math.inf if inf else norm,
            "limit": limit,
            "clipped": limit is not None and not (nan or inf) and norm > limit,
            "skipped": is_skipped,
            "rejected": False,
            "nan": nan,
            "inf": inf,
            "largest": max(columns["largest"], default=0.0) / scale,
            "is_unscaled": True,
        }
        used = next(((param, param.grad) for param in params if param.grad is not None), None)
        if entry.has_leftover and entry.used is not None and used is not None and used[1] is entry.used[1]():
            fields["leftover"] = True
        entry.used = None if used is None else (weakref.ref(used[0]), weakref.ref(used[1]), version_of(used[1]))
        entry.has_leftover = False
        tensors: dict[str, Tensor] = {}
        losses = [loss if is_unscaled else loss / scale for loss, is_unscaled in self._losses]
        if losses:
            tensors["loss"] = torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
        rate = optimizer.param_groups[0].get("lr")
        if isinstance(rate, Tensor):
            tensors["lr"] = rate.detach().clone()
        elif isinstance(rate, (int, float)):
            fields["lr"] = float(rate)
        if self.recorder.is_detailed(entry.index):
            fields["norms"] = [number / scale for number in columns["norm"]]
            fields["zeros"] = [count / size for count, size in zip(columns["zeros"], entry.sample.sizes, strict=True)]
            tensors["updates"] = entry.sample.updates()
        self.recorder.step(fields, tensors)
        self._has_stepped = True
        self._note_step()

    def _note_step(self) -> None:
        if self.calls is not None:
            self.calls.note_step(is_finite=self._latest.culprit is None and not self._are_weights_corrupt)

    # --- optimizers and names -----------------------------------------------------------------------------------------

    def _track(self, optimizer: Any) -> _OptimizerEntry:
        """The entry of an optimizer. An equal optimizer that no longer exists passes its entry to a new one."""
        for entry in self._entries:
            if entry.optimizer() is optimizer:
                return entry
        params = parameters([optimizer])
        signature = type(optimizer), tuple(param.shape for param in params)
        equal = [entry for entry in self._entries if entry.signature == signature]
        if len(equal) == COLLECT_AT and all(entry.optimizer() is not None for entry in equal):
            gc.collect()  # An optimizer with an LR scheduler is in a reference cycle.
        replaced = next((entry for entry in equal if entry.optimizer() is None), None)
        if replaced is not None:
            replaced.optimizer, replaced.sample, replaced.used = weakref.ref(optimizer), WeightSample(params), None
            return replaced
        if not all(map(self._name, params)):
            self._find_names(params)
        names = [self._name(param) or f"param {i}" for i, param in enumerate(params)]
        index = self.recorder.add_optimizer(type(optimizer).__name__, [optimizer], names)
        step = self.last_steps.get(index, 0)
        entry = _OptimizerEntry(index, weakref.ref(optimizer), signature, WeightSample(params), step)
        self._entries.append(entry)
        return entry

    def _find_names(self, params: Sequence[Tensor]) -> None:
        if self._searches >= MAX_SEARCHES:
            return
        self._searches += 1
        for module, prefix in module_names(params).items():
            is_outermost = prefix == type(module).__name__
            for name, param in module.named_parameters(recurse=False):
                self._names[id(param)] = weakref.ref(param), name if is_outermost else f"{prefix}.{name}"

    def _name(self, param: Tensor) -> str:
        """The name of a parameter; "" if it was not found."""
        reference, name = self._names.get(id(param), (None, ""))
        return name if reference is not None and reference() is param else ""

    def _trace(self, bad: list[Tensor], step: int, index: int, losses: list[Tensor]) -> None:
        """Finds and writes the culprit of a step whose gradients or losses are not finite."""
        if self.calls is None or self._latest.culprit is not None:
            return
        loss_value = next((value for loss in losses for value in nonfinite_values(loss)), "")
        if not bad and not loss_value:
            self._are_weights_corrupt = False
        if self._replays >= MAX_REPLAYS or self._are_weights_corrupt or not (bad or loss_value):
            return
        self._replays += 1
        optimizers = [optimizer for entry in self._entries if (optimizer := entry.optimizer()) is not None]
        names = module_names([*bad, *parameters(optimizers)] if optimizers else bad)
        culprit = find_culprit(self.calls, bad, names, loss_value=loss_value)
        self._latest.culprit = culprit
        self._are_weights_corrupt = culprit.source == "parameter"
        line = {"kind": "culprit", "step": step, "optimizer": index, "rank": self.recorder.rank}
        self.recorder.write({**line, **culprit.to_dict()})
        if culprit.text not in self.culprits:
            self.culprits.append(culprit.text)
            print(f"gradilocks: step {step}: {culprit.text}", file=sys.stderr, flush=True)


def _is_running(outer: Any) -> bool:
    """False for an optimizer whose step has raised an error. Its frame is no longer on the stack."""
    frame: FrameType | None = sys._getframe() if hasattr(outer, "param_groups") else None
    while frame is not None and frame.f_locals.get("self") is not outer:
        frame = frame.f_back
    return frame is not None or not hasattr(outer, "param_groups")
