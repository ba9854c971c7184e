"""A control in ten lines: scaling, check, clip, step and schedule."""

import torch
from torch import nn

from gradilocks import GradientControl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
inputs = torch.randn(256, 16)
targets = inputs[:, :3].sum(dim=1, keepdim=True)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
control = GradientControl(optimizer, model=model, clip=1.0)
scheduler = control.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100))
for _ in range(100):
    loss = nn.functional.mse_loss(model(inputs), targets)
    control.backward(loss)
    outcome = control.step()
    control.zero_grad()
    scheduler.step()

print(outcome)
assert not outcome.skipped
assert loss.item() < 0.1
