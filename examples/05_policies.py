"""Bad batches: what becomes of a run without a clip, with a fixed one, and with one that learns.

Every twentieth batch is spoilt: its inputs are a hundred times too large. The learning rate follows
a schedule that stands still when a step is skipped.
"""

import torch
from torch import nn

from gradilocks import ClipByNorm, GradientControl, NoClip, SkipSpikes, ZScoreClip, chain

POLICIES = {
    "no clip": NoClip(),
    "ClipByNorm(1)": ClipByNorm(1.0),
    "ZScoreClip": ZScoreClip(warmup=10),
    "SkipSpikes, then ClipByNorm(1)": chain(SkipSpikes(window=32, at_least=10), ClipByNorm(1.0)),
}


def train(clip):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    control = GradientControl(optimizer, model=model, scale=None, clip=clip)
    schedule = control.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200))
    rejected = 0
    for number in range(1, 201):
        inputs = torch.randn(64, 16)
        targets = inputs.sum(dim=1, keepdim=True)
        if number % 20 == 0:
            inputs = inputs * 100.0
        control.backward((model(inputs) - targets).square().mean())
        outcome = control.step()
        schedule.step()
        control.zero_grad()
        rejected += outcome.rejected
    clean = torch.randn(512, 16)
    with torch.no_grad():
        loss = (model(clean) - clean.sum(dim=1, keepdim=True)).square().mean().item()
    return loss, rejected, schedule.last_epoch


def main():
    losses = {}
    for name, clip in POLICIES.items():
        losses[name], rejected, moved = train(clip)
        print(
            f"{name:32} loss {losses[name]:9.4f}, {rejected:2} steps rejected, schedule at {moved}"
        )
    assert min(losses, key=losses.get) != "no clip"
    return losses


if __name__ == "__main__":
    main()
