"""A step is skipped: which operation made the NaN?

The attention divides by the length of its keys. Now and then a batch has an empty row, and the
gradient of a length is 0 / 0 there. Every gradient before it is NaN, so the names of the parameters
do not tell; the trace does.
"""

import logging

import torch
from torch import nn

import gradilocks

logging.basicConfig(format="%(message)s")


class Unit(nn.Module):
    """x / ‖x‖, with a floor under the length that does not help its gradient."""

    def forward(self, x):
        length = x.square().sum(-1, keepdim=True).sqrt()
        return x / length.clamp_min(1e-6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8, bias=False)
        self.unit = Unit()

    def forward(self, x):
        scores = self.unit(self.query(x)) @ self.unit(self.key(x)).transpose(-1, -2)
        return scores.softmax(-1) @ x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False), Attention(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
control = gradilocks.GradientControl(optimizer, model=model)

with gradilocks.trace(model, control=control) as tracer:
    for step in range(1, 41):
        inputs = torch.randn(2, 5, 8)
        if step % 10 in (0, 1):
            inputs[0, 3] = 0.0
        control.backward(model(inputs).square().mean())
        outcome = control.step()
        control.zero_grad()
        if outcome.skipped:
            print(f"step {step} skipped; gradients with NaN: {', '.join(outcome.culprits)}")

for found in tracer.findings:
    print(f"step {found.step}, {found.phase}: {found.module} ({found.kind})")
