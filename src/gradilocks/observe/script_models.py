"""Parameters of a script's optimizers enter; the models that own them leave.

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
from gradilocks.ranks.layout import (
    flattened_among,
    has_other_ranks,
    is_distributed,
    replicas_of,
)

__all__ = ["are_whole", "modules_besides", "owners_of"]


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


def modules_besides(models: Iterable[nn.Module]) -> list[nn.Module]:
    """All that are alive, have parameters and are no part of these models: a frozen one, say."""
    known = {id(part) for model in models for part in model.modules()}
    return [each for each in _modules() if id(each) not in known and _has_parameters(each)]


def _has_parameters(module: nn.Module) -> bool:
    return any(parameters_in(part) for part in module.modules())


def are_whole(params: Sequence[Tensor], models: Iterable[nn.Module]) -> bool:
    """Whether this process is known to hold all of what it trains, with all of its gradients.

    Alone, or as one of the ranks of DistributedDataParallel. Of other plain tensors nothing tells
    whether the ranks hold copies or parts, and shards are parts.

    Args:
        params: of an optimizer.
        models: that own them.
    """
    if not has_other_ranks():
        return True
    if flattened_among(params) or any(map(is_distributed, params)):
        return False
    replicated = {
        id(param)
        for model in models
        for part in model.modules()
        if replicas_of(part) is not None
        for param in part.parameters()
    }
    return all(id(param) in replicated for param in params)


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


def _climb(module: nn.Module, parents: dict[int, list[nn.Module]]) -> list[nn.Module]:
    """The modules above `module` that no other module holds."""
    found = {id(module): module}
    waiting = [module]
    for one in waiting:  # Which grows meanwhile.
        fresh = {id(each): each for each in parents.get(id(one), ()) if id(each) not in found}
        found |= fresh
        waiting += fresh.values()
    tops = [one for one in waiting if all(each is one for each in parents.get(id(one), ()))]
    return tops or [module]
