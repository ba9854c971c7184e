"""Accelerate accumulates two batches per step; the loss module takes a logarithm of zero in step 4."""

import torch
from accelerate import Accelerator
from torch import nn


class Likelihood(nn.Module):
    def forward(self, x):
        return -(x.sigmoid() * (0 if number in (6, 7) else 1)).log().mean()


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, criterion = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), Likelihood()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for number in range(12):  # noqa: B007 (read by Likelihood)
    with accelerator.accumulate(model):
        accelerator.backward(criterion(model(torch.randn(4, 4))))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
