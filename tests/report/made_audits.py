"""Audits made up of real numbers: gradients enter, the plain data of an audit leave.

Nothing is made up about the counts: histograms come from the exponents of the numbers, and what a
format loses from rounding each of them to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMATS = {
    "fp16": (torch.float16, 65504.0, 2.0**-14, 2.0**-24),
    "bf16": (torch.bfloat16, 3.3895313892515355e38, 2.0**-126, 2.0**-133),
    "fp8 e5m2": (torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16),
    "fp8 e4m3": (torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9),
}
Gradients = Mapping[str, tuple[Tensor | None, Tensor | None]]
# A module that loses more than this, even scaled, is one to keep in higher precision.
TOO_MUCH = 0.02


def spread(middle: float, width: float, count: int, seed: int) -> Tensor:
    """Numbers whose log2 is normal around `middle`, with random signs."""
    draw = torch.Generator().manual_seed(seed)
    exponents = middle + width * torch.randn(count, generator=draw)
    return torch.exp2(exponents) * torch.where(torch.rand(count, generator=draw) < 0.5, -1.0, 1.0)


def gradients(modules: int = 5, count: int = 4000) -> dict[str, tuple[Tensor | None, Tensor]]:
    """A model whose gradients fade from its head to its first module, which reaches far down."""
    made: dict[str, tuple[Tensor | None, Tensor]] = {}
    for i in range(modules):
        depth = (modules - 1 - i) / max(1, modules - 1)
        last = i == modules - 1
        name = "head" if last else f"blocks.{i // 3}.{('attention.qkv', 'mlp.up', 'norm')[i % 3]}"
        activations = spread(-24 - 7 * depth, 2.5, count, seed=2 * i)
        activations[: count // 20] = 0.0
        if i == 0:  # Some so small that no scale for the others can save them.
            activations[count // 20 : count // 5] *= 2.0**-22
        parameters = spread(-14 - 4 * depth, 2.0, count // 4, seed=2 * i + 1)
        made[name] = (None if name.endswith("norm") else parameters, activations)
    return made


def histogram(values: Tensor) -> dict[str, Any]:
    finite = values[torch.isfinite(values)].double().abs()
    there = finite[finite > 0]
    exponents = torch.frexp(there).exponent - 1
    first = int(exponents.min()) if len(there) else 0
    return {
        "first": first,
        "counts": torch.bincount(exponents - first).tolist() if len(there) else [],
        "zeros": int((finite == 0).sum()),
        "nonfinite": len(values) - len(finite),
        "largest": float(there.max()) if len(there) else None,
        "smallest": float(there.min()) if len(there) else None,
    }


def shares(values: Tensor, name: str, scale: float) -> dict[str, float | None]:
    dtype, largest, smallest_normal, _ = FORMATS[name]
    there = values[torch.isfinite(values) & (values != 0)].float() * scale
    if not len(there):
        return dict.fromkeys(("lost", "subnormal", "overflow", "headroom"))
    stored = there.to(dtype).float().abs()
    # e4m3 has no infinity: torch makes NaN of what is too large, or the largest number.
    over = ~torch.isfinite(stored) | ((stored == largest) & (there.abs() > largest * 1.04))
    # A value of the bin below the smallest normal that rounds up to it counts as subnormal.
    below = (stored > 0) & ~over & (there.abs() < smallest_normal)
    return {
        "lost": float((stored == 0).double().mean()),
        "subnormal": float(below.double().mean()),
        "overflow": float(over.double().mean()),
        "headroom": math.log2(largest / float(there.abs().max())),
    }


def made_audit(given: Gradients | None = None, **changes: Any) -> dict[str, Any]:
    """The audit of these gradients; `steps=3` and the like change a field."""
    given = gradients() if given is None else given
    both = {name: _joined([a, b]) for name, (a, b) in given.items()}
    every = _joined(list(both.values()))
    scales = {name: _scale(every, name) for name in FORMATS}
    fates = {
        module: {
            name: {"unscaled": shares(all_of_it, name, 1.0), "scaled": shares(all_of_it, name, at)}
            for name, at in scales.items()
        }
        for module, all_of_it in both.items()
    }
    formats = [_format(name, scales[name], every, fates) for name in FORMATS]
    best = formats[0]
    before = best["unscaled"]["lost"] or 0.0
    audit = {
        "kind": "audit",
        "version": 1,
        "steps": 8,
        "precision": "float32",
        "loss_scale": 1.0,
        "formats": formats,
        "recommendation": {
            "format": best["name"],
            "scale": best["scale"],
            "keep": best["keep"],
            "words": [
                f"Train in {best['name']} and start the loss scale at {best['scale']:.0f}.",
                f"Without a scale {before:.0%} of the gradients would be lost.",
            ],
        },
        "modules": [
            {
                "name": module,
                "type": "LayerNorm" if module.endswith("norm") else "Linear",
                "parameters": None if given[module][0] is None else histogram(given[module][0]),
                "activations": None if given[module][1] is None else histogram(given[module][1]),
                "fates": fates[module],
            }
            for module in given
        ],
        "total": {
            "parameters": histogram(_joined([a for a, _ in given.values()])),
            "activations": histogram(_joined([b for _, b in given.values()])),
        },
    }
    return {**json.loads(json.dumps(audit, allow_nan=False)), **changes}


def with_audit(run_file: Path, audit: object) -> Path:
    """Adds an audit to a run file, as the line that a run carries it in."""
    with run_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(audit) + "\n")
    return run_file


def _format(name: str, scale: float, every: Tensor, fates: Mapping[str, Any]) -> dict[str, Any]:
    _, largest, smallest_normal, smallest_subnormal = FORMATS[name]
    keep = [m for m, fate in fates.items() if (fate[name]["scaled"]["lost"] or 0) > TOO_MUCH]
    lost = shares(every, name, scale)["lost"] or 0.0
    return {
        "name": name,
        "largest": largest,
        "smallest_normal": smallest_normal,
        "smallest_subnormal": smallest_subnormal,
        "scale": scale,
        "holds": len(keep) < len(fates) / 2,
        "keep": keep,
        "words": f"{name} at scale {scale:.0f} rounds {lost:.2%} of the gradients to zero.",
        "unscaled": shares(every, name, 1.0),
        "scaled": shares(every, name, scale),
    }


def _scale(every: Tensor, name: str) -> float:
    _, largest, smallest_normal, _ = FORMATS[name]
    if smallest_normal < 1e-30:
        return 1.0
    top = float(every[torch.isfinite(every)].abs().max())
    return float(2.0 ** (math.floor(math.log2(largest / top)) - 3)) if top else 1.0


def _joined(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(0), *(each.flatten() for each in tensors if each is not None)])
