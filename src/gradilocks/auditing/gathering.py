"""What a Listener has counted enters, with the models whose it is; an Audit leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradilocks.auditing.counting import Tally, read
from gradilocks.auditing.findings import Audit, ModuleGradients
from gradilocks.auditing.histogram import Histogram
from gradilocks.auditing.listening import Listener
from gradilocks.precision import Format
from gradilocks.running.naming import name_modules

__all__ = ["gather"]


def gather(
    listener: Listener,
    models: Sequence[nn.Module],
    *,
    steps: int,
    formats: Sequence[Format],
    others: Mapping[Tensor, str] | None = None,
) -> Audit:
    """Brings the counts to the host, once, and judges them.

    Args:
        listener: with its hooks taken away.
        models: the outermost modules; what is in none of them is left out.
        steps: how many steps were seen.
        formats: to be judged.
        others: parameters that are in no module, with their names.
    """
    named = name_modules(models)
    outputs = {
        named[id(module)]: (module, tally)
        for ref, tally in listener.outputs.values()
        if (module := ref()) is not None and id(module) in named
    }
    owned: dict[str, list[Tally]] = {}
    kinds = {name: type(module).__name__ for name, (module, _) in outputs.items()}
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            name = _owner(named[id(module)])
            for param in module.parameters(recurse=False):
                if id(param) not in seen and listener.knows(param):
                    seen.add(id(param))
                    owned.setdefault(name, []).append(listener.parameters[id(param)][1])
                    kinds.setdefault(name, type(module).__name__)
    for other, name in (others or {}).items():
        if id(other) not in seen and listener.knows(other):
            seen.add(id(other))
            owned.setdefault(name, []).append(listener.parameters[id(other)][1])
            kinds.setdefault(name, "Parameter")
    names = list(dict.fromkeys([*outputs, *owned]))
    flat = [outputs[name][1] for name in outputs] + [t for name in owned for t in owned[name]]
    histograms = iter(read(flat))
    activations = {name: next(histograms) for name in outputs}
    parameters = {
        name: Histogram.total([next(histograms) for _ in tallies])
        for name, tallies in owned.items()
    }
    modules = [
        ModuleGradients(name, kinds[name], _any(parameters.get(name)), _any(activations.get(name)))
        for name in names
    ]
    return Audit.of(
        [m for m in modules if m.parameters is not None or m.activations is not None],
        steps=steps,
        formats=formats,
        precision=_precision(listener),
        loss_scale=float(listener.divided),
    )


def _owner(name: str) -> str:
    """The module that a parametrization belongs to."""
    return name.split(".parametrizations.")[0].removesuffix(".parametrizations")


def _any(histogram: Histogram | None) -> Histogram | None:
    if histogram is None or not (histogram.values or histogram.zeros or histogram.nonfinite):
        return None
    return histogram


def _precision(listener: Listener) -> str:
    if listener.autocast:
        return f"{_joined(listener.autocast)} autocast"
    return _joined(listener.dtypes) or "float32"


def _joined(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
