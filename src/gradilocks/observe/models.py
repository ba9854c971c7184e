"""Parameters enter, the models that own them leave.

A script does not say which model its optimizer trains, so every module that is alive is looked at,
once per optimizer. The outermost module that owns a parameter names it.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

__all__ = ["owners_of"]


def owners_of(params: Iterable[Tensor]) -> list[nn.Module]:
    """The outermost modules that own these parameters, in the order of the parameters."""
    wanted = {id(param): place for place, param in enumerate(params)}
    parents: dict[int, list[nn.Module]] = {}
    owners: dict[int, list[nn.Module]] = {}
    for thing in _modules():
        fields = thing.__dict__
        for child in (fields.get("_modules") or {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(thing)
        for param in (fields.get("_parameters") or {}).values():
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
