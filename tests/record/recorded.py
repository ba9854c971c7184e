"""A small training run with a recorder, for the tests of recording."""

from __future__ import annotations

import torch
from torch import nn

from gradilocks import GradientControl

INF, NAN = float("inf"), float("nan")


def small_model(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def train(control, model, *, steps, bad=None, start=1):
    """`steps` steps; the loss of a step is multiplied by what `bad` says."""
    device = next(model.parameters()).device
    for number in range(start, start + steps):
        inputs = torch.full((4, 6), 0.1 * number, device=device)
        factor = (bad or {}).get(number, 1.0)
        control.backward(model(inputs).square().mean() * factor)
        control.step()
        control.zero_grad()


def recorded(record, *, steps=5, bad=None, device="cpu", optimizer=None, **settings):
    """A control that has taken some steps."""
    model = small_model(device)
    made = (optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)))(model.parameters())
    control = GradientControl(made, model=model, record=record, **settings)
    train(control, model, steps=steps, bad=bad)
    return control, model
