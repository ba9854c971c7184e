"""Hooks on models, for as long as an audit lasts: gradients and outputs enter, counts leave.

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

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradilocks._torch import drop_empty_hooks, is_flattened, is_functorch_tensor
from gradilocks.lab.audit.counted import Counted
from gradilocks.lab.audit.counting import Tally, read, rows_read, values_of
from gradilocks.lab.audit_record import Histogram, ModuleGradients, Outputs
from gradilocks.lab.emulate import emulated_format
from gradilocks.lab.tensors import anchor, tensors_in
from gradilocks.names import name_modules
from gradilocks.ranks.layout import is_distributed

__all__ = ["Listener", "gather", "is_unit"]

_MARK = "gradilocks.module"  # In the metadata of the node of the graph that made an output.
_MOST_NODES = 64  # Looked at, at most, between a module's input and another's output.
_LARGEST = torch.finfo(torch.float32).max


# --- listening -----------------------------------------------------------------------------------


@dataclass
class _Unit:
    """A module that computes, and what was seen of it."""

    module: weakref.ref[nn.Module]
    gradients: Tally | None = None
    """Of what it returned; None as long as nothing of that required a gradient."""
    sizes: dict[torch.device, Tensor] = field(default_factory=dict)
    """By device: the largest finite magnitude that it returned, and how many were not finite."""
    takers: dict[int, None] = field(default_factory=dict)
    """The ids of the modules that took what it returned: the very tensor, or else, if functions
    came between, what the first of them got of it."""


class Listener:
    """Counts the gradients of the modules and parameters that it is told of.

    Parameters have hooks only while a backward pass runs, and what is known of one is kept by its
    module and name: `torch.utils.swap_tensors` refuses a tensor that has a weak reference, and
    leaves the tensor's hooks behind.

    Attributes:
        units: by the id of a module, in the order in which they first returned.
        unowned: parameters of no module that was seen, with their gradients.
        scale: what the gradients of the coming backward passes are to be divided by.
    """

    def __init__(self) -> None:
        self.units: dict[int, _Unit] = {}
        self.unowned: dict[Tensor, Tally] = {}
        self._owned: WeakKeyDictionary[nn.Module, dict[str, Tally]] = WeakKeyDictionary()
        """The gradients of a module's own parameters, by their names."""
        self._hooked: dict[int, Tally] = {}
        """By the id of a parameter that had a hook in the last backward pass: its gradients."""
        self._fired: set[int] = set()  # By parameter, since the last step.
        self._sharded: set[tuple[int, str]] = set()
        """By the ids of a module's tallies and a name: parameters of which FSDP holds shards."""
        self._of_shards: dict[int, tuple[Tally, Tally]] = {}
        """By the id of a shard: where it counts, and its gradient's values after the last backward.
        """
        self.scale: Tensor | float = 1.0
        self.divided: Tensor | float = 1.0
        """The last scale other than 1 that gradients carried."""
        self.autocast: set[torch.dtype] = set()
        """What torch.autocast computed in, if it was on in a forward pass."""
        self.emulated: set[str] = set()
        """The same of `gradilocks.emulate`."""
        self.passes = 0
        """How many backward passes were begun from something."""
        self._finite_passes: dict[torch.device, Tensor] = {}
        """By device: how many of these began from losses that were finite."""
        self.dtypes: set[torch.dtype] = set()
        """Of the gradients that came."""
        self.guard: Callable[[Callable[[], None]], None] = lambda act: act()
        """Does our own work inside a backward pass."""
        self._makers: dict[int, tuple[weakref.ref[Any], set[int]]] = {}
        """By the id of a tensor, the ids of the units that returned it."""
        self._handles: list[Any] = []
        self._parameter_handles: list[Any] = []
        self._done = False

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Puts hooks on modules; their parameters will be counted."""
        for module in modules:
            self.add_module(module)
            if is_unit(module) and not isinstance(module, torch.jit.ScriptModule):
                # One by one: if the second cannot be put on, the first is removed.
                before = module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
                self._handles.append(before)
                self._handles.append(module.register_forward_hook(self.after_forward))

    def add_module(self, module: nn.Module) -> bool:
        """Counts the gradients of a module's own parameters from here on; False if it does so."""
        fresh: dict[str, Tally] = {}
        return self._owned.setdefault(module, fresh) is fresh

    def count_losses(self, losses: Any) -> None:
        """What a backward pass begins from; no scale makes a loss NaN or Inf in float32."""
        found = [each.detach() for _, each in tensors_in(losses, "")]
        if not found or any(is_distributed(each) or is_functorch_tensor(each) for each in found):
            return
        self.passes += 1
        home = found[0].device
        finite = torch.stack([torch.isfinite(each).all().to(home) for each in found]).all().long()
        self._finite_passes[home] = self._finite_passes.get(home, 0) + finite

    @property
    def lost_passes(self) -> int:
        """How many backward passes began from a loss that was NaN or Inf. Waits for the device."""
        return self.passes - sum(int(each) for each in self._finite_passes.values())

    def hook_parameters(self) -> None:
        """A backward pass begins: puts hooks on the parameters of every module that was added."""
        self.unhook_parameters()
        self._hooked = {}
        for tallies, name, param in self._own_parameters():
            if param.requires_grad and (id(tallies), name) not in self._sharded:
                tallies[name] = self._hook(param, tallies.get(name) or Tally())
        for param, tally in self.unowned.items():
            self._hook(param, tally)

    def unhook_parameters(self) -> None:
        """A backward pass is over, or there will be none."""
        for handle in self._parameter_handles:
            handle.remove()
        if self._parameter_handles:
            for param in itertools.chain((p for _, _, p in self._own_parameters()), self.unowned):
                drop_empty_hooks(param)
        self._parameter_handles = []

    def count_shards(self) -> None:
        """A backward pass is over: counts the gradients that FSDP has given its shards.

        It runs backward on other tensors, which are in the modules only while they are used: what
        those have made in the first pass was counted, and is let go of. Counted here and not when
        the step comes: the gradients may have been unscaled and clipped by then. What is
        accumulated counts once, with the last backward pass before the step.
        """
        for tallies, name, param in self._own_parameters():
            is_shard = is_distributed(param) or is_flattened(param)
            if not is_shard or param.grad is None or id(param) in self._fired:
                continue
            if (id(tallies), name) not in self._sharded:
                self._sharded.add((id(tallies), name))
                tallies[name] = Tally()
            latest = Tally()
            self._add(latest, param.grad, self.scale)
            self._of_shards[id(param)] = tallies[name], latest

    def _own_parameters(self) -> Iterator[tuple[dict[str, Tally], str, Tensor]]:
        for module, tallies in list(self._owned.items()):
            for name, param in module.named_parameters(recurse=False):
                yield tallies, name, param

    def _hook(self, param: Tensor, tally: Tally) -> Tally:
        """Has a parameter's gradients counted in `tally`, or where they are counted already."""
        if id(param) not in self._hooked:
            self._hooked[id(param)] = tally
            if param.is_leaf:
                hook = self._counts(tally, id(param))
                self._parameter_handles.append(param.register_hook(hook))  # type: ignore[no-untyped-call]
        return self._hooked[id(param)]

    def carry(self, scale: Tensor | float) -> None:
        """The gradients of the coming backward passes carry this scale."""
        self.scale = scale.detach().clone() if isinstance(scale, Tensor) else scale
        self.divided = self.scale

    def count_unhooked(self, params: Iterable[Tensor], *, scale: Tensor | float) -> None:
        """A step comes: counts the gradients of those that had no hook in the last backward pass.

        Of shards as they were after it, of others as they are.
        """
        for param in params:
            held = self._of_shards.pop(id(param), None)
            if held is not None:
                held[0].take(held[1])
            elif param.requires_grad and id(param) not in self._hooked:
                tally = self.unowned.setdefault(param, Tally())
                if param.grad is not None:
                    self._add(tally, param.grad, scale)
        self._fired.clear()

    def tally_of(self, param: Tensor, module: nn.Module, name: str) -> Tally | None:
        """What was counted of a parameter of a module."""
        return self._owned.get(module, {}).get(name) or self.unowned.get(param)

    def remove(self) -> None:
        """Takes every hook away; those on outputs do nothing from here on."""
        self._done = True
        self.unhook_parameters()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def precision(self) -> str:
        """What the gradients were computed in."""
        if self.autocast:
            return f"{_joined(self.autocast)} autocast"
        if self.emulated:
            return f"{' and '.join(sorted(self.emulated))}, emulated"
        return _joined(self.dtypes) or "float32"

    def before_forward(self, module: nn.Module, *given: Any) -> None:
        """A unit is called: it takes what others have returned."""
        if self._done or torch.compiler.is_compiling():
            return
        for tensor in _tensors(given):
            makers = self._makers_of(tensor)
            for key in makers or _makers_behind(tensor.grad_fn):
                unit = self.units.get(key)
                if unit is not None and (makers or not unit.takers):
                    unit.takers[id(module)] = None

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """A unit has returned: the gradients of its tensors will be counted."""
        if self._done or torch.compiler.is_compiling():
            return
        unit = self.units.get(id(module))
        if unit is None or unit.module() is not module:
            unit = self.units[id(module)] = _Unit(weakref.ref(module))
        given = {id(tensor) for tensor in _tensors(args)}
        for tensor in _tensors(output):
            _measure(unit, tensor)
            # A tensor that was changed in place comes from here alone; one that an inner module
            # returned to this one comes from both.
            makers = set() if id(tensor) in given else self._makers_of(tensor)
            self._remember(tensor, makers | {id(module)})
            if tensor.requires_grad:
                self._await_gradient(unit, tensor)

    def _await_gradient(self, unit: _Unit, tensor: Tensor) -> None:
        if unit.gradients is None:
            unit.gradients = Tally()
        kind = tensor.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            self.autocast.add(torch.get_autocast_dtype(kind))
        if (format := emulated_format()) is not None:
            self.emulated.add(format.dtype or format.name)
        if not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            tensor.register_hook(self._counts(unit.gradients))  # type: ignore[no-untyped-call]

    def _counts(self, tally: Tally, param: int | None = None) -> Callable[[Tensor], None]:
        def count(gradient: Tensor | None) -> None:
            if param is not None:
                self._fired.add(param)
            if gradient is not None and not self._done:  # A backward of one's own may return None.
                self.guard(lambda: self._add(tally, gradient, self.scale))

        return count

    def _add(self, tally: Tally, gradient: Tensor, scale: Tensor | float) -> None:
        self.dtypes.add(gradient.dtype)
        tally.add(gradient, scale=scale)

    def _makers_of(self, tensor: Tensor) -> set[int]:
        ref, makers = self._makers.get(id(tensor), (None, set()))
        return makers if ref is not None and ref() is anchor(tensor) else set()

    def _remember(self, tensor: Tensor, makers: set[int]) -> None:
        key, made = id(tensor), self._makers
        made[key] = weakref.ref(anchor(tensor), lambda _: made.pop(key, None)), makers
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_MARK] = makers


@torch.no_grad()
def _measure(unit: _Unit, tensor: Tensor) -> None:
    """Notes how large a tensor is that a unit has returned."""
    if is_functorch_tensor(tensor) or not tensor.dim():
        return  # A single number is a loss, which is kept in float32.
    values = values_of(tensor.detach())
    if values is None:
        return
    home = values.device
    if home not in unit.sizes:
        unit.sizes[home] = torch.zeros(2, dtype=torch.float32, device=home)
    row = unit.sizes[home]
    least, most = torch.aminmax(values)
    if home.type == "cpu" and least.isfinite() and most.isfinite():  # One pass is enough.
        row[0] = max(float(row[0]), min(max(-float(least), float(most)), _LARGEST))
        return
    finite = values.isfinite()
    size = torch.where(finite, values, 0.0).abs().amax()
    size = size.clamp(max=_LARGEST) if size.dtype is torch.float64 else size
    row[0] = torch.maximum(row[0], size.float())
    row[1] += (~finite).sum()


def _makers_behind(node: Any) -> Iterable[int]:
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


def _tensors(things: Any) -> Iterable[Tensor]:
    return {id(tensor): tensor for _, tensor in tensors_in(things, "")}.values()


def _joined(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def is_unit(module: nn.Module) -> bool:
    """Whether a module is one that computes: without parts, or with parameters of its own.

    A parametrized module (weight_norm and the like) is one, too: its parts make its weight.
    """
    parts = [name for name, _ in module.named_children() if name != "parametrizations"]
    return not parts or next(module.parameters(recurse=False), None) is not None


# --- the end of an audit -------------------------------------------------------------------------


def gather(
    listener: Listener,
    models: Sequence[nn.Module],
    *,
    others: Mapping[Tensor, str] | None = None,
    reachable: bool = False,
) -> Counted:
    """Brings the counts to the host, once.

    Args:
        listener: with its hooks taken away.
        models: the outermost modules; what is in none of them is left out.
        others: parameters that are in no module, with their names.
        reachable: whether the one model's `get_submodule` must take the names.
    """
    parts = {id(part): part for model in models for part in model.modules()}
    names = _names(models, reachable=reachable)
    # Of a module that is gone, the id may be another's by now.
    units = {k: u for k, u in listener.units.items() if k in parts and u.module() is parts[k]}
    outputs = {key: unit.gradients for key, unit in units.items() if unit.gradients is not None}
    homes = _homes(models)
    owned: dict[int, list[Tally]] = {}
    seen: set[int] = set()
    for key, module in parts.items():
        for name, param in module.named_parameters(recurse=False):
            tally = listener.tally_of(param, module, name)
            if tally is not None and id(tally) not in seen:
                seen.add(id(tally))
                owned.setdefault(homes[key], []).append(tally)
    for other, name in (others or {}).items():
        tally = listener.unowned.get(other)
        if tally is not None and id(tally) not in seen:
            owned.setdefault(id(other), []).append(tally)
            names[id(other)] = name
    counted = iter(read([*outputs.values(), *(one for many in owned.values() for one in many)]))
    activations = {key: next(counted) for key in outputs}
    parameters = {key: Histogram.total(next(counted) for _ in owned[key]) for key in owned}
    returned = _returned(units, parts, names)
    modules = [
        ModuleGradients(
            names[key],
            type(parts[key]).__name__ if key in parts else "Parameter",
            _unless_empty(parameters.get(key)),
            _unless_empty(activations.get(key)),
            returned.get(key),
        )
        for key in dict.fromkeys([*outputs, *owned, *units])
    ]
    return Counted(
        tuple(modules),
        listener.precision,
        float(listener.divided),
        passes=listener.passes,
        lost_passes=listener.lost_passes,
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
    units: Mapping[int, _Unit], parts: Mapping[int, nn.Module], names: Mapping[int, str]
) -> dict[int, Outputs]:
    """What the units have returned."""
    found: dict[int, Outputs] = {}
    sizes = rows_read([unit.sizes for unit in units.values()])
    for key, rows in zip(units, sizes, strict=True):
        if not rows:
            continue
        takers = [one for one in units[key].takers if one in parts and one != key]
        # A module that hands its input on to a part of its own does not compute with it.
        nearest = [
            one
            for one in takers
            if not any(id(part) in takers for part in parts[one].modules() if id(part) != one)
        ]
        largest, nonfinite = max(row[0] for row in rows), int(sum(row[1] for row in rows))
        found[key] = Outputs(largest, nonfinite, tuple(names[one] for one in nearest))
    return found


def _unless_empty(histogram: Histogram | None) -> Histogram | None:
    if histogram is None or not (histogram.values or histogram.zeros or histogram.nonfinite):
        return None
    return histogram
