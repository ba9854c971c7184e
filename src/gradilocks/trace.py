"""Search for the operation that produced the first NaN or Inf, with a dispatch mode that checks every operation.

with trace(model) as found:
    loss_fn(model(x), y).backward()
print(found.culprit)
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.torch_private import TorchDispatchMode

__all__ = [
    "Culprit",
    "Examiner",
    "NotReplayable",
    "Origin",
    "add_call_observer",
    "call_module",
    "culprit_from",
    "nonfinite_values",
    "remove_call_observer",
    "storage_key",
    "tensors_in",
    "trace",
]

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_FILLS = ("fill", "full", "where", "pad", "scalar_tensor")
"""Substrings of the names of operations that write a constant, which may be the Inf of a mask."""
_FROM_NUMBERS = "tensor from Python or NumPy"
_ABSORBS_NEGATIVE_INF = ("softmax", "logsumexp", "scaled_dot_product", "attention")
"""Substrings of the names of operations for which -inf is a mask."""


@dataclass(frozen=True)
class Culprit:
    """The origin of the first NaN or Inf of a step, or the reason why it is unknown."""

    known: bool
    text: str
    """One sentence."""
    value: str = ""
    """"NaN" or "Inf"."""
    operation: str = ""
    """Name of the torch operation; in backward also the autograd node, as in "div (SqrtBackward0)"."""
    module: str = ""
    """Qualified name of the module, parameter or buffer."""
    phase: str = ""
    """"forward" or "backward"."""
    source: str = ""
    """"operation", "data", "parameter", "buffer" or "script"."""
    inputs: tuple[dict[str, Any], ...] = ()
    """Inputs of the operation, up to three: dtype, shape, min, max and the number of zeros, NaN and Inf of each."""

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The culprit as a line of a run file; empty fields are left out."""
        return {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) not in ("", ())}


@dataclass(eq=False)
class Origin:
    """The place where a NaN or Inf appeared first."""

    order: int
    source: str
    value: str
    operation: str = ""
    module: str = ""
    phase: str = "forward"
    inputs: tuple[dict[str, Any], ...] = ()
    is_mask: bool = False
    """True for an Inf that is probably a mask: written by a fill operation, or in a tensor of 0 and -inf."""
    storage: int = 0
    """Key of the tensor's storage, if no examined operation produced the value."""


# --- calls of modules -------------------------------------------------------------------------------------------------

CallObserver = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]

call_module = nn.Module.__call__
"""torch's own `nn.Module.__call__`."""
_observers: list[CallObserver] = []


def _observed_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return _observers[-1](module, args, kwargs)


def add_call_observer(observer: CallObserver) -> None:
    """Routes every module call through `observer(module, args, kwargs)`, which must call `call_module`."""
    _observers.append(observer)
    nn.Module.__call__ = _observed_call  # type: ignore[method-assign]


def remove_call_observer(observer: CallObserver) -> None:
    """Removes an observer; without observers, module calls are torch's again."""
    _observers.remove(observer)
    if not _observers:
        nn.Module.__call__ = call_module  # type: ignore[method-assign]


def tensors_in(value: Any, *, is_attribute: bool = False) -> Iterator[Tensor]:
    """Finds all tensors in nested tuples, lists, mappings, dataclasses and distributions.

    Objects of other classes are searched, except for objects in their attributes.
    """
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, ModuleType)):
        is_transparent = is_dataclass(value) or isinstance(value, torch.distributions.Distribution)
        items = vars(value).values() if is_transparent or not is_attribute else ()
        is_attribute = is_attribute or not is_transparent
    for item in items:
        yield from tensors_in(item, is_attribute=is_attribute)


# --- operations -------------------------------------------------------------------------------------------------------


class NotReplayable(Exception):
    """Raised for a replay that would be wrong or would wait for other ranks."""


class _ThreadState(threading.local):
    """The position of one thread in a model."""

    modules: tuple[nn.Module, ...] = ()
    """Modules being called, outermost first."""
    node: tuple[nn.Module | None, str] | None = None
    """Module and name of the autograd node that runs."""


_thread = _ThreadState()


class Examiner(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows NaN and Inf from operation to operation, forward and backward.

    An operation produces NaN if its output contains NaN and no input does; likewise for Inf. A NaN computed from an
    Inf has the Inf's origin, unless the Inf is a mask.

    Args:
        names: the name of each module.
        allows_collectives: False to refuse operations that wait for other ranks.
    """

    def __init__(self, names: Mapping[nn.Module, str], *, allows_collectives: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self._allows_collectives = names, allows_collectives
        self.leaves: dict[int, tuple[str, str]] = {}
        """Source and name of parameters, buffers and inputs, by storage."""
        self.origins: dict[int, dict[str, Origin]] = {}
        """Origin of the NaN and of the Inf in each storage."""
        self.origins_of_leaves: list[Origin] = []
        """Origins that no examined operation produced."""
        self.written: set[int] = set()
        """Storages to which in-place operations wrote."""
        self._produced: set[int] = set()
        self._nodes: dict[Any, nn.Module | None] = {}
        self._count = 0
        self._is_backward = False
        self._in_hooks: list[Origin] = []

    def add_leaves(self, source: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Registers tensors that exist before the first operation."""
        for name, tensor in tensors:
            self.leaves.setdefault(storage_key(tensor), (source, name))

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """The earliest origin of a NaN or Inf in a tensor; None if it is finite."""
        found = [self._input_origin(tensor, value) for value in nonfinite_values(tensor)]
        return min(found, key=lambda origin: origin.order) if found else None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module, and assigns the autograd nodes that the call creates to it."""
        outer = _thread.modules
        self.label((args, kwargs), outer[-1] if outer else None)  # Created before this call.
        _thread.modules = (*outer, module)
        try:
            output = call_module(module, *args, **kwargs)
        finally:
            _thread.modules = outer
        self.label(output, module)
        return output

    def label(self, output: Any, module: nn.Module | None) -> None:
        """Assigns `module` to the autograd nodes behind `output` that have no module yet."""
        pending: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
        while pending:
            node = pending.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes[node] = module
            node.register_prehook(functools.partial(self._enter_node, module, node.name()))
            node.register_hook(lambda *_: self._leave_node())
            pending += [parent for parent, _ in node.next_functions]

    @contextlib.contextmanager
    def backward(self, outputs: Any) -> Iterator[None]:
        """Context for a backward pass from `outputs`."""
        self.label(outputs, None)
        outer, self._is_backward = self._is_backward, True
        try:
            yield
        finally:
            self._is_backward = outer
            self._leave_node()

    def _enter_node(self, module: nn.Module | None, name: str, grads: object) -> None:
        _thread.node = module, name
        # Hooks on a gradient run between two nodes, before the node that computed the tensor in forward.
        self.leave_hooks(module, f"hook on the gradient, before {name}")

    def leave_hooks(self, module: nn.Module | None, description: str, *grad: Tensor) -> None:
        """Completes the origins in hooks that have just run."""
        for origin in self._in_hooks:
            origin.module = self._name(module)
            origin.operation += f" ({description})"
        self._in_hooks.clear()

    def _leave_node(self) -> None:
        _thread.node = None

    def _name(self, module: nn.Module | None) -> str:
        return "" if module is None else self.names.get(module, type(module).__name__)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace in _COLLECTIVES and not self._allows_collectives:
            raise NotReplayable("the forward pass communicates with other ranks")
        inputs = list(tensors_in((args, kwargs)))
        before = [nonfinite_values(tensor) for tensor in inputs]
        if "batch_norm" in name and not any(arg is False for arg in args):  # Running statistics are only written.
            written = set(map(id, args[3:5]))
            before = [() if id(tensor) in written else v for tensor, v in zip(inputs, before, strict=True)]
        if name == "lift_fresh":  # `torch.tensor(nan)`, `x[i] = nan`, `torch.from_numpy`.
            name, before = _FROM_NUMBERS, [()]
        if name.endswith("_"):  # It overwrites its first input, so a copy is described.
            inputs = [tensor.clone() if i == 0 else tensor for i, tensor in enumerate(inputs)]
            keys = [storage_key(tensor) for tensor in tensors_in((args, kwargs))]
            self.written.update(keys[:1])
        else:
            keys = [storage_key(tensor) for tensor in inputs]
        out = func(*args, **kwargs)
        self._count += 1
        for tensor in tensors_in(out):
            self._note_output(tensor, name, inputs, keys, before)
        return out

    def _note_output(self, out: Tensor, name: str, inputs: list[Tensor], keys: list[int], before: list[Any]) -> None:
        key = storage_key(out)
        self._produced.add(key)
        if name.startswith(("empty", "new_empty")):  # Uninitialized memory may hold anything.
            self.origins.pop(key, None)
            return
        values = nonfinite_values(out)
        if not values:
            if out.is_sparse or out.numel() * out.element_size() >= out.untyped_storage().nbytes():
                self.origins.pop(key, None)
            return
        found: dict[str, Origin] = {}
        for value in values:
            parents = [
                self._input_origin(tensor, value, input_key)
                for tensor, input_key, input_values in zip(inputs, keys, before, strict=True)
                if value in input_values
            ]
            if value == "Inf" and name == "logsumexp" and all(origin.is_mask for origin in parents):
                parents = []  # A fully masked row.
            if not parents and value == "NaN" and not _is_masked_row(name, inputs, before):
                parents = [
                    origin
                    for tensor, input_key, input_values in zip(inputs, keys, before, strict=True)
                    if "Inf" in input_values and not (origin := self._input_origin(tensor, "Inf", input_key)).is_mask
                ]
            if parents:
                found[value] = min(parents, key=lambda origin: origin.order)
            else:
                found[value] = self._new_origin("operation", value, name, inputs)
                is_constant = name == _FROM_NUMBERS and (out.dim() == 0 or _is_mask(out))
                found[value].is_mask = value == "Inf" and (is_constant or any(part in name for part in _FILLS))
        self.origins[key] = {**self.origins.get(key, {}), **found} if len(values) < 2 else found

    def _input_origin(self, tensor: Tensor, value: str, key: int | None = None) -> Origin:
        """The origin of NaN or Inf in an input; a new one if no examined operation produced it."""
        key = storage_key(tensor) if key is None else key
        origins = self.origins.setdefault(key, {})
        if value not in origins:
            source, name = self.leaves.get(key, ("script", ""))
            if key in self._produced and key not in self.leaves:
                source, name = "kernel", ""
            origins[value] = self._new_origin(source, value, "", [tensor])
            origins[value].module = name or origins[value].module
            origins[value].storage = key
            self.origins_of_leaves.append(origins[value])
            origins[value].is_mask = value == "Inf" and source != "received" and _is_mask(tensor)
        return origins[value]

    def _new_origin(self, source: str, value: str, name: str, inputs: list[Tensor]) -> Origin:
        described = tuple(_describe(tensor) for tensor in inputs if tensor.is_floating_point())[:3]
        origin = Origin(self._count, source, value, operation=name, inputs=described)
        if _thread.modules:
            origin.module = self._name(_thread.modules[-1])
        elif _thread.node is not None:
            module, node = _thread.node
            origin.module, origin.phase = self._name(module), "backward"
            origin.operation = f"{name} ({node})" if name else node
        elif self._is_backward:
            origin.phase = "backward"
            self._in_hooks.append(origin)
        return origin


def storage_key(tensor: Tensor) -> int:
    """Address of a tensor's memory, which its views share."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # Sparse and other tensors without storage.
        return id(tensor)


def _plain(tensor: Tensor) -> Tensor | None:
    """The values of a tensor as a dense tensor that can be checked; None if there is nothing to check."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce().values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.jagged):
        tensor = tensor.detach().values()
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()


def nonfinite_values(tensor: Tensor) -> tuple[str, ...]:
    """The kinds of non-finite values in a tensor: "NaN", "Inf", both or neither."""
    plain = _plain(tensor)
    if plain is None or bool(torch.isfinite(plain).all()):
        return ()
    checks = (("NaN", torch.isnan), ("Inf", torch.isinf))
    return tuple(value for value, check in checks if bool(check(plain).any()))


def _is_masked_row(name: str, inputs: list[Tensor], before: list[Any]) -> bool:
    """True for softmax and similar operations if every Inf in the inputs is negative, as in masks."""
    if "backward" in name or not any(part in name for part in _ABSORBS_NEGATIVE_INF):
        return False
    return not any(bool(torch.isposinf(tensor).any()) for tensor, has in zip(inputs, before, strict=True) if has)


def _is_mask(tensor: Tensor) -> bool:
    plain = _plain(tensor)
    return plain is not None and bool((plain == 0).any() and ((plain == 0) | (plain == -math.inf)).all())


def _describe(tensor: Tensor) -> dict[str, Any]:
    described: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    plain = _plain(tensor)
    if plain is None or plain.is_complex():
        return described
    finite = plain[torch.isfinite(plain)]
    if finite.numel():
        described |= {"min": float(finite.min()), "max": float(finite.max()), "zeros": int((finite == 0).sum())}
    return described | {"nan": int(torch.isnan(plain).sum()), "inf": int(torch.isinf(plain).sum())}


_SOURCES = {
    "data": "{value} in {module}, from the data or the script's own code before the call",
    "computed": "first {value}: in the script's own code between two modules, passed on as {module}",
    "parameter": "{value} in parameter {module}, before this step's forward pass; the cause is earlier",
    "buffer": "{value} in buffer {module}, before this step's forward pass",
    "script": "{value} in a tensor that {where} uses and that is not a parameter, buffer or input",
    "kernel": "first {value}: in memory that {where} uses and no torch operation has written",
}


def culprit_from(origin: Origin) -> Culprit:
    where = origin.module or "the script's own code"
    if origin.source == "state":
        return Culprit(
            False, f"origin unknown: {origin.value} in a buffer or attribute ({where}) that the call itself changes"
        )
    if origin.source == "operation":
        text = f"first {origin.value}: {origin.operation} in {where} ({origin.phase})"
        shown = [_input_text(entry) for entry in origin.inputs]
        text += f"; input{'s' * (len(shown) > 1)} {', '.join(shown)}" if shown else ""
    else:
        text = _SOURCES[origin.source].format(value=origin.value, module=origin.module, where=where)
    source = {"kernel": "operation", "computed": "script"}.get(origin.source, origin.source)
    return Culprit(True, text, origin.value, origin.operation, origin.module, origin.phase, source, origin.inputs)


def _input_text(entry: dict[str, Any]) -> str:
    parts = [f"{entry['dtype']}{entry['shape']}"]
    if "min" in entry:
        parts.append(f"min {entry['min']:.4g}, max {entry['max']:.4g}")
    names = {"zeros": "zero" if entry.get("zeros") == 1 else "zeros", "nan": "NaN", "inf": "Inf"}
    parts += [f"{entry[key]} {name}" for key, name in names.items() if entry.get(key)]
    return ", ".join(parts)


# --- public interface -------------------------------------------------------------------------------------------------


class trace:  # noqa: N801 (used like a function)
    """Examines every operation in a `with` block, forward and backward, inside and outside of modules.

    Slow: each operation is checked on the host. After the block `culprit` is the origin of the first NaN or Inf that
    reached the loss or a gradient of the model, else of the first in any tensor; None if everything was finite.

    Args:
        model: provides the names of modules, and the gradients to check.

    Examples:
        >>> model = torch.nn.Linear(2, 2)
        >>> with trace(model) as found:
        ...     (model(torch.zeros(1, 2)) * 0).log().sum().backward()
        >>> found.culprit.operation, found.culprit.phase
        ('log', 'forward')
    """

    def __init__(self, model: nn.Module) -> None:
        self.culprit: Culprit | None = None
        self._model = model
        self._losses: list[Origin] = []
        names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self._examiner = Examiner(names, allows_collectives=True)
        self._examiner.add_leaves("parameter", model.named_parameters())
        self._examiner.add_leaves("buffer", model.named_buffers())
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> trace:
        originals: tuple[Any, Any] = torch.autograd.backward, torch.autograd.grad
        self._stack.callback(self._restore, originals)
        add_call_observer(self._examiner.call)
        torch.autograd.backward, torch.autograd.grad = map(self._with_labels, originals)
        self._stack.enter_context(self._examiner)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        grads = [param.grad for param in self._model.parameters() if param.grad is not None]
        found = [origin for grad in grads if (origin := self._examiner.origin_of(grad)) is not None]
        found += [origin for origin in self._losses if not origin.is_mask]
        found = found or [origin for pair in self._examiner.origins.values() for origin in pair.values()]
        if found:
            self.culprit = culprit_from(min(found, key=lambda origin: origin.order))

    def _with_labels(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            origins = map(self._examiner.origin_of, tensors_in((tensors,)))
            self._losses += [origin for origin in origins if origin is not None]
            with self._examiner.backward(tensors):
                return original(tensors, *args, **kwargs)

        return run

    def _restore(self, originals: tuple[Any, Any]) -> None:
        torch.autograd.backward, torch.autograd.grad = originals
        remove_call_observer(self._examiner.call)
