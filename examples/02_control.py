"""GradientControl: too large, then just right.

The scale starts far too high for float16. Each overflow skips the step and halves the scale, until
the gradients fit; then training begins, clipped where it has to be.
"""

import torch
from torch import nn

from gradilocks import DynamicScale, GradientControl


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    control = GradientControl(
        optimizer,
        model=model,
        scale=DynamicScale(init_scale=2.0**24, growth_interval=10),
        clip=0.5,
    )
    inputs = torch.randn(64, 16)
    targets = inputs[:, :4].sin()

    print("step      scale      loss      norm  what happened")
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(inputs).float() - targets).square().mean()
        control.backward(loss)
        outcome = control.step()
        control.zero_grad()

        if outcome.skipped:
            happened = f"skipped: {outcome.describe(at_most=2)}"
        else:
            happened = "clipped" if outcome.clipped else "stepped"
        print(
            f"{outcome.step:4d}  {outcome.scale:9.0f}  {loss.item():8.4f}  {outcome.norm:8.4f}  "
            f"{happened}"
        )
    assert not outcome.skipped
    assert loss.item() < 0.1


if __name__ == "__main__":
    main()
