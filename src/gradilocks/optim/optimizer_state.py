"""What an optimizer keeps of its parameters: checked, laid out for kernels, watched for changes.

A kernel sees addresses. What lies elsewhere, in another order or in another dtype than it was told
would be read as something else, so whatever somebody has put into the state (offloaded, loaded,
reset by hand) is looked at here before its address is sent; what cannot be stepped is refused by
the parameter's name before anything is changed.

float32 masters of half-precision parameters are kept under "master". A step of 1e-4 is lost on a
bfloat16 weight of 1: the next number is 8e-3 away. The master takes it, and the parameter is the
master rounded.
"""

from __future__ import annotations

import numbers
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import version
from gradilocks.kernels import pieces
from gradilocks.kernels.chunks import DTYPES
from gradilocks.ranks.layout import is_distributed, lie_alike, local_of, placed_like

__all__ = [
    "HALF",
    "Changes",
    "Marks",
    "OptimizerState",
    "arrange",
    "check_gradients",
    "check_group",
    "check_memory",
    "check_settings",
    "check_step",
    "ensure_master",
    "follow_parameters",
    "mark",
    "moments_dtype",
    "needs_master",
    "place_state",
    "plain_state",
    "restore_masters",
    "same_order",
]

_Name = Callable[[Tensor], str]
HALF = (torch.float16, torch.bfloat16)
_HAVE_KERNELS = "float32, float16, bfloat16 and float64 have kernels"

# --- what is refused ------------------------------------------------------------------------------


def check_group(group: dict[str, Any], name: _Name) -> None:
    """Refuses a new group of parameters that could not be stepped."""
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True was given, and a fused step cannot be differentiated through. "
            "Leave it out, or use torch.optim's optimizer of the same name with fused=False."
        )
    params = group["params"]
    check_parameters(params, name)
    if params:
        # A model on the CPU may be moved before its first step.
        device = params[0].device
        device = None if device.type in ("cpu", "meta") else device
        check_settings(group, device, name, params[0])


def check_parameters(params: Iterable[Tensor], name: _Name) -> None:
    """Refuses a parameter of a dtype for which there is no kernel."""
    for param in params:
        if param.dtype not in DTYPES:
            raise TypeError(
                f"{name(param)} is {param.dtype}; {_HAVE_KERNELS}. "
                "Give it to an optimizer of torch.optim in a list of its own."
            )


def check_settings(
    group: dict[str, Any], device: torch.device | None, name: _Name, param: Tensor
) -> None:
    """Refuses a learning rate or another setting that is a tensor no kernel can read.

    Args:
        group: of parameters.
        device: where they are; None if they may still move.
        name: tells a parameter's name, for the error message.
        param: one of the group.
    """
    for key in ("lr", "weight_decay", "eps", "momentum", "dampening"):
        value = group.get(key, 0.0)
        if not isinstance(value, Tensor):
            if not isinstance(value, numbers.Real):
                raise TypeError(
                    f"the {key} of {name(param)} is {value!r}, expected a number or a tensor with "
                    "one element."
                )
            continue
        if not value.is_floating_point():
            raise TypeError(
                f"the {key} of {name(param)} is a tensor of {value.dtype}, expected a floating "
                f"dtype. Use torch.tensor({key}, dtype=torch.float32)."
            )
        if value.numel() != 1:
            raise ValueError(
                f"the {key} of {name(param)} is a tensor of shape {tuple(value.shape)}, expected "
                "one number. Give parameters with another one a group of their own."
            )
        if device is not None and value.device.type != "cpu" and value.device != device:
            raise ValueError(
                f"the {key} of {name(param)} is a tensor on {value.device}, its parameter is on "
                f"{device}. Put it on that device or on the CPU."
            )


def check_gradients(params: Iterable[Tensor], name: _Name) -> None:
    """Refuses a gradient with which neither the kernels nor torch's fused optimizers can step."""
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.device != param.device:
            raise ValueError(
                f"the gradient of {name(param)} is on {grad.device}, the parameter on "
                f"{param.device}. Move the model before the first backward(), or clear the "
                "gradients after moving it."
            )
        if grad.shape != param.shape:
            raise ValueError(
                f"the gradient of {name(param)} has shape {tuple(grad.shape)}, the parameter "
                f"{tuple(param.shape)}. Clear the gradients after changing a parameter's shape."
            )
        if grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {name(param)} has layout {grad.layout}; only dense gradients "
                "can be stepped here. Use torch.optim.SparseAdam or torch.optim.SGD for it."
            )
        if grad.dtype not in DTYPES:
            raise TypeError(
                f"the gradient of {name(param)} is {grad.dtype}; {_HAVE_KERNELS}. Cast it, or give "
                "the parameter to an optimizer of torch.optim in a list of its own."
            )


def check_step(
    optimizer: Any, params: Sequence[Tensor], groups: Sequence[dict[str, Any]], name: _Name
) -> None:
    """Refuses parameters, settings and state with which no kernel can step, before any is changed.

    Args:
        optimizer: one of ours.
        params: those with a gradient.
        groups: the group of each.
        name: tells a parameter's name, for the error message.
    """
    seen: set[int] = set()
    for param, group in zip(params, groups, strict=True):
        if id(group) not in seen:
            seen.add(id(group))
            check_settings(group, param.device, name, param)
    check_parameters(params, name)
    for param in params:
        state = optimizer.state.get(param) or {}
        for column in (*optimizer.columns, "master"):
            tensor = state.get(column)
            if tensor is not None and tensor.shape != param.shape:
                raise ValueError(
                    f"{name(param)} has shape {tuple(param.shape)} and its {column!r} has shape "
                    f"{tuple(tensor.shape)}. Put a {column!r} of the parameter's shape into "
                    "optimizer.state, or delete the parameter's entry to begin afresh."
                )
            if tensor is not None and not pieces.has_memory(local_of(tensor)):
                raise ValueError(
                    f"the {column!r} of {name(param)} has no memory: its storage has been freed or "
                    "made smaller. Bring it back before the step, or delete the parameter's entry "
                    "in optimizer.state to begin afresh."
                )
        check_memory(param, name)


def check_memory(param: Tensor, name: _Name) -> None:
    """Refuses a parameter whose elements are not all there: kernels would write elsewhere."""
    if not pieces.has_memory(local_of(param)):
        raise ValueError(
            f"{name(param)} has no memory: its storage has been freed or made smaller, as by "
            "untyped_storage().resize_(0). Bring it back before the step."
        )


# --- how it lies on the ranks, and in memory ------------------------------------------------------


def place_state(optimizer: Any, params: Sequence[Tensor], name: _Name) -> None:
    """Brings state that lies otherwise on the ranks than its DTensor to where that lies.

    Such as state that was loaded after the parameter had been distributed in another way. Kernels
    see this rank's elements alone, and would take them for others.

    Args:
        optimizer: one of ours.
        params: those with a gradient.
        name: tells a parameter's name, for the error message.
    """
    for param in params:
        if is_distributed(param):
            state = optimizer.state.get(param) or {}
            for column in (*optimizer.columns, "master"):
                tensor = state.get(column)
                if tensor is not None and not lie_alike(param, tensor):
                    what = f"{column!r} in the state of {name(param)}"
                    state[column] = placed_like(param, tensor, what)


def same_order(param: Tensor, other: Tensor) -> bool:
    """Whether both are dense and lie in memory in the same order."""
    if param.is_contiguous() and other.is_contiguous():
        return True
    if param.shape != other.shape or not pieces.is_dense(param):
        return False
    # How far the next element is in a dimension of one does not matter.
    strides = zip(param.shape, param.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == its for size, mine, its in strides)


def moments_dtype(param: Tensor, state: dict[str, Any], columns: Sequence[str]) -> torch.dtype:
    """The dtype of the moments if they agree, else the parameter's."""
    found: set[torch.dtype] = {state[name].dtype for name in columns if state.get(name) is not None}
    return found.pop() if len(found) == 1 and found <= set(DTYPES) else param.dtype


def arrange(
    body: Tensor,
    state: dict[str, Any],
    columns: Sequence[str],
    *,
    dtype: torch.dtype,
    contiguous: bool = False,
) -> None:
    """Replaces what does not lie as `body` does, or is not of `dtype`.

    Args:
        body: the parameter, or what is stepped in its place.
        state: of one parameter.
        columns: the names of its moments; a master is always float32.
        dtype: of the moments.
        contiguous: if true, everything is to be contiguous instead.
    """
    for name in (*columns, "master"):
        tensor = state.get(name)
        if tensor is None:
            continue
        wanted = torch.float32 if name == "master" else dtype
        made = tensor.to(body.device, wanted)
        if contiguous:
            made = made.contiguous()
        elif not same_order(body, made):
            made = torch.empty_like(body, dtype=wanted).copy_(made)
        if made is not tensor:
            state[name] = made


# --- float32 masters ------------------------------------------------------------------------------

Marks = dict[Tensor, tuple[int, int]]
"""By parameter: its version and its address when it was last its master rounded."""


def needs_master(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether this parameter is stepped through a float32 master."""
    return bool(group["master_weights"]) and param.dtype in HALF


def mark(param: Tensor) -> tuple[int, int]:
    """Changes when somebody writes to the parameter, or gives it other storage."""
    plain = type(param) in (Tensor, torch.nn.Parameter)
    return version(param), param.data_ptr() if plain else 0


def ensure_master(param: Tensor, state: dict[str, Any], marks: Marks) -> None:
    """Makes a master, or lets the one that is there follow what was written to its parameter."""
    now = mark(param)
    master = state.get("master")
    if master is None:
        state["master"] = param.detach().float()
    elif marks.get(param) != now:
        if master.device != param.device or master.dtype is not torch.float32:
            master = state["master"] = master.to(param.device, torch.float32)
        follow_parameters([param], [master])
    marks[param] = now


def follow_parameters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Takes over what somebody has written to the parameters, such as loaded weights.

    Where a parameter is still its master rounded, the master stays as exact as it is.
    """
    for param, master in zip(params, masters, strict=True):
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))


def restore_masters(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Puts back what torch's `load_state_dict` has rounded to the parameters' dtype."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, param in zip(saved, params, strict=True):
        entries = state_dict["state"].get(key, {})
        if "master" not in entries:
            continue
        for name, value in entries.items():
            if isinstance(value, Tensor) and name != "step":
                # A copy: torch hands over what it does not have to convert.
                optimizer.state[param][name] = value.detach().to(param.device, copy=True)


# --- state that tells of its changes --------------------------------------------------------------


class Changes:
    """Calls one function, once, before the state of one optimizer changes.

    Addresses of the state's tensors have been sent to the device. Whoever puts another tensor into
    the state (loads it, offloads it, resets it) must be noticed before the next step, and looking
    into 2,000 dictionaries at every step would take as long as the rest of it.
    """

    def __init__(self) -> None:
        self._before: weakref.WeakMethod[Callable[[], None]] | None = None

    def tell(self, before: Callable[[], None]) -> None:
        """From now on calls this method alone. Weakly: its object may hold the state."""
        self._before = weakref.WeakMethod(before)

    def note(self) -> None:
        """Something is about to change."""
        before = None if self._before is None else self._before()
        if before is not None:
            self._before = None
            before()


class _ParameterState(dict[str, Any]):
    def __init__(self, changes: Changes, entries: dict[str, Any]) -> None:
        self.changes = changes
        super().__init__(entries)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class OptimizerState(defaultdict[Any, Any]):
    """The state of all parameters, each a dictionary; every write to one of them is noted."""

    def __init__(self, changes: Changes, states: dict[Any, Any]) -> None:
        self.changes = changes
        watched = {
            key: _ParameterState(changes, entries)
            if type(entries) in (dict, _ParameterState)
            else entries
            for key, entries in states.items()
        }
        super().__init__(dict, watched)

    def __missing__(self, key: Any) -> _ParameterState:
        entries = _ParameterState(self.changes, {})
        self[key] = entries
        return entries

    def watch(self, key: Any) -> _ParameterState:
        """The state of one parameter, watched from here on."""
        entries = self[key]
        if type(entries) is not _ParameterState or entries.changes is not self.changes:
            entries = _ParameterState(self.changes, entries)
            self[key] = entries
        return entries

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def copy(self) -> Any:
        """A plain one, that nobody watches."""
        return defaultdict(dict, self)

    __copy__ = copy


def _noting(name: str, base: type) -> Any:
    method = getattr(base, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.note()
        return method(self, *args, **kwargs)

    return changed


for _name in (
    "__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update",
):  # fmt: skip
    setattr(_ParameterState, _name, _noting(_name, dict))
    setattr(OptimizerState, _name, _noting(_name, defaultdict))


def plain_state(states: dict[Any, Any]) -> dict[Any, Any]:
    """The same as dictionaries that a checkpoint may hold, without the empty ones."""
    return {
        key: dict(entries) if isinstance(entries, _ParameterState) else entries
        for key, entries in states.items()
        if not isinstance(entries, _ParameterState) or entries
    }
