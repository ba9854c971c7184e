"""Trains small models in many ways and prints a digest of every trajectory.

Two versions of Gradilocks step alike just if their digests are equal on one machine:

    PYTHONPATH=old/src python benchmarks/trajectories.py --out before.json
    PYTHONPATH=src python benchmarks/trajectories.py --against before.json

Digests cover parameters, optimizer state, scales and what each step said, bit for bit, over steps
of which some overflow. They differ between machines and versions of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradilocks
from gradilocks import optim

STEPS = 24
BAD = {5: float("inf"), 6: float("nan"), 15: float("inf")}


def model_on(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(13, 37), nn.Tanh(), nn.LayerNorm(37), nn.Linear(37, 300), nn.Tanh(),
        nn.Linear(300, 300, bias=False), nn.Tanh(), nn.Linear(300, 1),
    )  # fmt: skip
    return layers.to(device, dtype)


def batches(device: str, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(16, 13, generator=source).to(device, dtype)
        yield step, x, torch.randn(16, 1, generator=source).to(device, dtype)


def loss_of(model: nn.Module, step: int, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).float().square().mean() * (1.0 + 40.0 * (step % 7 == 3))
    return loss * BAD[step] if step in BAD else loss


class Digest:
    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                value = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
                self._sum.update(value.numpy().tobytes())
            else:
                self._sum.update(repr(value).encode())

    def add_state(self, model: nn.Module, optimizer: Any) -> str:
        self.add(*model.parameters())
        for state in optimizer.state_dict()["state"].values():
            self.add(*(state[name] for name in sorted(state)))
        return self._sum.hexdigest()[:16]


def by_control(model: nn.Module, optimizer: Any, device: str, **settings: Any) -> str:
    digest = Digest()
    control = gradilocks.GradientControl(optimizer, model=model, **settings)
    dtype = next(model.parameters()).dtype
    for step, x, y in batches(device, dtype):
        control.backward(loss_of(model, step, x, y))
        outcome = control.step()
        control.zero_grad()
        digest.add(outcome.skipped, outcome.norm, outcome.clipped, control.scale, outcome.culprits)
    return digest.add_state(model, optimizer)


def by_scaler(
    model: nn.Module, optimizer: Any, device: str, *, clip_by: str = "", **settings: Any
) -> str:
    digest = Digest()
    kind = torch.device(device).type
    scaler = gradilocks.GradScaler(kind, model=model, **settings)
    dtype = next(model.parameters()).dtype
    for step, x, y in batches(device, dtype):
        scaler.scale(loss_of(model, step, x, y)).backward()
        if clip_by:
            scaler.unscale_(optimizer)
        if clip_by == "norm":
            digest.add(gradilocks.clip_grad_norm_(model.parameters(), 1.0))
        elif clip_by == "value":
            gradilocks.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        outcome = scaler.outcome
        assert outcome is not None
        digest.add(outcome.skipped, scaler.get_scale(), outcome.culprits)
    return digest.add_state(model, optimizer)


def by_clip_functions(model: nn.Module, optimizer: Any, device: str) -> str:
    digest = Digest()
    dtype = next(model.parameters()).dtype
    for step, x, y in batches(device, dtype):
        loss_of(model, step, x, y).backward()
        norm = gradilocks.clip_grad_norm_(model.parameters(), 1.0)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        digest.add(norm, gradilocks.get_total_norm(grads), gradilocks.get_total_norm(grads, 1.0))
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
    return digest.add_state(model, optimizer)


def by_closure(model: nn.Module, optimizer: Any, device: str) -> str:
    digest = Digest()
    control = gradilocks.GradientControl(optimizer, model=model, clip=1.0)
    dtype = next(model.parameters()).dtype
    for step, x, y in batches(device, dtype):

        def closure(step: int = step, x: Tensor = x, y: Tensor = y) -> Tensor:
            control.zero_grad()
            loss = loss_of(model, step, x, y)
            control.backward(loss)
            return loss

        outcome = control.step(closure)
        digest.add(outcome.skipped, outcome.norm, control.scale)
    return digest.add_state(model, optimizer)


def optimizers(device: str) -> dict[str, Callable[[Any], Any]]:
    made: dict[str, Callable[[Any], Any]] = {}
    plain = torch.optim
    for kind in (
        plain.SGD, plain.Adam, plain.AdamW, plain.RMSprop,
        plain.Adagrad, plain.NAdam, plain.Adamax, plain.Rprop,
    ):  # fmt: skip
        made[kind.__name__] = lambda params, kind=kind: kind(params, lr=1e-3)
    for fused in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        made[f"{fused.__name__} fused"] = lambda params, kind=fused: kind(
            params, lr=1e-3, weight_decay=0.01, fused=True
        )
    made["SGD fused momentum"] = lambda params: torch.optim.SGD(
        params, lr=1e-3, momentum=0.9, fused=True
    )
    made["our AdamW"] = lambda params: optim.AdamW(params, lr=1e-3, weight_decay=0.01)
    made["our Adam amsgrad"] = lambda params: optim.Adam(params, lr=1e-3, amsgrad=True)
    made["our SGD"] = lambda params: optim.SGD(params, lr=1e-3, momentum=0.9, nesterov=True)
    made["our AdamW masters"] = lambda params: optim.AdamW(params, lr=1e-3, master_weights=True)
    return made


def policies() -> dict[str, dict[str, Any]]:
    g = gradilocks
    clips: dict[str, Any] = {
        "none": None, "norm": 1.0, "inf norm": g.ClipByNorm(0.01, order=float("inf")),
        "3 norm": g.ClipByNorm(0.3, order=3.0), "value": g.ClipByValue(0.01),
        "tensor": g.ClipPerTensor(0.1), "group": g.ClipPerGroup({"*.bias": 0.01}, otherwise=0.5),
        "adaptive": g.AdaptiveClip(0.02), "quantile": g.QuantileClip(), "zscore": g.ZScoreClip(),
        "adagc": g.AdaGC(), "spikes": g.SkipSpikes(),
        "chain": g.chain(g.SkipSpikes(), g.ClipByNorm(1.0)),
    }  # fmt: skip
    scales: dict[str, Any] = {
        "dynamic": "dynamic", "no scale": None, "static": 1000.0,
        "short": g.DynamicScale(init_scale=2.0**10, growth_interval=4, hysteresis=2),
        "deepspeed": g.DynamicScale.deepspeed(growth_interval=5), "headroom": g.HeadroomScale(),
    }  # fmt: skip
    made = {f"clip {name}": {"clip": clip} for name, clip in clips.items()}
    for (scale, rule), clip in itertools.product(scales.items(), ("none", "norm", "value")):
        made[f"{scale}, clip {clip}"] = {"scale": rule, "clip": clips[clip]}
    return made


def trajectories(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    every = optimizers(device)
    float32, bfloat16, float64 = torch.float32, torch.bfloat16, torch.float64

    def task(way: Any, name: str, dtype: torch.dtype, **settings: Any) -> Callable[[], str]:
        def run() -> str:
            model = model_on(device, dtype)
            return str(way(model, every[name](model.parameters()), device, **settings))

        return run

    for name in every:
        for dtype in (float32, bfloat16, float64):
            if (name, dtype, device) == ("SGD fused momentum", bfloat16, "cpu"):
                continue  # torch's own kernel gives other bits from run to run there.
            about = f"{name}, {str(dtype).removeprefix('torch.')}"
            yield f"control, {about}", task(by_control, name, dtype, clip=1.0)
            yield f"scaler, {about}", task(by_scaler, name, dtype)
            yield f"scaler clip norm, {about}", task(by_scaler, name, dtype, clip_by="norm")
            yield f"clip functions, {about}", task(by_clip_functions, name, dtype)
        yield f"scaler clip value, {name}", task(by_scaler, name, float32, clip_by="value")
    for policy, settings in policies().items():
        for name in ("SGD", "AdamW fused", "our AdamW"):
            yield f"control {policy}, {name}", task(by_control, name, float32, **settings)
    yield (
        "closure",
        lambda: by_closure(
            model := model_on(device, float32),
            torch.optim.LBFGS(model.parameters(), max_iter=4),
            device,
        ),
    )
    g = gradilocks
    for policy, settings in {
        "clip": {"clip": 1.0}, "policy": {"policy": g.HeadroomScale()},
        "both": {"policy": g.HeadroomScale(), "clip": 1.0},
        "short": {"growth_interval": 4, "init_scale": 2.0**10},
        "quantile": {"clip": g.QuantileClip()}, "tensor": {"clip": g.ClipPerTensor(0.1)},
    }.items():  # fmt: skip
        for name in ("SGD", "AdamW fused", "our AdamW"):
            yield f"scaler {policy}, {name}", task(by_scaler, name, float32, **settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where the digests are written")
    parser.add_argument("--against", type=Path, help="digests that these must equal")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[str, str] = {}
    for name, run in trajectories(given.device):
        try:
            found[name] = run()
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"[:120]
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.against:
        before = json.loads(given.against.read_text())
        different = [name for name in before if before[name] != found.get(name)]
        for name in different:
            print(f"differs: {name}: {before[name]} -> {found.get(name)}")
        print(f"{len(before) - len(different)} of {len(before)} trajectories are alike")
        return 1 if different else 0
    print(f"{len(found)} trajectories")
    return 0


if __name__ == "__main__":
    sys.exit(main())
