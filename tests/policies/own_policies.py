"""Policies as users write them: without a base class, and with one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradilocks.clip import ClipPolicy, Limit


@dataclass(frozen=True)
class NotAboveTheLast:
    """Without a base class: bounds the norm by that of the previous step."""

    slack: float = 1.0

    def init(self):
        return {"last": torch.full((), math.inf, dtype=torch.float64)}

    def limit(self, norms, total, state):
        bound = self.slack * state["last"]
        factor = torch.where(total > bound, bound / total, 1.0)
        return Limit(factor, bound, torch.zeros_like(total, dtype=torch.bool))

    def update(self, norms, total, limit, state):
        return {"last": torch.minimum(total, limit.bound)}


@dataclass(frozen=True)
class ClipPerTensor(ClipPolicy):
    """With the base class: clips every gradient to `max_norm`."""

    max_norm: float
    per = "tensor"

    def limit(self, norms, total, state):
        factor = torch.clamp(self.max_norm / (norms + 1e-6), max=1.0)
        return Limit(factor, torch.full_like(total, math.inf), torch.zeros_like(total, dtype=torch.bool))


@dataclass(frozen=True)
class Thirds:
    """A scale policy without a base class: a third after an overflow, otherwise threefold."""

    begin: float = 9.0
    min_scale = 1e-3
    max_scale = 1e6

    def init(self):
        return {"scale": torch.full((), self.begin)}

    def update(self, state, overflow, largest):
        factor = torch.where(overflow, 1 / 3, 3.0)
        return {"scale": (state["scale"] * factor).clamp(self.min_scale, self.max_scale)}
