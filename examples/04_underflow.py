"""Underflow in fp16 and its remedy: a gradient of 6e-8, and a training run whose gradients round to zero."""

import torch
from torch import nn

from gradilocks import GradientControl, emulate, explain

for row in explain(6e-8, scale=32768.0):
    if row.format.name == "fp16":
        print(f"6e-8 x {row.scale:g} = {row.value * row.scale:.3g}: {row.describe()}")
fp16 = {row.scale: row for row in explain(6e-8, scale=32768.0) if row.format.name == "fp16"}
assert fp16[1.0].significant_bits == 1  # Subnormal: 1 of 11 significant bits.
assert fp16[32768.0].significant_bits == 11
assert f"{fp16[32768.0].stored:.2e}" == "1.97e-03"


def train(scale: object) -> tuple[float, float]:
    """Trains with gradients near 1e-9; returns the share of zero gradients at the first step and the final loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-20)
    control = GradientControl(optimizer, model=model, scale=scale)
    inputs = torch.randn(128, 16)
    targets = inputs[:, :4].sum(dim=1, keepdim=True)
    zeros = []
    for _ in range(100):
        control.zero_grad()
        with emulate("fp16"):  # Rounds the matrix products as a tensor core does, on any device.
            loss = nn.functional.mse_loss(model(inputs), targets)
        control.backward(loss * 1e-7)  # A large global batch divides the loss like this.
        weights = [param.grad for param in model.parameters() if param.dim() == 2]
        zeros.append(sum((grad == 0).sum().item() for grad in weights) / sum(grad.numel() for grad in weights))
        control.step()
    return zeros[0], loss.item()


for name, scale in (("no scale", None), ("scale 32,768", 32768.0), ("dynamic", "dynamic")):
    zero, final_loss = train(scale)
    print(f"{name:>12}: {zero:6.1%} of the weight gradients are zero, final loss {final_loss:.4f}")
    assert zero > 0.9 if scale is None else zero < 0.1
    assert final_loss > 0.4 if scale is None else final_loss < 0.04
