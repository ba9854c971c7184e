"""Every private name of torch and Triton that this package uses, and what serves without it.

torch promises nothing about a name with a leading underscore. So all of them are here, under
public names of ours, with a fallback for a torch that has none; the rest of the package imports
from here and never writes such a name itself. `tests/test_torch_names.py` takes away each name in
turn, says what is lost, and keeps other files from using one.

Three kinds of names: those that `_find` looks up when this module is imported; attributes of a
tensor, module, optimizer or scaler (`INSTANCE_NAMES`), which the functions below read; and those of
torch's GradScaler (`SCALER_ATTRIBUTES`), which have no fallback: our GradScaler is a subclass of
torch's, because frameworks ask for that class and read them too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

__all__ = [
    "AMP_FLAG",
    "BEGINS_GROUP",
    "CHECKPOINT_GENERATOR",
    "CHECKPOINT_WRAPPER",
    "COLLECTIVE_NAMESPACES",
    "COMPOSABLE_CHECKPOINT",
    "DTENSOR_PARTS",
    "DYNAMO",
    "FOUND_NAMES",
    "INSTANCE_NAMES",
    "NORMS_WITH_STATISTICS",
    "SCALER_ATTRIBUTES",
    "TRITON_NAMES",
    "DispatchMode",
    "OptState",
    "TensorBase",
    "are_transforms_active",
    "buffers_of",
    "children_of",
    "clamp_max_",
    "clamp_min_",
    "compile_kernel",
    "compiled_call",
    "constants_taken",
    "current_device",
    "current_stream",
    "default_group",
    "default_store",
    "device_kinds",
    "dispatch_modes",
    "drop_empty_hooks",
    "function_modes",
    "fused_sgd_",
    "groups_joined",
    "has_foreach",
    "has_step_hooks",
    "has_step_pre_hooks",
    "hook_gradient",
    "in_backward",
    "infers_metadata",
    "inner_schedules",
    "is_autocast_enabled",
    "is_flattened",
    "is_functorch_tensor",
    "is_jit_tracing",
    "is_joining",
    "is_profiling",
    "local_tensor",
    "mul_",
    "new_scaler_state",
    "norms",
    "note_stepped",
    "parameters_in",
    "plain_launch",
    "post_accumulate_hooks",
    "rewrapped_by_schedule",
    "root_mesh",
    "same_version",
    "scale_of",
    "scaler_state",
    "script_for_caller",
    "seen_by_function_modes",
    "seen_by_launcher",
    "sees_steps",
    "set_buffer",
    "set_compiled_call",
    "short_launcher",
    "sparse_indices",
    "sparse_values",
    "sub_",
    "tensor_guards",
    "uncompiled",
    "unhooked",
    "unscale_and_check_",
    "unseen_by_modes",
    "version",
    "watch_clips",
    "without_gradient_hooks",
]

FOUND_NAMES: list[str] = []
"""The dotted names that `_find` has looked up, in this order."""


def _find(path: str, fallback: Any) -> Any:
    """What torch has at a dotted name, or `fallback` if this torch has nothing there."""
    FOUND_NAMES.append(path)
    module, _, name = path.rpartition(".")
    found: Any = sys.modules.get(module)  # Some of C++ are no attributes of what they are in.
    return fallback if found is None else getattr(found, name, fallback)


# --- tensors --------------------------------------------------------------------------------------

version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Counts the writes to a tensor. No fallback: nothing else of torch counts them, and without it a
gradient that was cleared in place could not be told from one that is left over."""

TensorBase: Any = _find("torch._C.TensorBase", Tensor)
"""The class in C++ that Tensor inherits from: its methods are called without a look-up each."""


def sparse_values(tensor: Tensor) -> Tensor:
    """The stored elements of a sparse COO tensor, without a copy; a place may be there twice."""
    read = getattr(tensor, "_values", None)
    values: Tensor = tensor.detach().coalesce().values() if read is None else read()
    return values


def sparse_indices(tensor: Tensor) -> Tensor:
    """Where those elements belong."""
    read = getattr(tensor, "_indices", None)
    indices: Tensor = tensor.detach().coalesce().indices() if read is None else read()
    return indices


def post_accumulate_hooks(param: Tensor) -> dict[int, Any]:
    """The hooks that run when a parameter's gradient has been added up; without the name, none.

    An audit takes them off, because an optimizer that steps inside backward does so by such a hook.
    If they cannot be found, it sees that the parameter was changed, and refuses.
    """
    hooks: dict[int, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


@contextlib.contextmanager
def without_gradient_hooks(tensor: Tensor) -> Iterator[None]:
    """Inside, the hooks on a tensor's gradient are out of the way; without the name they run."""
    hooks = getattr(tensor, "_backward_hooks", None)
    if not hooks:
        yield
        return
    tensor._backward_hooks = None
    try:
        yield
    finally:
        tensor._backward_hooks = hooks


same_version: Any = _find(
    "torch.autograd._unsafe_preserve_version_counter", lambda tensor: contextlib.nullcontext()
)
"""Writes into a tensor are not counted when it has been left; without the name they are, and a
backward pass that is still to come may refuse what has been put back."""


def drop_empty_hooks(tensor: Tensor) -> None:
    """Takes the empty table away that hooks on a leaf's gradient leave when they are removed.

    torch ties it to the contents that the tensor had when the first hook came.
    `torch.utils.swap_tensors` takes those away, and no hook that came later would ever be called.
    In a backward pass it stays: autograd may be about to read it.
    """
    if getattr(tensor, "_backward_hooks", None) == {} and not in_backward():
        tensor._backward_hooks = None


def _guards(*tensors: Tensor, **_: Any) -> None:
    return None


_TensorGuards: Any = _find("torch._C._dynamo.guards.TensorGuards", _guards)


def tensor_guards(tensors: Sequence[Tensor]) -> Any:
    """What torch.compile knows its inputs by: compares types, dtypes, devices, shapes and strides.

    2,000 tensors take 0.19 ms, where four list walks in Python take 0.5.

    Returns:
        An object whose `check(*tensors)` tells whether all are still so; None where this torch has
        no such thing: then every step compares by itself.
    """
    try:
        return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except TypeError:
        return None


# --- lists of tensors -----------------------------------------------------------------------------


def _mul_one_by_one_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _sub_one_by_one_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for tensor, other in zip(tensors, others, strict=True):
        tensor.sub_(other)


def _clamp_min_one_by_one_(tensors: Sequence[Tensor], bound: float) -> None:
    for tensor in tensors:
        tensor.clamp_(min=bound)


def _clamp_max_one_by_one_(tensors: Sequence[Tensor], bound: float) -> None:
    for tensor in tensors:
        tensor.clamp_(max=bound)


def _flatten_one_by_one(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _norms_one_by_one(
    tensors: Sequence[Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _unscale_one_by_one_(tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for tensor in tensors:
        if not torch.isfinite(tensor).all():
            found_inf.fill_(1.0)
        tensor.mul_(inv_scale)


mul_: Any = _find("torch._foreach_mul_", _mul_one_by_one_)
sub_: Any = _find("torch._foreach_sub_", _sub_one_by_one_)
clamp_min_: Any = _find("torch._foreach_clamp_min_", _clamp_min_one_by_one_)
clamp_max_: Any = _find("torch._foreach_clamp_max_", _clamp_max_one_by_one_)
norms: Any = _find("torch._foreach_norm", _norms_one_by_one)
flattened: Any = _find("torch._utils._flatten_dense_tensors", _flatten_one_by_one)
"""The elements of tensors of one dtype on one device, one after another; those of an only one in
its own memory, if they lie in order."""
unscale_and_check_: Any = _find(
    "torch._amp_foreach_non_finite_check_and_unscale_", _unscale_one_by_one_
)
"""Multiplies by the third argument; sets the second to 1 if an element was NaN or Inf before."""


fused_sgd_: Any = _find("torch._fused_sgd_", None)
"""The kernel of torch's fused SGD. Without the name nobody calls it, and there is nothing to mend
(`step/half_sgd.py`)."""


def _has_foreach_by_kind(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda", "xpu", "mtia")


has_foreach: Callable[[torch.device], bool] = _find(
    "torch.utils._foreach_utils._device_has_foreach_support", _has_foreach_by_kind
)
"""Whether torch's clip functions take foreach=True on this device."""

# --- modules --------------------------------------------------------------------------------------

NORMS_WITH_STATISTICS: Any = _find(
    "torch.nn.modules.batchnorm._NormBase",
    (
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
        nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d,
        nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d,
    ),
)  # fmt: skip
"""The norms that keep running statistics; without the name, those of torch itself."""


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, with those that are None; without the name not those."""
    found: dict[str, Tensor | None] | None = getattr(module, "_buffers", None)
    return dict(module.named_buffers(recurse=False)) if found is None else dict(found)


def set_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    """Puts another object in a buffer's place, whatever the module's `__setattr__` would do."""
    found: dict[str, Tensor | None] | None = getattr(module, "_buffers", None)
    if found is None:
        setattr(module, name, buffer)
    else:
        found[name] = buffer


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` has made, and what is called in the place of the module then."""
    found: Callable[..., Any] | None = getattr(module, "_compiled_call_impl", None)
    return found


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Puts something else in its place; copies of the module do not have it."""
    module._compiled_call_impl = call


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """A module's children by name; none if its constructor has not come that far."""
    return _table(module, "_modules", module.named_children)


def parameters_in(module: nn.Module) -> Mapping[str, Tensor | None]:
    """A module's own parameters by name; none if its constructor has not come that far."""
    return _table(module, "_parameters", lambda: module.named_parameters(recurse=False))


def _table(module: nn.Module, name: str, public: Callable[[], Any]) -> Mapping[str, Any]:
    # By the instance's dictionary: `getattr` asks `__getattr__`, which somebody may have written.
    found: Mapping[str, Any] | None = module.__dict__.get(name)
    if found is not None:
        return found
    try:
        return dict(public())
    except AttributeError:  # Half made.
        return {}


# --- autograd, transforms, modes ------------------------------------------------------------------


def _backward_by_frames() -> int:
    """-1 if no frame above is torch.autograd's; a device's own thread shows none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("torch.autograd", "torch.autograd.graph"):
            return 0
        frame = frame.f_back
    return -1


_graph_task: Callable[[], int] = _find("torch._C._current_graph_task_id", _backward_by_frames)


def in_backward() -> bool:
    """Whether autograd is running backward in this thread, as when a checkpoint computes again."""
    return _graph_task() != -1


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Calls `hook` with the gradient of a tensor that has been computed, while its graph lives.

    As `tensor.register_hook`, without the handle that could take it away: 3 us less of a step.
    """
    register = getattr(tensor.grad_fn, "_register_hook_dict", None)
    if register is None or getattr(tensor, "_backward_hooks", ()) is not None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    else:
        tensor._backward_hooks = OrderedDict({-1: hook})  # No handle has that number.
        register(tensor)


def output_dtypes(node: Any) -> list[torch.dtype]:
    """The formats of what a node of autograd's graph has computed; without the name, none: then the
    precision of a run is not known from its loss."""
    return [each.dtype for each in getattr(node, "_input_metadata", ()) if each is not None]


def _has_no_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


is_functorch_tensor: Callable[[Tensor], bool] = _find(
    "torch._C._functorch.is_functorch_wrapped_tensor", _has_no_storage
)
"""Whether a tensor stands for many, as under vmap, and cannot be read."""

are_transforms_active: Callable[[], bool] = _find(
    "torch._C._are_functorch_transforms_active", lambda: True
)
"""Whether a transform of torch.func is running; True where nobody can say, which is slower."""
is_jit_tracing: Callable[[], bool] = _find("torch._C._is_tracing", getattr(torch.jit, "is_tracing"))  # noqa: B009 # untyped
"""Whether torch.jit.trace is running."""


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def _autocast_on_some_device() -> bool:
    return any(
        torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        for kind in _AUTOCAST_DEVICES
    )


is_autocast_enabled: Callable[[], bool] = _find(
    "torch._C._is_any_autocast_enabled", _autocast_on_some_device
)
"""Whether torch.autocast is on for any device."""

_no_torch_function: Any = _find("torch._C.DisableTorchFunction", contextlib.nullcontext)
dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", lambda: 0)
"""How many modes see the operators that are called, as those that count them; without the name they
see an optimizer's step on DTensors as one on what is in these."""
function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", lambda: 0)
"""How many modes stand in the way of torch's functions, as those of `gradilocks.emulate` and of
`torch.set_default_device`; without the name a replay does not notice that one is missing."""
seen_by_function_modes: Any = _find("torch._C._EnableTorchFunction", contextlib.nullcontext)
"""Inside, they do so also within `unseen_by_modes`; without the name a model that needs them cannot
be run once more."""
_without_modes: Any = _find(
    "torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext
)

DispatchMode: Any = _find("torch.utils._python_dispatch.TorchDispatchMode", contextlib.nullcontext)
"""The class of modes that see every operation of torch. Without it, a collective that a model
begins by an operation, and not by a process group, is not seen when one rank runs it once more."""


_set_gradients: Callable[[bool], Any] = _find("torch._C._set_grad_enabled", torch.set_grad_enabled)


class unseen_by_modes:  # noqa: N801 # As torch.no_grad is.
    """Inside, no mode and no tensor subclass of the script sees what is done to tensors, and
    autograd does not record it.

    Without the names it sees our own few operations, as a counter of FLOPs would. A class, and not
    a generator beside torch.no_grad(): it is entered several times a step, in 1 us instead of 4.
    """

    __slots__ = ("_functions", "_gradients", "_hidden")

    def __enter__(self) -> None:
        self._gradients, self._hidden = torch.is_grad_enabled(), None
        self._functions = _no_torch_function()
        self._functions.__enter__()
        if dispatch_modes():
            self._hidden = _without_modes()
            self._hidden.__enter__()
        _set_gradients(False)

    def __exit__(self, *error: object) -> None:
        _set_gradients(self._gradients)
        if self._hidden is not None:
            self._hidden.__exit__(*error)
        self._functions.__exit__(*error)


# --- torch.compile and checkpointing --------------------------------------------------------------

_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_disabled: Any = _find("torch._compile._disable_dynamo", torch.compiler.disable)
_set_strategy: Any = _find(f"{_EVAL_FRAME}.set_code_exec_strategy", None)
_Strategy: Any = _find(f"{_EVAL_FRAME}._FrameExecStrategy", None)
_Action: Any = _find(f"{_EVAL_FRAME}._FrameAction", None)


def uncompiled(function: Any) -> Any:
    """Decorates what must run as it is written, with all that it calls.

    The function itself comes back: its code is marked, once, as one that compiled code calls and
    does not look into. A wrapper that turns the compiler off and on again takes 0.5 us at each call
    (EPYC, torch 2.13), and imports the compiler at the first, which takes seconds. It serves where
    this torch has no such marks, and for a function that is a wrapper itself, whose code other
    functions share.
    """
    if None in (_set_strategy, _Strategy, _Action) or hasattr(function, "__wrapped__"):
        return _disabled(function)
    _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.SKIP))
    function._torchdynamo_disable = function._torchdynamo_disable_recursive = True
    function._torchdynamo_disable_msg = None
    return function


DYNAMO = "torch._dynamo"
"""The compiler's module; in `sys.modules` only if somebody has compiled something."""

CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
"""In torch.utils.checkpoint: what a checkpoint without re-entry is made by. If it goes, what such a
checkpoint computes again inside `gradilocks.emulate` is not emulated."""

COMPOSABLE_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"
"""The module that has the same function under a name of its own."""

CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
"""The module of ActivationWrapper. If it goes, a checkpointed module's parameters are named with
the wrapper's part."""

# --- optimizers and schedules ---------------------------------------------------------------------

AMP_FLAG = "_step_supports_amp_scaling"
"""Set on an optimizer that reads `grad_scale` and `found_inf` itself, as torch's fused ones do.
torch's GradScaler goes by it too, so there is nothing else to go by."""


BEGINS_GROUP = "_init_group"
"""What the steps of torch's Adam, AdamW and SGD call first for each group, to fill lists with its
tensors. Ours put a check there: without the name nobody would notice who calls torch's step on an
optimizer that was adopted; and fused steps on DTensors take their dispatch, which is slower."""


def note_stepped(optimizer: Any) -> None:
    """Tells torch's LR schedules that a step has come before them; else they warn."""
    optimizer._opt_called = True


def sees_steps(optimizer: Any) -> bool:
    """Whether a torch LR schedule is around this optimizer's step, and so knows of its steps."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def rewrapped_by_schedule(wrapper: FunctionType, step: Any) -> FunctionType | None:
    """What a torch LR schedule has put around an optimizer's step, around another step.

    Args:
        wrapper: its function, which has the step in a variable of the function around it.
        step: the function of the optimizer's class that it is to call.

    Returns:
        A function of its own; None where torch holds the step in another way.
    """
    wrapped, cells = wrapper.__dict__.get("__wrapped__"), wrapper.__closure__ or ()
    if wrapped is None or not any(cell.cell_contents is wrapped for cell in cells):
        return None
    closure = tuple(CellType(step) if cell.cell_contents is wrapped else cell for cell in cells)
    made = FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, closure
    )
    made.__dict__.update(wrapper.__dict__, __wrapped__=step)
    return made


def inner_schedules(scheduler: Any) -> Sequence[Any]:
    """Those that a SequentialLR or ChainedScheduler is made of; without the name, none.

    Then their optimizers are known by the schedule's own `optimizer` alone, which is the same one.
    """
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


_unknown_hooks: Mapping[Any, Any] = {"unknown": None}  # Not empty: somebody may be listening.
_every_pre_hook: Mapping[Any, Any] = _find(
    "torch.optim.optimizer._global_optimizer_pre_hooks", _unknown_hooks
)
_every_post_hook: Mapping[Any, Any] = _find(
    "torch.optim.optimizer._global_optimizer_post_hooks", _unknown_hooks
)


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Of an optimizer: who is called before and after each of its steps. Without the names somebody may
be, and steps are slower."""


def has_step_pre_hooks(optimizer: Any) -> bool:
    """Whether somebody is called before each step; True where nobody can say, which is slower."""
    own = getattr(optimizer, STEP_HOOKS[0], _unknown_hooks)
    return bool(own or _every_pre_hook)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether somebody is called before or after each step; True where nobody can say."""
    return any(step_hooks(optimizer))


def step_hooks(optimizer: Any) -> tuple[Mapping[Any, Any], ...]:
    """Who is called before and after each step of this optimizer, and of all optimizers."""
    own = [getattr(optimizer, name, _unknown_hooks) for name in STEP_HOOKS]
    return *own, _every_pre_hook, _every_post_hook


is_profiling: Callable[[], bool] = _find("torch._C._autograd._profiler_enabled", lambda: True)
"""Whether torch's profiler is on, which shows each step; True where nobody can say."""


def unhooked(step: Any) -> Any:
    """An optimizer's `step` without the hooks that torch has wrapped around it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# --- clip functions -------------------------------------------------------------------------------

_CLIPS = "torch.nn.utils.clip_grad"
_WRITERS = {
    "_clip_grads_with_norm_": "torch.nn.utils.clip_grads_with_norm_",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_value_": "torch.nn.utils.clip_grad_value_",
}
_sorts_gradients: Any = _find(f"{_CLIPS}._group_tensors_by_device_and_dtype", None)
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"

Noticed = Callable[[str, Sequence[Tensor], float], None]
"""Takes the name of a clip function as users know it, the gradients that it is about to write, and
its bound."""


def watch_clips(notice: Noticed) -> None:
    """From here on `notice` is called before a clip function of torch's writes to gradients.

    The functions themselves stay as they are: somebody may have imported, wrapped or pickled them.
    What is replaced is a function that each of them looks up in its module when it is called, and
    that gets the gradients: so nothing is read for it. Compiled code goes without. Where torch has
    no such function nobody is told, and training goes on.
    """
    _watch_torchs_clips(notice)
    _watch_fsdps_clip(notice)


def _watch_torchs_clips(notice: Noticed) -> None:
    module, real = sys.modules[_CLIPS], _sorts_gradients
    if real is None or getattr(module, real.__name__) is not real:  # It is being watched already.
        return

    @functools.wraps(real)
    def sorts(lists: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            writer = sys._getframe(1)
            name = _WRITERS.get(writer.f_code.co_name)  # And not who only measures.
            if name is not None:
                limits = [writer.f_locals.get(key) for key in ("max_norm", "clip_value")]
                limit = next((each for each in limits if isinstance(each, float)), 0.0)
                caller = writer.f_back
                while caller is not None and caller.f_globals is vars(module):
                    name = _WRITERS.get(caller.f_code.co_name, name)
                    caller = caller.f_back
                notice(name, lists[0], limit)
        return real(lists, *args, **kwargs)

    setattr(module, real.__name__, sorts)


def _watch_fsdps_clip(notice: Noticed) -> None:
    """FSDP1's models have a clip of their own, which measures their parameters first."""
    module = sys.modules.get(_FSDP1)
    measures: Any = getattr(module, "_get_grad_norm", None)
    if measures is None or hasattr(measures, "tells_of_clips"):
        return

    @functools.wraps(measures)
    def measure(params: Any, *args: Any, **kwargs: Any) -> Any:
        params = list(params)
        bound = sys._getframe(1).f_locals.get("max_norm")
        gradients = [param.grad for param in params if param.grad is not None]
        name = "FullyShardedDataParallel.clip_grad_norm_"
        notice(name, gradients, bound if isinstance(bound, float) else 0.0)
        return measures(params, *args, **kwargs)

    measure.tells_of_clips = True  # type: ignore[attr-defined]
    setattr(module, "_get_grad_norm", measure)  # noqa: B010


def script_for_caller(script: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.script` for whoever calls the function that calls this one.

    A class is compiled with the names that the caller's frame knows, found by counting frames. If
    this torch does not count them so, its own count stands, and such names are not found.
    """
    if "_frames_up" in inspect.signature(script).parameters:
        kwargs = {**kwargs, "_frames_up": kwargs.get("_frames_up", 0) + 2}
    return script(*args, **kwargs)


# --- GradScaler -----------------------------------------------------------------------------------

SCALER_ATTRIBUTES = (
    "_backoff_factor",
    "_check_inf_per_device",
    "_check_scale_growth_tracker",
    "_device",
    "_enabled",
    "_found_inf_per_device",
    "_get_growth_tracker",
    "_get_scale_async",
    "_growth_factor",
    "_growth_interval",
    "_growth_tracker",
    "_init_growth_tracker",
    "_init_scale",
    "_lazy_init_scale_growth_tracker",
    "_maybe_opt_step",
    "_per_optimizer_states",
    "_scale",
    "_unscale_grads_",
)
"""What torch's GradScaler calls its numbers and the methods that our subclass replaces. Frameworks
read and replace them too. Only `dropin/` may use them, on our own scaler."""


def _fresh_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


new_scaler_state: Callable[[], dict[str, Any]] = _find(
    "torch.amp.grad_scaler._refresh_per_optimizer_state", _fresh_state
)
"""What a scaler knows of an optimizer at the start of an iteration."""


def scale_of(scaler: Any) -> Tensor | None:
    """A scaler's scale on the device; None before its first loss, or if it keeps none there."""
    scale: Any = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else None


def scaler_state(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """What a scaler of torch's class knows of one optimizer: its stage, and a flag a device."""
    states: Any = scaler._per_optimizer_states
    state: dict[str, Any] = states[id(optimizer)]
    return state


# --- ranks ----------------------------------------------------------------------------------------


def is_flattened(param: Tensor) -> bool:
    """Whether FSDP1 has cut this parameter into shards that are plain tensors.

    If the mark goes, such a parameter is measured as a plain one; FSDP1 itself is going.
    """
    return bool(getattr(param, "_fsdp_flattened", False))


def root_mesh(mesh: Any) -> Any:
    """The DeviceMesh that `mesh` was sliced from; itself if from none, or if nobody knows."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is None:  # torch before 2.9
        module = sys.modules.get("torch.distributed.device_mesh")
        find = getattr(getattr(module, "_mesh_resources", None), "get_root_mesh", None)
        return mesh if find is None else find(mesh)
    return find()


COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Where torch keeps the operations by which ranks meet: a new one would go uncounted."""


def infers_metadata() -> bool:
    """Whether a pipeline's stage runs this code to learn of shapes, on memory nobody has written.

    If torch gives it another name, the loss of such a call is recorded as one of the first step's.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(6):  # The caller's own functions may lie in between.
        if frame is None:
            return False
        if frame.f_code.co_name == "_backward_metadata_inference":
            return True
        frame = frame.f_back
    return False


DTENSOR_PARTS = ("_local_tensor", "_spec", "mesh", "placements")
"""What C++ reads of a DTensor: the slots with this rank's elements and with its spec, and of a spec
the attributes that say how all elements lie. Without one of them Python walks over DTensors."""


def local_tensor(distributed: Any) -> Tensor | None:
    """This rank's elements of a DTensor, without autograd; None if only `to_local()` has them.

    Which takes 36 µs a tensor, as it records itself for a backward pass; this takes none. Elements
    that a collective is still bringing are no plain tensor, and `to_local()` waits for them.
    """
    local = getattr(distributed, "_local_tensor", None)
    return local if type(local) is Tensor and not local.requires_grad else None


def is_joining(model: object) -> bool:
    """Whether `DistributedDataParallel.join()` is at work, under which ranks stop at different
    steps.

    If the mark goes, a control that records waits there for ranks that have stopped.
    """
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


def device_kinds(group: Any) -> list[str]:
    """The kinds of devices that a process group has a backend for; empty if it does not say."""
    return [device.type for device in getattr(group, "_device_types", ())]


def groups_joined() -> int:
    """How many process groups this process is in; without the name 0, as if all ranks were alike.

    torch names a group that its own ranks make alone by this number.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return len(getattr(world, "pg_names", ()))


DEFAULT_GROUP = ("_world", "_default_pg")
"""Where torch.distributed.distributed_c10d has the default process group: in an attribute of the
first name, in an attribute of the second. Without them `is_initialized` is asked at every step."""
default_group: Callable[[Any], Any] = operator.attrgetter(".".join(DEFAULT_GROUP))
"""Of the module torch.distributed.distributed_c10d, the default process group, or None. Without the
name `is_initialized` is asked, which is four calls, and a step asks at every turn."""


def default_store() -> Any:
    """The store that the ranks of the default process group have met by.

    None where there is no group; without the name ranks under `gradilocks run` tell each other
    nothing, and a state that one data-parallel rank loads alone is not noticed.
    """
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    group = getattr(world, "default_pg", None)
    return getattr(world, "pg_map", {}).get(group, (None, None))[1]


# --- CUDA and Triton ------------------------------------------------------------------------------


def _stream_by_torch(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


current_device: Callable[[], int] = _find("torch._C._cuda_getDevice", torch.cuda.current_device)
"""The index of the current GPU; who asks has tensors on one."""
current_stream: Callable[[int], int] = _find("torch._C._cuda_getCurrentRawStream", _stream_by_torch)
"""A GPU's current stream as the driver knows it; torch.cuda.current_stream is ten times slower."""


is_capturing: Callable[[], bool] = _find(
    "torch._C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether a CUDA graph is captured on the current stream; who asks has used a GPU. torch's function
of that name is two calls more."""


def compile_kernel(kernel: Any, args: Sequence[Any], **options: Any) -> Any:
    """A kernel of triton.jit, compiled and loaded for these arguments, not run."""
    compiled = kernel.warmup(*args, grid=(1,), **options)
    compiled.run  # noqa: B018 (loads it, which fails if it needs too much of the device)
    return compiled


def short_launcher(compiled: Any, constants: Sequence[Any]) -> Callable[..., object]:
    """Runs what `compile_kernel` returned, without Triton's search for it, some 30 us a launch.

    The launcher takes its arguments by place, unchecked: in another order they are other addresses.
    So `kernels.triton_launch` uses this only where `constants_taken` has found the same order.

    Args:
        compiled: the kernel. It must live as long as what is returned.
        constants: the values of the kernel's constexpr arguments, in its own order, if it takes
            them: Triton 3.1 and 3.2 leave them out, later ones do not (seen up to 3.9).

    Returns:
        A function of the number of programs, the stream as `current_stream` has it, and the
        arguments: numbers and tensors. The launcher gets the addresses of these; for tensors it
        would ask the driver whose they are.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, *args: Any) -> None:
        taken = [arg if type(arg) is int else arg.data_ptr() for arg in args]
        run(programs, 1, 1, stream, function, metadata, None, None, None, *taken, *constants)

    return launch


def plain_launch(compiled: Any) -> tuple[int, int, int] | None:
    """The driver's function, threads a program and bytes of shared memory of a compiled kernel.

    None if a launch of it needs more than these: clusters, a cooperative grid, scratch memory.
    """
    told = getattr(compiled, "metadata", None)
    warps, shared = getattr(told, "num_warps", None), getattr(told, "shared", None)
    clusters = (getattr(told, "num_ctas", 1), *getattr(told, "cluster_dims", ()))
    needs = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if any(getattr(told, name, 0) for name in needs) or set(clusters) != {1}:
        return None
    if not isinstance(warps, int) or not isinstance(shared, int):
        return None
    return compiled.function, 32 * warps, shared


def seen_by_launcher(compiled: Any, launch: Callable[[], object]) -> tuple[Any, ...] | None:
    """Calls `launch`, which is to run `compiled` as Triton documents it, and notes what comes by.

    Returns:
        The arguments that Triton itself has handed to the launcher of `compiled`, in their order;
        None if it was not called just once, or takes arguments by name. Where there is no launcher
        to be found, None too.
    """
    seen: list[tuple[Any, ...] | None] = []
    with _noting:  # Or another thread would put our note back in place of the launcher.
        name = "_run" if "_run" in vars(compiled) else "run"  # The latter before Triton 3.4.
        launcher = vars(compiled).get(name)
        if launcher is None:
            launch()
            return None

        def note(*args: Any, **named: Any) -> Any:
            seen.append(None if named else args)
            return launcher(*args, **named)

        setattr(compiled, name, note)
        try:
            launch()
        finally:
            setattr(compiled, name, launcher)
    return seen[0] if len(seen) == 1 else None


_noting = threading.Lock()


def constants_taken(
    seen: tuple[Any, ...],
    compiled: Any,
    programs: int,
    stream: int,
    args: Sequence[Any],
    constants: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Whether a launcher takes its arguments in the order in which `short_launcher` has them.

    Args:
        seen: what Triton itself has handed over, for the same launch.
        compiled, programs, stream, args: of that launch; `args` with tensors, not addresses.
        constants: the values of the kernel's constexpr arguments.

    Returns:
        Those constants that belong behind `args`: all, or none before Triton 3.3. None if anything
        else is in another place.
    """
    where = (programs, 1, 1, stream, compiled.function, compiled.packed_metadata)
    first = len(where) + 3
    # Between them, for profilers: metadata and two hooks, which may be None.
    if any(isinstance(each, (int, float, str, tuple, list, Tensor)) for each in seen[6:first]):
        return None
    for behind in (constants, ()):
        if _same((*seen[:6], *seen[first:]), (*where, *args, *behind)):
            return behind
    return None


def _same(seen: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """Whether both hold the same objects, or equal ones of one type that is not Tensor."""
    return len(seen) == len(expected) and all(
        one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)
        for one, other in zip(seen, expected, strict=True)
    )


TRITON_NAMES = ("packed_metadata", "warmup")
"""What kernels of Triton are asked for here and nowhere else: not documented, though without an
underscore. Beside these `run`, `_run` and `function`, which are everybody's words."""

INSTANCE_NAMES = (
    "_backward_hooks",
    "_backward_metadata_inference",
    "_buffers",
    "_compiled_call_impl",
    "_default_pg",
    "_device_types",
    "_fsdp_flattened",
    "_get_grad_norm",
    "_get_root_mesh",
    "_indices",
    "_init_group",
    "_input_metadata",
    "_join_config",
    "_local_tensor",
    "_mesh_resources",
    "_modules",
    "_opt_called",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_parameters",
    "_post_accumulate_grad_hooks",
    "_register_hook_dict",
    "_schedulers",
    "_spec",
    "_step_supports_amp_scaling",
    "_values",
    "_version",
    "_world",
    "_wrapped_by_lr_sched",
)
"""The attributes of torch's objects that the functions here read, beside a scaler's."""
