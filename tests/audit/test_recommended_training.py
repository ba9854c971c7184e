"""The recommendation itself: training under `emulate` with it matches float32, far off it fails.

Three small models of kinds that people train: a GPT on text, at a global batch of half a million
tokens by accumulation; a convolutional classifier with BatchNorm; a recurrent net on the adding
problem. Settings are those of float32; nothing was tuned for a format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradilocks
from gradilocks.demo.small_gpt import GPT, Batches, python_documentation
from gradilocks.lab.audit import Audit

TOLERANCE = 0.005
"""Of the final loss: rounding to fp16 moves it by up to 0.1 % here, from one scale to another; so
a run within half a percent has lost nothing. One that is off by five times as much has."""
FAR = 0.025


@dataclass(frozen=True)
class Task:
    """A model, its loss, its data, and how it is trained."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batches: Callable[[int], Callable[[], Any]]
    """Takes a seed."""
    steps: int
    lr: float
    accumulation: int = 1
    """Micro-batches of a global batch; one is computed, and stands for all of them."""


class Adder(nn.Module):
    """A recurrent cell, step by step, and a head on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        state = series.new_zeros(len(series), 32)
        for moment in series.unbind(1):
            state = self.cell(moment, state)
        return self.head(state).squeeze(1)


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


@cache
def documentation():
    return python_documentation()


def windows(seed: int) -> Callable[[], Any]:
    return Batches(documentation(), rows=8, length=64, seed=seed).draw


def images(seed: int) -> Callable[[], Any]:
    """Ten patterns in noise."""
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    drawn = torch.Generator().manual_seed(seed)

    def draw() -> Any:
        kinds = torch.randint(10, (64,), generator=drawn)
        return patterns[kinds] + 1.5 * torch.randn(64, 1, 8, 8, generator=drawn), kinds

    return draw


def sums(seed: int) -> Callable[[], Any]:
    """The adding problem: two of twenty numbers are marked, their sum is asked for."""
    drawn = torch.Generator().manual_seed(seed)

    def draw() -> Any:
        numbers, marks = torch.rand(64, 20, generator=drawn), torch.zeros(64, 20)
        for begin in (0, 10):
            marks.scatter_(1, torch.randint(begin, begin + 10, (64, 1), generator=drawn), 1.0)
        return torch.stack([numbers, marks], -1), (numbers * marks).sum(1)

    return draw


TASKS = {
    "a GPT on text": Task(
        lambda: GPT(vocabulary=len(documentation().vocabulary), length=64, width=32),
        lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        windows,
        steps=50,
        lr=3e-3,
        accumulation=1024,
    ),
    "a convolutional classifier": Task(
        classifier,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        images,
        steps=60,
        lr=3e-3,
    ),
    "a recurrent net": Task(
        Adder,
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        sums,
        steps=60,
        lr=1e-2,
    ),
}


def final_loss(task: Task, *, scale: Any = None, format: str = "fp32", keep: Any = ()) -> float:
    """Trains, and returns the mean loss of the last tenth of the steps."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    control = gradilocks.GradientControl(
        optimizer, model=model, scale=scale, clip=1.0, give_up_after=None
    )
    kept = [model.get_submodule(name) for name in keep]
    inside = gradilocks.emulate(format, keep=kept) if format != "fp32" else contextlib.nullcontext()
    draw, losses = task.batches(1), []
    for _ in range(task.steps):
        with inside:
            loss = task.loss(model, draw())
        control.backward(loss / task.accumulation)
        control.unscale_()
        for param in model.parameters():
            param.grad.mul_(task.accumulation)  # The sum of equal micro-batches.
        control.step()
        control.zero_grad()
        losses.append(loss.item())
    last = losses[-max(1, task.steps // 10) :]
    return sum(last) / len(last)


def audit_of(task: Task) -> Audit:
    torch.manual_seed(0)
    draw = task.batches(99)  # Other batches than those of the training.
    return gradilocks.audit(
        task.model(),
        lambda model, batch: task.loss(model, batch) / task.accumulation,
        [draw() for _ in range(4)],
    )


@pytest.mark.parametrize("name", TASKS)
def test_training_with_the_recommendation_matches_float32_and_far_off_it_does_not(name):
    task = TASKS[name]
    advice = audit_of(task).recommendation
    assert advice.format == "fp16"
    right = final_loss(task)

    def off_by(scale: Any) -> float:
        return abs(final_loss(task, scale=scale, format=advice.format, keep=advice.keep) - right)

    assert off_by(gradilocks.StaticScale(advice.scale)) < TOLERANCE * right
    assert off_by(gradilocks.DynamicScale(init_scale=advice.scale)) < TOLERANCE * right
    # Above: nearly every step overflows. Below: fp16 spans 40 doublings, of which these need most.
    assert off_by(gradilocks.StaticScale(advice.scale * 2.0**8)) > FAR * right
    assert off_by(gradilocks.StaticScale(advice.scale * 2.0**-32)) > FAR * right
