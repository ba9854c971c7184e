"""A bad step enters; a file from which it can be run again, on another day, leaves.

It holds parameters and buffers as they were when the step began, the optimizers' state, what the
model was called with and where the random generators stood, and which gradients were NaN or Inf:
tensors, numbers and texts alone, so that `torch.load(path, weights_only=True)` reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.lab.trace.kept_calls import KeptCall, KeptStep
from gradilocks.lab.unchanged import Generators
from gradilocks.names import name_modules, name_parameters, prefixed, unwrapped
from gradilocks.step.table import measurable

__all__ = ["write_bad_step"]

VERSION = 1
_PLAIN = (int, float, bool, str, type(None))


def write_bad_step(
    path: Path,
    *,
    step: int,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    kept: KeptStep,
    loss: float | None,
    found: str,
) -> int:
    """Writes the file, and returns its size in bytes.

    Args:
        path: where to; what is there is replaced at once, or not at all.
        step: its number.
        models: outermost modules.
        optimizers: that were to take it.
        kept: what the models were called with.
        loss: that was run backward, if it is known.
        found: what is known of where it arose, in a sentence.
    """
    names = name_modules(models)
    written = {
        "gradilocks": VERSION,
        "step": step,
        "found": found,
        "loss": loss,
        "models": {
            name: dict(unwrapped(model).state_dict()) for name, model in prefixed(models).items()
        },
        "optimizers": [_plain(optimizer.state_dict()) for optimizer in optimizers],
        "calls": [_call(call, names) for call in kept.calls if call.args is not None],
        "gradients": _bad_gradients(models),
        "generators": _generators(Generators.now()),
    }
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(written, partial)
    os.replace(partial, path)
    return path.stat().st_size


@torch.no_grad()
def _bad_gradients(models: Sequence[nn.Module]) -> dict[str, list[int]]:
    """By the name of a parameter, how many NaN and Inf its gradient holds; of all that have any."""
    found: dict[str, list[int]] = {}
    for param, name in name_parameters(models).items():
        values = None if param.grad is None else measurable(param.grad)
        if values is not None:
            counts = [int(values.isnan().sum()), int(values.isinf().sum())]
            if any(counts):
                found[name] = counts
    return found


def _call(call: KeptCall, names: Mapping[int, str]) -> dict[str, Any]:
    module = call.module()
    return {
        "module": "" if module is None else names.get(id(unwrapped(module)), ""),
        "args": _plain(list(call.args or ())),
        "kwargs": _plain(dict(call.kwargs)),
        "training": call.training,
        "autocast": [
            {"device": kind, "enabled": enabled, "dtype": str(dtype).removeprefix("torch.")}
            for kind, enabled, dtype in call.precision.states
        ],
        "generators": _generators(call.generators),
        "received": dict(call.received),
    }


def _generators(state: Generators) -> dict[str, Any]:
    numpy = None
    if state.numpy is not None:
        numpy = [each.tolist() if hasattr(each, "tolist") else each for each in state.numpy]
    return {"cpu": state.cpu, "cuda": state.devices, "python": state.python, "numpy": numpy}


def _plain(thing: Any) -> Any:
    """Tensors, numbers and texts as they are; of anything else what Python calls it."""
    if isinstance(thing, Tensor):
        return thing.detach()
    if isinstance(thing, _PLAIN):
        return thing
    if isinstance(thing, Mapping):
        return {k if isinstance(k, _PLAIN) else str(k): _plain(v) for k, v in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_plain(each) for each in thing]
    if isinstance(thing, (torch.dtype, torch.device, torch.Size)):
        return thing
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
