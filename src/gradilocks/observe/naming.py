"""Parameters enter, the names that their models give them leave.

A script does not say which model its optimizer trains, so every module that is alive is looked at,
once per optimizer. The outermost module that owns a parameter names it.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from gradilocks._torch import children_of, parameters_in

__all__ = ["name_modules", "name_parameters", "owners_of", "plain_name"]

# What wrappers put in front: DataParallel and DDP, torch.compile, FSDP, activation checkpointing.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def plain_name(name: str) -> str:
    """A name without what wrappers put into it.

    Example:
        >>> plain_name("module._orig_mod.head.weight")
        'head.weight'
    """
    parts = name.split(".")
    kept = [part for part in parts[:-1] if part not in _WRAPPERS] + parts[-1:]
    return ".".join(kept)


def owners_of(params: Iterable[Tensor]) -> list[nn.Module]:
    """The outermost modules that own these parameters, in the order of the parameters."""
    wanted = {id(param): place for place, param in enumerate(params)}
    parents: dict[int, list[nn.Module]] = {}
    owners: dict[int, list[nn.Module]] = {}
    for thing in _modules():
        for child in children_of(thing).values():
            if child is not None:
                parents.setdefault(id(child), []).append(thing)
        for param in parameters_in(thing).values():
            if id(param) in wanted:
                owners.setdefault(wanted[id(param)], []).append(thing)
    roots: dict[int, nn.Module] = {}
    for _, modules in sorted(owners.items()):
        for module in modules:
            for root in _climb(module, parents):
                roots.setdefault(id(root), root)
    return list(roots.values())


def _modules() -> Iterator[nn.Module]:
    """Every module that can be found: those that the collector knows, and the script's own.

    After `gc.freeze()` the collector does not tell of what there was before.
    """
    seen: set[int] = set()
    places: list[dict[str, object]] = [vars(sys.modules["__main__"])]
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        places.append(frame.f_locals)
    held = [v for place in places for v in list(place.values()) if isinstance(v, nn.Module)]
    for thing in itertools.chain(gc.get_objects(), *(module.modules() for module in held)):
        if issubclass(type(thing), nn.Module) and id(thing) not in seen:
            seen.add(id(thing))
            yield thing


def name_parameters(params: Sequence[Tensor]) -> dict[Tensor, str]:
    """The name of every parameter that a living module owns; the others are left out."""
    roots = owners_of(params)
    prefixes = _prefixes(roots)
    wanted = {id(param): param for param in params}
    names: dict[Tensor, str] = {}
    for root, prefix in zip(roots, prefixes, strict=True):
        for name, param in root.named_parameters(remove_duplicate=False):
            if id(param) in wanted and param not in names:
                names[param] = prefix + plain_name(name)
    return names


def name_modules(roots: Sequence[nn.Module]) -> dict[int, str]:
    """The name of every module in these, by its id; as the names of its parameters begin."""
    names: dict[int, str] = {}
    for root, prefix in zip(roots, _prefixes(roots), strict=True):
        for name, module in root.named_modules():
            # A wrapper and what it wraps have one name: the wrapper has no parameters of its own.
            names.setdefault(id(module), (prefix + _unwrapped(root, name)).removesuffix("."))
    return names


def _unwrapped(root: nn.Module, name: str) -> str:
    """A module's name without wrappers; a part that the user has called `module` is none."""
    kept: list[str] = []
    parent: nn.Module = root
    for part in name.split(".") if name else ():
        wraps = part in _WRAPPERS - {"module"} or (
            part == "module"
            and isinstance(parent, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        )
        kept += [] if wraps else [part]
        parent = getattr(parent, part)
    return ".".join(kept)


def _climb(module: nn.Module, parents: dict[int, list[nn.Module]]) -> list[nn.Module]:
    """The modules above `module` that no other module holds."""
    tops: list[nn.Module] = []
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        above = [parent for parent in parents.get(id(one), ()) if parent is not one]
        waiting += above
        if not above:
            tops.append(one)
    return tops or [module]


def _prefixes(roots: Sequence[nn.Module]) -> list[str]:
    """Nothing for one root; for several what the script calls them, or else their classes."""
    if len(roots) < 2:
        return ["" for _ in roots]
    script = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    variables = {id(value): name for name, value in reversed(list(script.items()))}
    taken: set[str] = set()
    prefixes: list[str] = []
    for root in roots:
        called = variables.get(id(root), type(root).__name__)
        name, number = called, 1
        while name in taken:
            number += 1
            name = f"{called}{number}"
        taken.add(name)
        prefixes.append(f"{name}.")
    return prefixes
