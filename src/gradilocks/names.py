"""Parameters and modules enter, the names that users know them by leave; for every room alike.

A name is what `model.named_parameters()` or `model.named_modules()` says, without what wrappers put
in front: `DDP(model)` calls a weight `module.head.weight`, and its name here is `head.weight`. A
part of a name is left out only where a wrapper really is, so that a user's own submodule called
`module` keeps its name. `Names` names the parameters of optimizers, with or without a model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradilocks._torch import CHECKPOINT_WRAPPER, DYNAMO, children_of, compiled_call

__all__ = [
    "Names",
    "OwnedParameters",
    "Placed",
    "called_alike",
    "is_compiled",
    "is_unnamed",
    "is_wrapper",
    "name_modules",
    "name_parameters",
    "named_modules",
    "named_parameters",
    "prefixed",
    "unwrapped",
]

# The attribute that holds the wrapped module, and the classes that have it: the module to find the
# class in if somebody has imported it (nothing is imported to find out), and its name there.
_WRAPPERS: dict[str, tuple[tuple[str, str], ...]] = {
    "module": (
        ("torch.nn.parallel", "DataParallel"),
        ("torch.nn.parallel", "DistributedDataParallel"),
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("megatron.core.distributed", "DistributedDataParallel"),
        ("megatron.core.transformer.module", "Float16Module"),
    ),
    "_orig_mod": ((f"{DYNAMO}.eval_frame", "OptimizedModule"),),
    "_fsdp_wrapped_module": (("torch.distributed.fsdp", "FullyShardedDataParallel"),),
    "_checkpoint_wrapped_module": ((CHECKPOINT_WRAPPER, "ActivationWrapper"),),
    "_forward_module": (
        ("lightning.fabric.wrappers", "_FabricModule"),
        ("lightning_fabric.wrappers", "_FabricModule"),
        ("lightning.pytorch.overrides.base", "_LightningModuleWrapperBase"),
        ("pytorch_lightning.overrides.base", "_LightningModuleWrapperBase"),
    ),
}
# Fabric's wrapper holds the model twice: as it runs it, and as it was handed over.
_WRAPPERS["_original_module"] = _WRAPPERS["_forward_module"][:2]


def _is_wrapped(parent: nn.Module, key: str) -> bool:
    """Whether `parent` is a wrapper and `key` the attribute in which it holds what it wraps."""
    for place, name in _WRAPPERS.get(key, ()):
        kind = getattr(sys.modules.get(place), name, None)
        if isinstance(kind, type) and isinstance(parent, kind):
            return True
    return False


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` is a wrapper around another module, such as DDP."""
    return any(_is_wrapped(module, key) for key in children_of(module))


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is compiled by torch.compile, or is a wrapper around such a one."""
    while True:
        if _is_wrapped(module, "_orig_mod"):
            return True
        inner = [child for key, child in children_of(module).items() if _is_wrapped(module, key)]
        if not inner or inner[0] is None:
            return compiled_call(module) is not None
        module = inner[0]


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module inside whatever wrappers there are around it."""
    while True:
        inner = [child for key, child in children_of(module).items() if _is_wrapped(module, key)]
        if not inner or inner[0] is None:
            return module
        module = inner[0]


def _without_wrappers(root: nn.Module, path: str) -> str:
    """`path` from `root` without the parts that lead from a wrapper to what it wraps."""
    parts = path.split(".")
    if not any(part in _WRAPPERS for part in parts):
        return path
    kept: list[str] = []
    parent: nn.Module | None = root
    for part in parts:
        if parent is None or not _is_wrapped(parent, part):
            kept.append(part)
        # A ScriptModule's children are in a mapping without `get`.
        children = {} if parent is None else children_of(parent)
        parent = children[part] if part in children else None  # noqa: SIM401
    return ".".join(kept)


def named_parameters(
    model: nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """`model.named_parameters()` without what wrappers put into the names."""
    for path, param in model.named_parameters(remove_duplicate=remove_duplicate):
        yield _joined(prefix, _without_wrappers(model, path)), param


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` likewise; a wrapper and what it wraps have one name."""
    for path, module in model.named_modules():
        yield _joined(prefix, _without_wrappers(model, path)), module


def prefixed(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Models by what their parameters' names begin with.

    Nothing for one model; for several what the script calls them, or else their classes.
    """
    if len(models) == 1:
        return {"": models[0]}
    variables = _variables()
    found: dict[str, nn.Module] = {}
    for model in models:
        inner = unwrapped(model)
        called = variables.get(id(model)) or variables.get(id(inner)) or type(inner).__name__
        name, number = called, 1
        while name in found:
            number += 1
            name = f"{called}{number}"
        found[name] = model
    return found


def _variables() -> dict[int, str]:
    """What the script calls its modules, by their ids.

    Variables of the script itself, then of its functions that are running, outermost first, and of
    the object that such a function is a method of. The first that was made has the say.
    """
    places = [vars(sys.modules["__main__"])] if "__main__" in sys.modules else []
    frames: list[dict[str, Any]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame.f_locals)
        frame = frame.f_back
    for local in reversed(frames):
        owner = local.get("self")
        places += [local, {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})]
    return {
        id(value): name
        for place in reversed(places)
        for name, value in reversed(list(place.items()))
        if isinstance(value, nn.Module) and isinstance(name, str) and name != "self"
    }


def name_parameters(
    models: Sequence[nn.Module], params: Iterable[Tensor] | None = None
) -> dict[Tensor, str]:
    """The name of every parameter of these models, in their order.

    Args:
        models: outermost modules.
        params: those that are wanted; None for all.
    """
    wanted = None if params is None else {id(param) for param in params}
    names: dict[Tensor, str] = {}
    for prefix, model in prefixed(models).items():
        for name, param in named_parameters(model, prefix, remove_duplicate=False):
            if (wanted is None or id(param) in wanted) and param not in names:
                names[param] = name
    return names


def name_modules(models: Sequence[nn.Module]) -> dict[int, str]:
    """The name of every module in these models, by its id; as its parameters' names begin."""
    names: dict[int, str] = {}
    for prefix, model in prefixed(models).items():
        for name, module in named_modules(model, prefix):
            names.setdefault(id(module), name)
    return names


def called_alike(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two lists of names may be of the same parameters, with and without wrappers.

    For names of which only the text is left: checkpoints of earlier versions name the parameters of
    a wrapped model with the wrapper's part.
    """

    def text(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    return list(map(text, names)) == list(map(text, others))


Placed = tuple[str, str]
"""A parameter's name, and its place among ranks that hold different parameters: the stage of a
pipeline, the rank of experts; "" where all ranks hold it, or there are no others."""


class OwnedParameters(NamedTuple):
    """The parameters of this rank, as a checkpoint may know them."""

    parameters: Sequence[Placed]
    apart: bool
    """Whether other ranks hold other parameters."""
    alone: bool
    """Whether there are no other ranks."""

    def places_among(self, saved: Sequence[Placed]) -> list[int]:
        """Where each of them is among those of a checkpoint.

        By name where names tell all of a checkpoint's parameters apart, as those of a whole model
        do: a parameter may have moved to another rank. Stages that each count their own parts from
        0 on do not: then by name and place. By their order only if no rank holds other parameters
        and nothing contradicts it: names are alike but for wrappers, or there are none.

        Raises:
            KeyError: with the name of the first that is not there.
        """
        exact = {each: at for at, each in enumerate(saved)}
        by_name = {name: at for at, (name, _) in enumerate(saved)}
        moves = len(by_name) == len(saved)
        placed = any(place for _, place in saved)
        found: list[int] = []
        for name, place in self.parameters:
            at = exact.get((name, place))
            if at is None and moves and not ((place or placed) and is_unnamed(name)):
                at = by_name.get(name)
            if at is None:
                names, others = ([name for name, _ in each] for each in (self.parameters, saved))
                unnamed = all(map(is_unnamed, names)) or all(map(is_unnamed, others))
                fits = len(names) == len(others) and (unnamed or called_alike(names, others))
                if fits and not placed and not self.apart:
                    return list(range(len(names)))
                raise KeyError(name)
            found.append(at)
        return found

    def known_among(self, saved: Sequence[Placed]) -> dict[int, int]:
        """Where those of them are that are among `saved`, after some were added or taken away.

        Nothing if that cannot be told: a place in an optimizer names another parameter as soon as
        one before it is gone.
        """
        if len(self.parameters) < len(saved) and any(is_unnamed(name) for name, _ in saved):
            return {}
        exact = {each: at for at, each in enumerate(saved)}
        return {k: exact[each] for k, each in enumerate(self.parameters) if each in exact}


def is_unnamed(name: str) -> bool:
    """Whether this is only the parameter's place in an optimizer."""
    return re.match(r"(optimizers\[\d+\]\.)?param_groups\[", name) is not None


class Names:
    """Parameters' names: as the model names them, else as the optimizer does, else their place.

    Looked up only when somebody asks, so that a healthy step pays nothing for them.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, nn.Module] | None, optimizers: Sequence[Any]
    ) -> None:
        self.use(model, optimizers)

    def use(
        self, model: nn.Module | Mapping[str, nn.Module] | None, optimizers: Sequence[Any]
    ) -> None:
        """Names these optimizers' parameters from here on, by this model."""
        if not (model is None or isinstance(model, (nn.Module, Mapping))):
            raise TypeError(
                "model must be a torch.nn.Module, or a mapping from a prefix to one, got "
                f"{type(model).__name__}."
            )
        if isinstance(model, Mapping):
            for prefix, module in model.items():
                if not all((isinstance(prefix, str), isinstance(module, nn.Module))):
                    raise TypeError(
                        "a model mapping goes from a prefix (str) to a torch.nn.Module, got "
                        f"{type(prefix).__name__} to {type(module).__name__}."
                    )
        self._model = model
        self.optimizers = optimizers
        """Whose parameters are named."""
        self.first_group = 0
        """The number of their first group, if others come before them."""

    @property
    def model(self) -> object:
        """The module, or the mapping, that names the parameters; None if there is none."""
        return self._model

    @property
    def has_model(self) -> bool:
        """Whether a model names the parameters."""
        return self._model is not None

    def groups(self) -> list[tuple[int, str | None]]:
        """For each parameter the number of its group, counted over all optimizers, and its name."""
        every = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        numbered = enumerate(every, self.first_group)
        return [(g, group.get("name")) for g, group in numbered for _ in group["params"]]

    def every(self) -> list[str]:
        """The names of all parameters of the model; none without a model."""
        return [name for name, _ in self._named_parameters()]

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name and the shape of all parameters of the model; none without a model."""
        return [(name, tuple(param.shape)) for name, param in self._named_parameters()]

    def knows_all(self, params: Iterable[Tensor]) -> bool:
        """Whether all of `params` are the model's."""
        mine = {id(param) for _, param in self._named_parameters()}
        return all(id(param) in mine for param in params)

    def knows_any(self, params: Iterable[Tensor]) -> bool:
        """Whether one of `params` is the model's."""
        mine = {id(param) for _, param in self._named_parameters()}
        return any(id(param) in mine for param in params)

    def __call__(self, param: Tensor) -> str:
        return self.of([param])[0]

    def of(self, params: Iterable[Tensor]) -> list[str]:
        """The names of `params`, looked up now, so that replaced parameters are found too."""
        known = self._in_optimizers()
        known.update((id(param), name) for name, param in self._named_parameters())
        return [known.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in params]

    def in_backward_order(self, params: Sequence[Tensor | None]) -> list[tuple[int, str]]:
        """The places of `params` with their names, last gradient of the forward pass first.

        The model's own order, reversed; without a model, the optimizers' order, reversed. A
        parameter that is gone (None) has no name and is left out.
        """
        order = {id(param): place for place, (_, param) in enumerate(self._named_parameters())}
        living = [(i, param) for i, param in enumerate(params) if param is not None]
        living.sort(key=lambda pair: (order.get(id(pair[1]), -1), pair[0]), reverse=True)
        names = self.of(param for _, param in living)
        return [(place, name) for (place, _), name in zip(living, names, strict=True)]

    def _in_optimizers(self) -> dict[int, str]:
        """By parameter: the name that its optimizer was given, or else its place there."""
        known: dict[int, str] = {}
        taken: set[str] = set()
        for number, optimizer in enumerate(self.optimizers):
            prefix = f"optimizers[{number}]." if len(self.optimizers) > 1 else ""
            for g, group in enumerate(optimizer.param_groups):
                given = group.get("param_names")
                for k, param in enumerate(group["params"]):
                    name = given[k] if given else f"{prefix}param_groups[{g}]['params'][{k}]"
                    if name in taken:  # Two optimizers whose models name their parts alike.
                        name = f"{prefix}{name}"
                    taken.add(name)
                    known[id(param)] = name
        return known

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        models = self._model if isinstance(self._model, Mapping) else {"": self._model}
        for prefix, model in models.items():
            if model is not None:
                yield from named_parameters(model, prefix)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
