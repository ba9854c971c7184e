"""Optimizers that unscale, clip and step in one pass, in place of torch's.

On a GPU the whole step after backward is three launches, whatever the number of tensors, and
nothing waits. On a CPU the same code takes torch's fused kernels.
"""

import copy

import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    twin = copy.deepcopy(model)
    inputs = torch.randn(256, 16, device=device)
    targets = inputs.sum(dim=1, keepdim=True)

    losses = {}
    for name, net, optimizer in (
        ("torch", twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)),
        ("gradilocks", model, gradilocks.optim.AdamW(model.parameters(), lr=1e-2)),
    ):
        control = GradientControl(optimizer, model=net, clip=1.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        for _ in range(100):
            loss = (net(inputs) - targets).square().mean()
            control.backward(loss)
            outcome = control.step()
            control.zero_grad()
            if not outcome.skipped:
                schedule.step()
        losses[name] = loss.item()
        print(f"{name}: loss {loss.item():.6f}, last norm {outcome.norm:.3f}")

    # The state is torch's, so a checkpoint goes either way.
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state[model[0].weight]["step"] == 100
    difference = abs(losses["torch"] - losses["gradilocks"])
    print(f"difference after 100 steps: {difference:.1e}")
    assert difference < 1e-3
    return losses


if __name__ == "__main__":
    main()
