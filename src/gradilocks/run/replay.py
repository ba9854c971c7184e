"""Replay of the module calls that produced non-finite gradients.

`CallLog` keeps references to the outermost module calls since the last step. If gradients are not finite, these calls
run again under `trace.Examiner`: forward with the same inputs, random states and autocast, backward from the gradients
that their outputs received.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import math
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradilocks.names import WRAPPER_ATTRIBUTES
from gradilocks.ranks.layout import is_dtensor
from gradilocks.torch_private import is_fsdp1_shard, version_of
from gradilocks.trace import (
    Culprit,
    Examiner,
    NotReplayable,
    Origin,
    add_call_observer,
    call_module,
    culprit_from,
    nonfinite_values,
    remove_call_observer,
    storage_key,
    tensors_in,
)

__all__ = ["CallLog", "find_culprit", "module_names"]

LARGE_WEIGHT = 1e6
"""Parameters above this magnitude are reported with the culprit."""
MAX_CALLS = 256
"""Module calls kept between two steps. Their inputs stay in memory."""
_saved_tensors_hooks: Any = torch.autograd.graph.saved_tensors_hooks
_HOOKS_METHODS = _saved_tensors_hooks.__enter__, _saved_tensors_hooks.__exit__
_REPLICATING = (nn.DataParallel, nn.parallel.DistributedDataParallel)


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)  # `_variable` must not find `module` in a `__dict__`.
class Call:
    """One outermost module call, with references to everything that a replay needs."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numbers: list[tuple[nn.Module, str, Any]]
    """Module, attribute and value of counters before the call."""
    random_state: dict[str, Any]
    autocast: list[tuple[str, bool, torch.dtype]]
    has_grad: bool
    saved_tensors_hooks: list[tuple[Any, Any]]
    """Hooks installed by `with` blocks of the script."""
    versions: list[int]
    """Version counters of the inputs before the call."""
    has_graph: bool = False
    """True if an output can receive a gradient."""
    norms: list[Tensor] = field(default_factory=list)
    """0-d: norm of each output, to detect a replay with different outputs."""
    outputs: list[StorageWeakRef] = field(default_factory=list)
    """Memory of the outputs, which detached outputs share."""
    received: dict[int, Tensor] = field(default_factory=dict)
    """Gradient of each output that received one, by the output's index."""
    is_differentiated_twice: bool = False
    precedes_backward: bool = False
    parameter: Tensor | None = None
    """The first parameter at the time of the call; `functional_call` replaces it for the duration of the call."""

    def finish(self, output: Any) -> None:
        """Keeps the norms of the outputs, and registers hooks that keep their gradients."""
        with contextlib.suppress(Exception):  # Tensors of torch.func and other subclasses may raise.
            found = _outputs(output)
            dense = [tensor for tensor in found if not tensor.is_sparse]
            self.outputs = [StorageWeakRef(tensor.untyped_storage()) for tensor in dense]  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self.norms = [_norm(tensor) for tensor in found]
            for i, tensor in enumerate(found):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    self.has_graph = True
                    tensor.register_hook(lambda grad, i=i: self._receive(i, grad))  # type: ignore[no-untyped-call]

    def _receive(self, i: int, grad: Tensor) -> None:
        # With create_graph=True the gradient becomes part of the loss; the second backward pass cannot be repeated.
        if torch.is_grad_enabled() and not self.is_differentiated_twice:
            self.is_differentiated_twice = True
            self.received.clear()
        elif self.is_differentiated_twice and not torch.is_grad_enabled():
            return
        grad = grad.detach()
        self.received[i] = grad if i not in self.received else self.received[i] + grad

    @property
    def is_pending(self) -> bool:
        """True if a later backward may still reach this call."""
        is_alive = any(not output.expired() for output in self.outputs)  # type: ignore[no-untyped-call]
        return self.has_grad and not self.received and is_alive

    @property
    def is_unused(self) -> bool:
        """True if the outputs are gone and received no gradient, as of a batch that the script has skipped."""
        return self.has_graph and not self.received and not self.is_pending


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    return [version_of(tensor) for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]


def _outputs(output: Any) -> list[Tensor]:
    """The floating-point outputs, or only the scalars if the module returns its loss: backward begins there."""
    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() or tensor.is_complex()]
    scalars = [tensor for tensor in found if tensor.dim() == 0 and tensor.requires_grad]
    return scalars or found


def _norm(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_complex():
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.coalesce().values()
    # `dtype=` converts within the kernel; `float()` would copy logits of a gigabyte. A float32 sum is Inf for finite
    # numbers above 1e38 / n, but 20 M take 16 ms in float32 on a CPU and 90 in float64.
    has_float64 = tensor.device.type != "mps" and (tensor.numel() <= 1 << 20 or tensor.dtype is torch.float64)
    norm: Tensor = torch.linalg.vector_norm(tensor, 1, dtype=torch.float64 if has_float64 else torch.float32)
    return norm


class CallLog:
    """The outermost module calls since the last optimizer step. Costs about 20 us per call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_truncated = False
        self.derivatives: deque[tuple[Tensor, list[Tensor | None]]] = deque(maxlen=MAX_CALLS)
        """For each result of `torch.autograd.grad(create_graph=True)`: its norm, NaN if an input was computed, and the
        norms of the gradients that it received, None in a backward pass that creates a graph itself."""
        self.finite_step: list[tuple[weakref.ref[nn.Module], bool, list[Tensor]]] = []
        """Module, `has_grad` and norms of the outputs of each call before the last step, if that step was finite."""
        self._has_stepped = self._was_finite = False
        self._thread = threading.local()
        """Has an attribute while a module call of the thread is in progress."""
        self._saved_tensors_hooks: list[tuple[Any, Any]] = []
        # By `training`: some counters advance in training only, and validation may come first.
        self._counters: Any = {False: weakref.WeakKeyDictionary(), True: weakref.WeakKeyDictionary()}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module, and keeps the call if it is outermost. See `trace.add_call_observer`."""
        if vars(self._thread) or torch.compiler.is_compiling():
            return call_module(module, *args, **kwargs)
        call = None
        with contextlib.suppress(Exception):  # An error here must not end the script.
            call = self._begin(module, args, kwargs)
        self._thread.is_inside = True
        try:
            output = call_module(module, *args, **kwargs)
        finally:
            del self._thread.is_inside
        if call is not None:
            call.finish(output)
        return output

    def install(self) -> None:
        """Starts keeping calls."""
        add_call_observer(self)
        kind, enter, leave = _saved_tensors_hooks, self._enter_hooks, self._leave_hooks
        kind.__enter__, kind.__exit__ = lambda hooks: enter(hooks), lambda hooks, *error: leave(hooks, *error)

    def remove(self) -> None:
        """Stops keeping calls."""
        remove_call_observer(self)
        _saved_tensors_hooks.__enter__, _saved_tensors_hooks.__exit__ = _HOOKS_METHODS

    def _enter_hooks(self, hooks: Any) -> Any:
        # The hooks of activation checkpoints only repeat the forward pass; a replay does not need them.
        if type(hooks) in (_saved_tensors_hooks, torch.autograd.graph.save_on_cpu):
            self._saved_tensors_hooks.append((hooks.pack_hook, hooks.unpack_hook))
        return _HOOKS_METHODS[0](hooks)

    def _leave_hooks(self, hooks: Any, *error: Any) -> None:
        if type(hooks) in (_saved_tensors_hooks, torch.autograd.graph.save_on_cpu) and self._saved_tensors_hooks:
            self._saved_tensors_hooks.pop()
        _HOOKS_METHODS[1](hooks, *error)

    def note_backward(self) -> None:
        """Called before backward. Later calls, of metrics for example, do not contribute to the gradients."""
        for call in self.calls:
            call.precedes_backward = True

    def note_gradients(self, inputs: Any, results: Any) -> None:
        """Called after `torch.autograd.grad`."""
        # Modules may use computed inputs as weights, as in MAML. The NaN makes the origin unknown.
        factor = 1 if all(tensor.grad_fn is None for tensor in tensors_in(inputs)) else math.nan
        for result in tensors_in(results):
            if result.grad_fn is not None:
                received: list[Tensor | None] = []
                self.derivatives.append((_norm(result) * factor, received))
                note = received.append
                result.register_hook(lambda grad, note=note: note(None if torch.is_grad_enabled() else _norm(grad)))  # type: ignore[no-untyped-call]

    def note_step(self, *, is_finite: bool) -> None:
        """Called after an optimizer step. Earlier calls are dropped when the next call begins."""
        self._has_stepped, self._was_finite = True, is_finite

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if self._has_stepped:
            finished = [(weakref.ref(call.module), call.has_grad, call.norms) for call in self.calls]
            self.finite_step = finished if self._was_finite else []
            self.calls = [call for call in self.calls if call.is_pending]
            self._has_stepped = self.is_truncated = False
            self.derivatives.clear()
        if len(self.calls) >= MAX_CALLS:
            # Evaluation and transforms of the data run many calls without gradients between two steps.
            idle = next((i for i, call in enumerate(self.calls) if not call.has_graph), None)
            self.is_truncated |= idle is None
            del self.calls[idle or 0]
        counters = self._counters[module.training]
        numbers = (counters.get(module) or counters.setdefault(module, _Counters(module))).values()
        state = _random_state(), _autocast(), torch.is_grad_enabled(), list(self._saved_tensors_hooks)
        parameter = next(module.parameters(), None)
        args = tuple(dict(arg) if type(arg) is dict else arg for arg in args)  # The module may remove items.
        self.calls.append(Call(module, args, kwargs, numbers, *state, _versions(args, kwargs), parameter=parameter))
        return self.calls[-1]


class _Counters:
    """Numbers in attributes of a module and its submodules that its forward pass changes.

    All numbers are compared over the first three calls, then only those that changed are kept for each call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = weakref.WeakSet(module.modules())
        self._calls = 0
        self._changing: set[tuple[weakref.ref[nn.Module], str]] = set()
        self._last: dict[tuple[weakref.ref[nn.Module], str], Any] = {}

    def values(self) -> list[tuple[nn.Module, str, Any]]:
        """Module, attribute and current value of each counter."""
        self._calls += 1
        if self._calls <= 3:
            now = {
                (weakref.ref(module), name): value
                for module in self._modules
                for name, value in vars(module).items()
                if type(value) in (bool, int, float)
            }
            self._changing |= {key for key, value in now.items() if self._last.get(key, value) != value}
            self._last = now
            return [(module, name, value) for (ref, name), value in now.items() if (module := ref()) is not None]
        return [(module, name, getattr(module, name)) for ref, name in self._changing if (module := ref()) is not None]


def _random_state() -> dict[str, Any]:
    """States of all generators a forward pass may draw from."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy.random" in sys.modules:
        state["numpy"] = sys.modules["numpy.random"].get_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy.random"].set_state(state["numpy"])


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


# --- replay -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Replay:
    """Result of the replay of one call."""

    call: Call
    reason: str = ""
    """The reason why the replay failed or differs from the call; "" if it agrees."""
    output: Origin | None = None
    """Origin of a non-finite output."""
    gradients: dict[int, Origin] = field(default_factory=dict)
    """Origins of non-finite gradients, by the parameter's id."""
    norms: dict[int, float] = field(default_factory=dict)
    """Norms of the gradients, by the parameter's id."""
    input_gradient: Origin | None = None
    was_nonfinite: bool = False
    """True if an output of the call itself was not finite."""
    harmless: set[int] = field(default_factory=set)
    """Indices of outputs that were also non-finite in the previous step, whose gradients were finite."""


def find_culprit(log: CallLog, params: Sequence[Tensor], names: Mapping[nn.Module, str], *, loss_value: str) -> Culprit:
    """Replays the calls of a log and names the origin of non-finite gradients, or of a non-finite loss.

    The replay changes no parameters or gradients; buffers, random states and numbers in module attributes are restored.

    Args:
        log: the calls behind the gradients.
        params: parameters with non-finite gradients, not yet clipped or unscaled. Empty if only the loss is not finite.
        names: see `module_names`.
        loss_value: "NaN" or "Inf" if the loss itself is; "" if it is finite.
    """
    random_state = _random_state()
    try:
        calls = [call for call in log.calls if call.precedes_backward] or log.calls
        replays = [_replay(call, names, _harmless(call, log)) for call in calls]
        culprit = _conclude(replays, params, log, loss_value)
    except Exception as error:  # Tensors of torch.func cannot be read, for example.
        culprit = _unknown(f"the search raised {type(error).__name__}: {error}")
    finally:
        _set_random_state(random_state)
    corrupt = [values[0] for param in params if (values := nonfinite_values(param))]
    if corrupt and culprit.source in ("", "script"):
        count = "a parameter" if len(corrupt) == 1 else f"{len(corrupt)} parameters"
        text = f"{corrupt[0]} in {count}, before this step's forward pass; the cause is earlier"
        return Culprit(True, text, value=corrupt[0], source="parameter")
    largest = max((float(param.detach().abs().max()) for param in params if param.numel()), default=0.0)
    if LARGE_WEIGHT < largest < math.inf:
        culprit = replace(culprit, text=f"{culprit.text}; weights have grown to {largest:.4g}")
    return culprit


def _conclude(replays: list[_Replay], params: Sequence[Tensor], log: CallLog, loss_value: str) -> Culprit:
    """The earliest origin that the replays connect to the parameters' gradients."""
    if not replays:
        return _unknown("no module was called since the last step")
    owned = {id(param) for replay in replays for param in replay.call.module.parameters()}
    bad = {id(param) for param in params} & owned
    # Other parameters, of the script itself, received NaN or Inf from the loss if that is not finite.
    found = not params or any(key in bad for replay in replays for key in replay.gradients)
    found = found or bool(loss_value and not bad)
    used = [replay for replay in replays if not replay.call.is_unused]
    while used and not used[-1].call.has_graph and used[-1].output is not None and used[-1].output.source == "data":
        del used[-1]  # A metric that received a loss of NaN or Inf, for example.
    for replay in used:  # The first of several micro-batches; within one call, the earliest operation.
        inside = [o for key, o in replay.gradients.items() if key in bad and o.source != "received"]
        if replay.call.is_differentiated_twice and not loss_value:
            inside = [origin for origin in inside if origin.phase == "forward"]
        elif replay.call.is_differentiated_twice and replay.input_gradient is not None:
            inside.append(replay.input_gradient)
        if replay.reason:
            continue
        if replay.output is not None and not replay.output.is_mask and loss_value and found:
            inside.append(replay.output)
        if inside:
            return _before_input(min(inside, key=lambda origin: origin.order), replay, replays)
    for replay in used:
        if replay.was_nonfinite and replay.output is None:
            return _not_reproduced(replay)
        if replay.output is not None and found and not replay.reason:
            if replay.output.is_mask:
                name = type(replay.call.module).__name__
                reason = f"{name} returns the Inf of a mask ({replay.output.operation}), and the loss is not finite"
                return _unknown(reason)
            return _before_input(replay.output, replay, replays)
    doubts = [replay.reason for replay in used if replay.reason]
    doubts += [
        f"{type(replay.call.module).__name__} returned NaN or Inf, which may not have entered this loss"
        for replay in replays
        if (replay.harmless and found) or (replay.was_nonfinite and replay not in used)
    ]
    value = loss_value
    if any(replay.call.is_differentiated_twice for replay in replays):
        value = _value_from_script(replays, log, loss_value)
        found = bool(value)
        doubts += [] if value else ["the step differentiates gradients, which a replay does not repeat"]
    if doubts or log.is_truncated:
        return _unknown(doubts[0] if doubts else f"more than {MAX_CALLS} module calls since the last step")
    if found:
        for replay in reversed(replays):
            if replay.input_gradient is not None and replay.input_gradient.source != "received":
                return culprit_from(replay.input_gradient)
        return _after_modules(replays, loss_value, value)
    return _after_backward(replays, bad, loss_value)


def _before_input(origin: Origin, replay: _Replay, replays: list[_Replay]) -> Culprit:
    """The culprit of an origin, or of the earlier call that returned the NaN or Inf if the origin is an input."""
    if origin.source in ("data", "computed"):
        for earlier in replays[: replays.index(replay)]:
            if earlier.output is not None:
                return culprit_from(earlier.output)
            if earlier.was_nonfinite:
                return _not_reproduced(earlier)
    return culprit_from(origin)


def _not_reproduced(replay: _Replay) -> Culprit:
    name = type(replay.call.module).__name__
    why = replay.reason or f"the replay is finite: {name} depends on state that has changed since"
    return _unknown(f"an output of {name} is NaN or Inf, but {why}")


def _value_from_script(replays: list[_Replay], log: CallLog, loss_value: str) -> str:
    """The value that the script's own code made from finite results of `torch.autograd.grad`; "" if it made none."""
    if not 0 < len(log.derivatives) < MAX_CALLS or _nonfinite([norm for norm, _ in log.derivatives]):
        return ""
    twice = [replay.call for replay in replays if replay.call.is_differentiated_twice]
    used = [(call.args, call.kwargs, _tensors_by_attribute(call.module)) for call in twice]
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(used)]
    for node in nodes if not loss_value else ():
        # The second derivatives of a module enter the gradients of everything that its inputs and attributes depend on.
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return ""
        nodes += [parent for parent, _ in getattr(node, "next_functions", ()) if parent not in nodes]
    norms = [norm for _, received in log.derivatives if None not in received for norm in received if norm is not None]
    norms += [_norm(grad) for replay in replays if replay.call not in twice for grad in _received(replay.call)]
    return loss_value or next((value for norm in norms for value in nonfinite_values(norm)), "")


def _after_modules(replays: list[_Replay], loss_value: str, value: str = "") -> Culprit:
    """The culprit if the outputs of all modules are finite and the gradient that they receive is not."""
    received = [
        (replay, value) for replay in replays for grad in _received(replay.call) for value in nonfinite_values(grad)
    ]
    last, value = received[-1] if received else (replays[-1], value)
    name, phase = type(last.call.module).__name__, "forward" if loss_value else "backward"
    value = loss_value or value
    text = f"first {value}: in the script's own code after {name} ({phase}); the outputs of all modules are finite, "
    text += "but the loss is not" if loss_value else "but their gradient is not"
    return Culprit(True, text, value=value, source="script", phase=phase)


def _after_backward(replays: list[_Replay], bad: set[int], loss_value: str) -> Culprit:
    """The culprit if the replay of every call is finite."""
    used = [param for replay in replays if replay.call.received for param in replay.call.module.parameters()]
    if not bad or any(not any(key in replay.norms for replay in replays) for key in bad):
        return _unknown("these gradients did not come through a tensor that a module call returned")
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        return _unknown("the replay on this rank is finite: the NaN or Inf probably comes from another rank")
    for param in {id(param): param for param in used}.values():
        norms = [replay.norms[id(param)] for replay in replays if id(param) in replay.norms]
        if len(norms) != 1 or param.grad is None or id(param) in bad:
            continue
        if not math.isclose(norms[0], float(_norm(param.grad)), rel_tol=1e-2, abs_tol=1e-30):
            return _unknown("the replay gives other gradients: state or the gradients themselves have changed since")
    if loss_value:
        return _after_modules(replays, loss_value)
    text = (
        "NaN or Inf entered the gradients outside of modules: in a term of the loss that uses the parameters directly, "
        "in a hook, in accumulation or after backward; the replay of all module calls is finite"
    )
    return Culprit(True, text, source="script", phase="backward")


def _unknown(reason: str) -> Culprit:
    return Culprit(False, f"origin unknown: {reason}")


def _harmless(call: Call, log: CallLog) -> set[int]:
    """Indices of non-finite outputs that were also non-finite in the previous step, if its gradients were finite."""
    earlier = [norms for ref, has_grad, norms in log.finite_step if (ref(), has_grad) == (call.module, call.has_grad)]
    return _nonfinite(call.norms) & {i for norms in earlier for i in _nonfinite(norms)}


def _nonfinite(norms: list[Tensor]) -> set[int]:
    return {i for i, norm in enumerate(norms) if not math.isfinite(float(norm))}


def _replay(call: Call, names: Mapping[nn.Module, str], harmless: set[int]) -> _Replay:
    """Repeats one call, forward and backward, and follows NaN and Inf through it."""
    replay = _Replay(call, was_nonfinite=bool(_nonfinite(call.norms) - harmless), harmless=harmless)
    replay.reason = _refusal(call)
    if replay.reason:
        return replay
    module = call.module
    while isinstance(module, _REPLICATING):
        module = module.module
    examiner = Examiner(names)
    examiner.add_leaves("parameter", _named(module, names, nn.Module.named_parameters))
    with _state_restored(module, call.numbers):
        examiner.add_leaves("buffer", _named(module, names, nn.Module.named_buffers))
        for name, tensor in _named_inputs(call):
            examiner.add_leaves("data" if tensor.grad_fn is None else "computed", iter([(name, tensor)]))
        examiner.add_leaves("received", (("", grad) for grad in _received(call)))
        add_call_observer(examiner.call)
        logging_level = logging.root.manager.disable
        logging.disable()
        before = _tensors_by_attribute(module)
        try:
            _set_random_state(call.random_state)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                _replay_call(replay, examiner, module)
        except NotReplayable as refusal:
            replay.reason = str(refusal)
        except Exception as error:  # Forward code may raise anything when it runs a second time.
            replay.reason = f"the replay of {type(call.module).__name__} raised {type(error).__name__}: {error}"
        finally:
            logging.disable(logging_level)
            remove_call_observer(examiner.call)
        after = _tensors_by_attribute(module)
        reassigned = [
            tensors for name, tensors in before.items() if [*map(id, tensors)] != [*map(id, after.get(name, []))]
        ]
        changed = examiner.written | {storage_key(tensor) for tensors in reassigned for tensor in tensors}
        for origin in examiner.origins_of_leaves:
            if origin.source in ("buffer", "script") and origin.storage in changed:
                origin.source = "state"
    return replay


def _named(module: nn.Module, names: Mapping[nn.Module, str], kind: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters or buffers of a module with their names."""
    for owner in module.modules():
        prefix = names.get(owner, "")
        for name, tensor in kind(owner, recurse=False):
            yield name if prefix in ("", type(owner).__name__) else f"{prefix}.{name}", tensor


def _tensors_by_attribute(module: nn.Module) -> dict[tuple[nn.Module, str], list[Tensor]]:
    """Tensors in the attributes of a module and its submodules."""
    return {(owner, name): [*tensors_in(value)] for owner in module.modules() for name, value in vars(owner).items()}


def _replay_call(replay: _Replay, examiner: Examiner, module: nn.Module) -> None:
    call = replay.call
    with contextlib.ExitStack() as stack:
        for kind, is_enabled, dtype in call.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
        stack.enter_context(torch.set_grad_enabled(call.has_grad))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for pack, unpack in call.saved_tensors_hooks:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        stack.enter_context(examiner)
        args, kwargs = _detached(call.args), _detached(call.kwargs)
        output = nn.Module.__call__(module, *args, **kwargs)
    outputs = _outputs(output)
    candidates = [tensor for i, tensor in enumerate(outputs) if i not in replay.harmless]
    origins = [origin for tensor in candidates if (origin := examiner.origin_of(tensor)) is not None]
    replay.output = min(origins, key=lambda origin: origin.order, default=None)
    replay.reason = _difference(call, outputs)
    if not call.received:
        return
    params = [param for param in module.parameters() if param.requires_grad]
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    roots = [outputs[i] for i in sorted(call.received)]
    with contextlib.ExitStack() as stack:
        for owner in module.modules():
            for name, param in owner.named_parameters(recurse=False):
                if param.requires_grad:  # This hook runs after those of the script.
                    hook = functools.partial(examiner.leave_hooks, owner, f"hook on the gradient of {name}")
                    stack.callback(param.register_hook(hook).remove)  # type: ignore[no-untyped-call]
        stack.enter_context(examiner)
        stack.enter_context(examiner.backward(roots))
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            roots, [*params, *inputs], _received(call), allow_unused=True
        )
    found = [None if grad is None else examiner.origin_of(grad) for grad in grads]
    replay.gradients = {id(param): origin for param, origin in zip(params, found, strict=False) if origin is not None}
    replay.norms = {
        id(param): float(_norm(grad)) for param, grad in zip(params, grads, strict=False) if grad is not None
    }
    replay.input_gradient = next((origin for origin in found[len(params) :] if origin is not None), None)


def _detached(value: Any) -> Any:
    """Inputs without the graph that computed them: a cell called in a loop is in the graph of its own input."""
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    return {key: _detached(item) for key, item in value.items()} if type(value) is dict else value


def _received(call: Call) -> list[Tensor]:
    """Gradients that the outputs received, in the order of the outputs."""
    return [grad for _, grad in sorted(call.received.items())]


def _refusal(call: Call) -> str:
    """The reason why a call cannot be replayed; "" if it can."""
    name = type(call.module).__name__
    if any(is_dtensor(param) or is_fsdp1_shard(param) for param in call.module.parameters()):
        return f"the parameters of {name} are shards, and a replay would wait for the other ranks"
    if next(call.module.parameters(), None) is not call.parameter:
        return f"the parameters of {name} have been replaced, as by functional_call"
    if _versions(call.args, call.kwargs) != call.versions:
        return f"the inputs of {name} were changed in place, by {name} or after the call"
    return ""


def _difference(call: Call, outputs: list[Tensor]) -> str:
    """The reason why a replay does not reproduce its call; "" if their outputs agree."""
    name = type(call.module).__name__
    before, now = [float(norm) for norm in call.norms], [float(_norm(tensor)) for tensor in outputs]
    if len(before) != len(now):
        return f"the replay of {name} returns {len(now)} tensors, the call returned {len(before)}"
    for old, new in zip(before, now, strict=True):
        is_same = math.isfinite(old) == math.isfinite(new) and (
            not math.isfinite(old) or math.isclose(old, new, rel_tol=1e-3, abs_tol=1e-30)
        )
        if not is_same:
            return f"the replay of {name} gives different outputs: {name} depends on state that has changed since"
    return ""


def _named_inputs(call: Call) -> Iterator[tuple[str, Tensor]]:
    name = type(call.module).__name__
    arguments = {**{f"argument {i + 1}": value for i, value in enumerate(call.args)}, **call.kwargs}
    for key, value in arguments.items():
        for tensor in tensors_in(value):
            yield f"{key} of {name}", tensor


@contextlib.contextmanager
def _state_restored(module: nn.Module, numbers: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Sets counters to their values before the call; afterwards restores attributes and buffers of all submodules."""
    saved = []
    for submodule in module.modules():
        attributes = dict(vars(submodule))
        contents = {
            name: value.copy()
            for name, value in attributes.items()
            if type(value) in (list, dict, set) and not name.startswith("_")
        }
        buffers = dict(submodule.named_buffers(recurse=False))
        saved.append((submodule, attributes, contents, buffers))
    try:
        for submodule, _, _, buffers in saved:
            for name, buffer in buffers.items():
                setattr(submodule, name, buffer.clone())  # The replay writes to copies.
        for submodule, name, value in numbers:
            setattr(submodule, name, value)
        yield
    finally:
        for submodule, attributes, contents, buffers in saved:
            for name, buffer in buffers.items():
                setattr(submodule, name, buffer)
            for name in vars(submodule).keys() - attributes.keys():
                delattr(submodule, name)
            for name, value in attributes.items():
                if vars(submodule).get(name) is not value:
                    setattr(submodule, name, value)
            for name, content in contents.items():
                _refill(attributes[name], content)


def _refill(container: Any, content: Any) -> None:
    """Replaces the content of a list, dict or set."""
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


# --- names ------------------------------------------------------------------------------------------------------------


def module_names(params: Sequence[Tensor]) -> dict[nn.Module, str]:
    """The name of every module in the process. Searches all objects, which takes about 0.1 s.

    If one outermost module owns all of `params`, the names of its submodules have no prefix. All other names begin with
    the script's variable or attribute that refers to the outermost module, or else with its class.

    Args:
        params: parameters that are trained.
    """
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    trained = set(map(id, params))
    outermost = [module for module in modules if id(module) not in inner]
    owned = {top: trained.intersection(map(id, top.parameters())) for top in outermost}
    outermost.sort(key=lambda top: len(owned[top]), reverse=True)
    owners: set[int] = set()  # By id: the metrics of torchmetrics are modules and define ==.
    for top in outermost:  # A slice or copy of a model's list of layers owns nothing that the model does not.
        if owned[top] & trained:
            owners.add(id(top))
            trained -= owned[top]
    names: dict[nn.Module, str] = {}
    for top in sorted(outermost, key=lambda top: id(top) not in owners):
        prefix = "" if owners == {id(top)} else _variable(top) or type(top).__name__
        for path, module in top.named_modules():
            parts = [part for part in path.split(".") if part not in WRAPPER_ATTRIBUTES]
            if isinstance(top, _REPLICATING) and parts[0] == "module":
                del parts[0]
            name = ".".join(part for part in [prefix, *parts] if part)
            names.setdefault(module, name or type(module).__name__)
    return names


def _variable(module: nn.Module) -> str:
    """The name of the script's local variable, global variable or attribute that refers to a module; "" if none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_ours = frame.f_globals.get("__name__", "").startswith("gradilocks.")  # Reading `f_locals` adds a referrer.
        for variables in () if is_ours else (frame.f_locals, frame.f_globals):
            for name, value in list(variables.items()):
                if value is module:
                    return name
        frame = frame.f_back
    for holder in gc.get_referrers(module):
        variables = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for name, value in list(variables.items()):
            if value is module and isinstance(name, str) and name.isidentifier():
                return name
    return ""
