"""A training of a few steps whose checkpoints are kept in data/, for every policy.

`python -m tests.state.checkpoint_program FOLDER` writes them with whatever Gradilocks is
importable. Those in data/ were written by version 0.2.0, before its engine was rebuilt, and are
never written again: they stand for the checkpoints that users have.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch

from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    GradientControl,
    GradScaler,
    HeadroomScale,
    NoClip,
    NoScale,
    QuantileClip,
    SkipSpikes,
    StaticScale,
    ZScoreClip,
    chain,
)

SCALES = {
    "NoScale": NoScale(),
    "StaticScale": StaticScale(1024.0),
    "DynamicScale": DynamicScale(init_scale=512.0, growth_interval=2, hysteresis=2),
    "DynamicScale.torch": DynamicScale.torch(),
    "DynamicScale.megatron": DynamicScale.megatron(growth_interval=2),
    "DynamicScale.deepspeed": DynamicScale.deepspeed(growth_interval=2),
    "DynamicScale.fairseq": DynamicScale.fairseq(growth_interval=2, tolerance=0.25),
    "HeadroomScale": HeadroomScale(growth_interval=3),
}
CLIPS = {
    "NoClip": NoClip(),
    "ClipByNorm": ClipByNorm(0.75, order=3),
    "ClipByValue": ClipByValue(0.5),
    "ClipPerTensor": ClipPerTensor(0.5),
    "ClipPerGroup": ClipPerGroup({"head.*": 0.5, 0: None}, otherwise=2.0),
    "AdaptiveClip": AdaptiveClip(0.05, exclude=("head.bias",)),
    "QuantileClip": QuantileClip(0.5, window=4, warmup=1),
    "ZScoreClip": ZScoreClip(threshold=1.5, alpha=0.9, warmup=2),
    "SkipSpikes": SkipSpikes(sigmas=1.0, window=4, at_least=2),
    "AdaGC": AdaGC(warmup=2, warmup_norm=1.5),
    "chain": chain(SkipSpikes(sigmas=3.0, window=3, at_least=2), AdaGC(warmup=1), 1.0),
}
POLICIES = {**SCALES, **CLIPS}

FACTORS = [1.0, 1.5, math.inf, 0.5, 4.0, 1.25]
"""By what the gradients of each step are multiplied."""
SAVED_AFTER = 4


class Training:
    """A small model under a control or a scaler with one policy, driven with known gradients."""

    def __init__(self, name: str, kind: str) -> None:
        self.model = torch.nn.Sequential()
        self.model.add_module("body", torch.nn.Linear(3, 2))
        self.model.add_module("head", torch.nn.Linear(2, 1))
        for number, param in enumerate(self.model.parameters()):
            values = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape)
            param.data = 0.25 * (values + 1.0) * (-1.0) ** number
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        if kind == "control":
            options = {"scale": POLICIES[name]} if name in SCALES else {"clip": POLICIES[name]}
            self.holder = GradientControl(self.optimizer, model=self.model, **options)
        else:
            options = {"policy": POLICIES[name]} if name in SCALES else {"clip": POLICIES[name]}
            self.holder = GradScaler("cpu", model=self.model, **options)

    def step(self, factor: float) -> list[float | None]:
        """What became of a step: norm, whether it was skipped, the scale after it, the weights."""
        self.optimizer.zero_grad()
        loss = torch.zeros((), requires_grad=True) * 1.0
        in_scaler = isinstance(self.holder, GradScaler)
        scale = (self.holder.scale if in_scaler else self.holder.scale_loss)(loss + 1.0).item()
        for number, param in enumerate(self.model.parameters()):
            values = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape)
            gradient = (values - number) / 4.0
            if factor == math.inf:
                gradient.view(-1)[-1] = math.inf
            else:
                gradient *= factor
            param.grad = gradient * scale
        if in_scaler:
            self.holder.step(self.optimizer)
            outcome = self.holder.outcome
            self.holder.update()
            after = self.holder.get_scale()
        else:
            outcome = self.holder.step()
            after = self.holder.scale
        weights = [x for p in self.model.parameters() for x in p.detach().flatten().tolist()]
        return [float(outcome.skipped), after, *weights]


def kinds_of(name: str) -> list[str]:
    """Who can have the policy: a scaler without a scale would be none."""
    return ["control"] if name == "NoScale" else ["control", "scaler"]


def write(folder: Path) -> None:
    for name in POLICIES:
        told = {}
        for kind in kinds_of(name):
            training = Training(name, kind)
            before = [training.step(factor) for factor in FACTORS[:SAVED_AFTER]]
            saved = training.holder.state_dict()
            after = [training.step(factor) for factor in FACTORS[SAVED_AFTER:]]
            told[kind] = {"before": before, "state_dict": saved, "after": after}
        (folder / f"{name}.json").write_text(json.dumps(told, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
