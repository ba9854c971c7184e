"""Hooks on models, for as long as an audit lasts: gradients and outputs enter, an Audit leaves.

The gradient of a parameter is taken as a backward pass makes it, before it is added to others,
clipped or unscaled: that is what is stored in the format. The gradient of a module's output is
taken by a hook on the tensor, not on the module: torch's module hooks put views around tensors,
and an in-place module behind one would raise.

Of a forward pass it is noted how large each module's output is, because a format can be too narrow
for the outputs as well, and no loss scale helps there; and which module takes it up, because the
gradient of an output is computed by whoever took the output: to keep that gradient out of a format,
both have to be kept out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.lab.audit.counting import Tally, read
from gradilocks.lab.audit.result import Audit
from gradilocks.lab.audit_record import Histogram, ModuleGradients, Outputs
from gradilocks.lab.emulate import emulated_format
from gradilocks.lab.formats import Format
from gradilocks.lab.trace.magnitudes import tensors_in
from gradilocks.observe.looking import elements
from gradilocks.observe.naming import name_modules

__all__ = ["Listener", "gather", "is_unit", "stands_for_many"]

_MARK = "gradilocks.module"  # In the metadata of the node of the graph that made an output.
_MOST_NODES = 64  # Looked at, at most, between a module's input and another's output.
_LARGEST = torch.finfo(torch.float32).max


# --- private names of torch ----------------------------------------------------------------------


def stands_for_many(tensor: Tensor) -> bool:
    """Whether it is a tensor inside `torch.func.vmap` or the like, whose values cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def version_of(tensor: Tensor) -> int:
    """torch's count of the writes into a tensor; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def hooks_after_accumulation(parameter: Tensor) -> dict[int, Any] | None:
    """The hooks that run when a parameter's gradient is added up, by their number; None without."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


# --- listening -----------------------------------------------------------------------------------


class Listener:
    """Counts the gradients of the modules and parameters that it is told of.

    Attributes:
        outputs: by module: the gradients of what it returned, in the order of the first calls.
        parameters: by parameter: its gradients.
        flow: what the forward passes show.
        scale: what the gradients of the coming backward passes are to be divided by.
    """

    def __init__(self) -> None:
        self.outputs: dict[int, tuple[weakref.ref[nn.Module], Tally]] = {}
        self.parameters: dict[int, tuple[weakref.ref[Tensor], Tally]] = {}
        self.flow = OutputFlow()
        self.scale: Tensor | float = 1.0
        self.divided: Tensor | float = 1.0
        """The last scale other than 1 that gradients carried."""
        self.autocast: set[torch.dtype] = set()
        """What torch.autocast computed in, if it was on in a forward pass."""
        self.emulated: set[str] = set()
        """The same of `gradilocks.emulate`."""
        self.dtypes: set[torch.dtype] = set()
        """Of the gradients that came."""
        self.guard: Callable[[Callable[[], None]], None] = lambda act: act()
        """Does our own work inside a backward pass."""
        self._handles: list[Any] = []
        self._done = False

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Puts hooks on modules and their parameters."""
        for module in modules:
            if is_unit(module) and not isinstance(module, torch.jit.ScriptModule):
                # One by one: if the second cannot be put on, the first is removed.
                before = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
                self._handles.append(before)
                self._handles.append(module.register_forward_hook(self.after_forward))
            self.follow_parameters(module.parameters(recurse=False))

    def follow_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Puts hooks on those that have none yet, and returns them."""
        fresh = [p for p in parameters if p.requires_grad and not self.knows(p)]
        for parameter in fresh:
            tally = Tally()
            self.parameters[id(parameter)] = weakref.ref(parameter), tally
            if parameter.is_leaf:
                hook = self._counts(tally)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        return fresh

    def carry(self, scale: Tensor | float) -> None:
        """The gradients of the coming backward passes carry this scale."""
        self.scale = scale.detach().clone() if isinstance(scale, Tensor) else scale
        self.divided = self.scale

    def count(self, parameter: Tensor, *, scale: Tensor | float) -> None:
        """Counts the gradient that a parameter has, for one that had no hook in time."""
        if parameter.grad is not None:
            self._add(self.parameters[id(parameter)][1], parameter.grad, scale)

    def knows(self, parameter: Tensor) -> bool:
        """Whether this parameter has a hook."""
        known = self.parameters.get(id(parameter))
        return known is not None and known[0]() is parameter

    def remove(self) -> None:
        """Takes every hook away; those on tensors do nothing from here on."""
        self._done = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_forward(self, module: nn.Module, given: Any) -> None:
        """A unit is called."""
        if not (self._done or torch.compiler.is_compiling()):
            self.flow.entering(module, given)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.before_forward(module, (args, kwargs))

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """A unit has returned: the gradients of its tensors will be counted."""
        if self._done or torch.compiler.is_compiling():
            return
        self.flow.leaving(module, args, output)
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not tensors:
            return
        known = self.outputs.get(id(module))
        if known is None or known[0]() is not module:
            known = self.outputs[id(module)] = weakref.ref(module), Tally()
        if (format := emulated_format()) is not None:
            self.emulated.add(format.dtype or format.name)
        for tensor in tensors:
            kind = tensor.device.type
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                self.autocast.add(torch.get_autocast_dtype(kind))
            if not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
                tensor.register_hook(self._counts(known[1]))  # type: ignore[no-untyped-call]

    @property
    def precision(self) -> str:
        """What the gradients were computed in."""
        if self.autocast:
            return f"{_joined(self.autocast)} autocast"
        if self.emulated:
            return f"{' and '.join(sorted(self.emulated))}, emulated"
        return _joined(self.dtypes) or "float32"

    def _counts(self, tally: Tally) -> Callable[[Tensor], None]:
        def count(gradient: Tensor | None) -> None:
            if gradient is not None and not self._done:  # A backward of one's own may return None.
                self.guard(lambda: self._add(tally, gradient, self.scale))

        return count

    def _add(self, tally: Tally, gradient: Tensor, scale: Tensor | float) -> None:
        self.dtypes.add(gradient.dtype)
        tally.add(gradient, scale=scale)


class OutputFlow:
    """How large the outputs of modules are, and which modules take them.

    Attributes:
        called: the modules, by their id.
        takers: by the id of a module, those of the modules that took what it returned: the very
            tensor, or else, if functions came between, what the first of them got of it.
    """

    def __init__(self) -> None:
        self.called: dict[int, weakref.ref[nn.Module]] = {}
        self.takers: dict[int, dict[int, None]] = {}
        self._sizes: dict[int, dict[torch.device, Tensor]] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], set[int]]] = {}

    def entering(self, module: nn.Module, given: Any) -> None:
        """A module was called with these."""
        taker = self._key(module)
        for tensor in _tensors(given):
            makers = self._makers(tensor)
            for maker in makers:
                self.takers.setdefault(maker, {})[taker] = None
            for maker in () if makers else _behind(tensor.grad_fn):
                if maker in self.called:
                    self.takers.setdefault(maker, {taker: None})

    def leaving(self, module: nn.Module, given: Any, output: Any) -> None:
        """A module has returned."""
        maker = self._key(module)
        before = {id(tensor) for tensor in _tensors(given)}
        for tensor in _tensors(output):
            self._measure(maker, tensor)
            # A tensor that was changed in place comes from here alone; one that an inner module
            # returned to this one comes from both.
            makers = set() if id(tensor) in before else self._makers(tensor)
            self._remember(tensor, makers | {maker})

    def largest(self) -> dict[int, tuple[float, int]]:
        """By module, the largest finite magnitude of its outputs, and how many were not finite."""
        found: dict[int, tuple[float, int]] = {}
        for device in {device for sizes in self._sizes.values() for device in sizes}:
            keys = [key for key, sizes in self._sizes.items() if device in sizes]
            rows = torch.stack([self._sizes[key][device] for key in keys]).tolist()
            for key, (most, bad) in zip(keys, rows, strict=True):
                other = found.get(key, (0.0, 0))
                found[key] = max(most, other[0]), int(bad) + other[1]
        return found

    def _key(self, module: nn.Module) -> int:
        known = self.called.get(id(module))
        if known is None or known() is not module:
            self.called[id(module)] = weakref.ref(module)
            self.takers.pop(id(module), None)
            self._sizes.pop(id(module), None)
        return id(module)

    def _makers(self, tensor: Tensor) -> set[int]:
        ref, makers = self._made.get(id(tensor), (None, set()))
        return makers if ref is not None and ref() is tensor else set()

    def _remember(self, tensor: Tensor, makers: set[int]) -> None:
        key, made = id(tensor), self._made
        made[key] = weakref.ref(tensor, lambda _: made.pop(key, None)), makers
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_MARK] = makers

    @torch.no_grad()
    def _measure(self, maker: int, tensor: Tensor) -> None:
        if stands_for_many(tensor):
            return
        values = elements(tensor.detach())
        if values is None or not values.numel() or not tensor.dim():
            return  # A single number is a loss, which is kept in float32.
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        home = values.device
        sizes = self._sizes.setdefault(maker, {})
        if home not in sizes:
            sizes[home] = torch.zeros(2, dtype=torch.float32, device=home)
        row = sizes[home]
        least, most = torch.aminmax(values)
        if home.type == "cpu" and least.isfinite() and most.isfinite():  # One pass is enough.
            row[0] = max(float(row[0]), min(max(-float(least), float(most)), _LARGEST))
            return
        finite = values.isfinite()
        size = torch.where(finite, values, 0.0).abs().amax()
        size = size.clamp(max=_LARGEST) if size.dtype is torch.float64 else size
        row[0] = torch.maximum(row[0], size.float())
        row[1] += (~finite).sum()


def is_unit(module: nn.Module) -> bool:
    """Whether a module is one that computes: without parts, or with parameters of its own.

    A parametrized module (weight_norm and the like) is one, too: its parts make its weight.
    """
    parts = [name for name, _ in module.named_children() if name != "parametrizations"]
    return not parts or next(module.parameters(recurse=False), None) is not None


def _tensors(things: Any) -> Iterator[Tensor]:
    yield from {id(tensor): tensor for _, tensor in tensors_in(things, "")}.values()


def _behind(node: Any) -> Iterable[int]:
    """The modules whose outputs a tensor was made of by functions alone."""
    waiting: list[Any] = [node]
    seen: set[Any] = set()
    found: dict[int, None] = {}
    while waiting and len(seen) < _MOST_NODES:
        one = waiting.pop(0)
        if one is None or one in seen:
            continue
        seen.add(one)
        makers = getattr(one, "metadata", {}).get(_MARK)
        if makers:
            found.update(dict.fromkeys(makers))
        else:
            waiting += [before for before, _ in one.next_functions]
    return found


# --- the end of an audit -------------------------------------------------------------------------


def gather(
    listener: Listener,
    models: Sequence[nn.Module],
    *,
    steps: int,
    formats: Sequence[Format],
    others: Mapping[Tensor, str] | None = None,
    reachable: bool = False,
) -> Audit:
    """Brings the counts to the host, once, and judges them.

    Args:
        listener: with its hooks taken away.
        models: the outermost modules; what is in none of them is left out.
        steps: how many steps were seen.
        formats: to be judged.
        others: parameters that are in no module, with their names.
        reachable: whether the one model's `get_submodule` must take the names.
    """
    parts = {id(part): part for model in models for part in model.modules()}
    names = _names(models, reachable=reachable)
    outputs = {
        key: tally
        for key, (ref, tally) in listener.outputs.items()
        if key in parts and ref() is parts[key]
    }
    homes = _homes(models)
    owned: dict[int, list[Tally]] = {}
    seen: set[int] = set()
    for key, module in parts.items():
        for param in module.parameters(recurse=False):
            if id(param) not in seen and listener.knows(param):
                seen.add(id(param))
                owned.setdefault(homes[key], []).append(listener.parameters[id(param)][1])
    for other, name in (others or {}).items():
        if id(other) not in seen and listener.knows(other):
            owned.setdefault(id(other), []).append(listener.parameters[id(other)][1])
            names[id(other)] = name
    called = [key for key in listener.flow.called if key in parts]
    counted = iter(read([*outputs.values(), *(one for many in owned.values() for one in many)]))
    activations = {key: next(counted) for key in outputs}
    parameters = {key: Histogram.total(next(counted) for _ in owned[key]) for key in owned}
    returned = _returned(listener.flow, parts, names)
    modules = [
        ModuleGradients(
            names[key],
            type(parts[key]).__name__ if key in parts else "Parameter",
            _unless_empty(parameters.get(key)),
            _unless_empty(activations.get(key)),
            returned.get(key),
        )
        for key in dict.fromkeys([*outputs, *owned, *called])
    ]
    narrowest = min((format.largest for format in formats), default=_LARGEST)
    return Audit.of(
        [
            module
            for module in modules
            # It has gradients, or returns what one of the formats cannot hold.
            if module.parameters is not None
            or module.activations is not None
            or (module.outputs is not None and module.outputs.largest > narrowest)
        ],
        steps=steps,
        formats=formats,
        precision=listener.precision,
        loss_scale=float(listener.divided),
    )


def _names(models: Sequence[nn.Module], *, reachable: bool) -> dict[int, str]:
    """The name of every module of these models, by its id; the only place that names modules.

    If they must be `reachable`, they are those that `get_submodule` of the one model takes: with
    the wrapper's part, where it needs one.
    """
    names = name_modules(models)
    for real, module in models[0].named_modules() if reachable else ():
        try:
            found = models[0].get_submodule(names[id(module)])
        except (AttributeError, RuntimeError):  # The latter from a ScriptModule.
            found = None
        if found is not module:
            names[id(module)] = real
    return names


def _homes(models: Sequence[nn.Module]) -> dict[int, int]:
    """By module, the one that computes with its parameters: itself, nearly always.

    A parametrization makes the weight of the module that it is in, and an nn.MultiheadAttention
    computes with its out_proj without calling it.
    """
    homes: dict[int, int] = {}

    def visit(module: nn.Module, home: nn.Module) -> None:
        if id(module) in homes:
            return
        homes[id(module)] = id(home)
        within = home is not module or isinstance(module, nn.MultiheadAttention)
        for name, child in module.named_children():
            visit(child, home if within or name == "parametrizations" else child)

    for model in models:
        visit(model, model)
    return homes


def _returned(
    flow: OutputFlow, parts: Mapping[int, nn.Module], names: Mapping[int, str]
) -> dict[int, Outputs]:
    found: dict[int, Outputs] = {}
    for key, (largest, nonfinite) in flow.largest().items():
        if key not in parts or flow.called[key]() is not parts[key]:
            continue
        takers = [one for one in flow.takers.get(key, ()) if one in parts and one != key]
        # A module that hands its input on to a part of its own does not compute with it.
        nearest = [
            one
            for one in takers
            if not any(id(part) in takers for part in parts[one].modules() if id(part) != one)
        ]
        found[key] = Outputs(largest, nonfinite, tuple(names[one] for one in nearest))
    return found


def _unless_empty(histogram: Histogram | None) -> Histogram | None:
    if histogram is None or not (histogram.values or histogram.zeros or histogram.nonfinite):
        return None
    return histogram


def _joined(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
