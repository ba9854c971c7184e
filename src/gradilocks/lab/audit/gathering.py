"""What a Listener has counted enters, with the models whose it is; an Audit leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradilocks.lab.audit.counting import Tally, read
from gradilocks.lab.audit.findings import Audit, ModuleGradients
from gradilocks.lab.audit.histogram import Histogram
from gradilocks.lab.audit.listening import Listener
from gradilocks.lab.audit.modules import Outputs
from gradilocks.lab.formats import Format
from gradilocks.names import name_modules

__all__ = ["gather"]


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
    named = name_modules(models)
    if reachable:
        named = _reachable(models[0], named)
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
            named[id(other)] = name
    keys = list(dict.fromkeys([*outputs, *owned, *(k for k in listener.flow.called if k in parts)]))
    flat = [*outputs.values(), *(tally for tallies in owned.values() for tally in tallies)]
    histograms = iter(read(flat))
    activations = {key: next(histograms) for key in outputs}
    parameters = {
        key: Histogram.total([next(histograms) for _ in tallies]) for key, tallies in owned.items()
    }
    returned = _returned(listener, parts, named)
    modules = [
        ModuleGradients(
            named[key],
            type(parts[key]).__name__ if key in parts else "Parameter",
            _any(parameters.get(key)),
            _any(activations.get(key)),
            returned.get(key),
        )
        for key in keys
    ]
    return Audit.of(
        [module for module in modules if _matters(module, formats)],
        steps=steps,
        formats=formats,
        precision=_precision(listener),
        loss_scale=float(listener.divided),
    )


def _reachable(model: nn.Module, named: Mapping[int, str]) -> dict[int, str]:
    """The names that `model.get_submodule` takes: with the wrapper's part, where it needs one."""
    found: dict[int, str] = {}
    for real, module in model.named_modules():
        plain = named[id(module)]
        try:
            found[id(module)] = plain if model.get_submodule(plain) is module else real
        except (AttributeError, RuntimeError):  # The latter from a ScriptModule.
            found[id(module)] = real
    return found


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
    listener: Listener, parts: Mapping[int, nn.Module], named: Mapping[int, str]
) -> dict[int, Outputs]:
    flow = listener.flow
    found: dict[int, Outputs] = {}
    for key, (largest, nonfinite) in flow.largest().items():
        if key not in parts or flow.called[key]() is not parts[key]:
            continue
        takers = [one for one in flow.takers.get(key, ()) if one in parts and one != key]
        # A module that hands its input on to a part of its own does not compute with it.
        nearest = [one for one in takers if not _holds_one(parts[one], takers)]
        found[key] = Outputs(largest, nonfinite, tuple(named[one] for one in nearest))
    return found


def _holds_one(module: nn.Module, takers: Sequence[int]) -> bool:
    return any(id(part) in takers for part in module.modules() if part is not module)


def _matters(module: ModuleGradients, formats: Sequence[Format]) -> bool:
    """Whether it has gradients, or returns what one of the formats cannot hold."""
    if module.parameters is not None or module.activations is not None:
        return True
    largest = module.outputs.largest if module.outputs is not None else 0.0
    return any(largest > format.largest for format in formats)


def _any(histogram: Histogram | None) -> Histogram | None:
    if histogram is None or not (histogram.values or histogram.zeros or histogram.nonfinite):
        return None
    return histogram


def _precision(listener: Listener) -> str:
    if listener.autocast:
        return f"{_joined(listener.autocast)} autocast"
    if listener.emulated:
        return f"{' and '.join(sorted(listener.emulated))}, emulated"
    return _joined(listener.dtypes) or "float32"


def _joined(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
