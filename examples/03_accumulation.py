"""Gradient accumulation: call backward() once a micro-batch and step() once a batch.

The scale cannot move between micro-batches, the limit applies to their sum, and one bad micro-batch
costs the whole step but never the weights.
"""

import copy

import torch
from torch import nn

from gradilocks import GradientControl

MICRO_BATCHES = 4


def new_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, GradientControl(optimizer, model=model, clip=0.1)


def main():
    torch.manual_seed(1)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True)

    whole_model, whole = new_run()
    whole.backward((whole_model(inputs) - targets).square().mean())
    at_once = whole.step()

    model, control = new_run()
    for micro_inputs, micro_targets in zip(
        inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True
    ):
        loss = (model(micro_inputs) - micro_targets).square().mean()
        control.backward(loss / MICRO_BATCHES)  # The mean over the batch, not the sum.
    in_parts = control.step()
    control.zero_grad()

    print(f"one batch of 64:        norm {at_once.norm:.6f}, clipped: {at_once.clipped}")
    print(f"4 micro-batches of 16:  norm {in_parts.norm:.6f}, clipped: {in_parts.clipped}")

    before = copy.deepcopy(model.state_dict())
    for number in range(MICRO_BATCHES):
        bad = float("inf") if number == 2 else 1.0
        control.backward((model(inputs[:16]) * bad).square().mean() / MICRO_BATCHES)
    outcome = control.step()
    same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    print(f"with one bad micro-batch: skipped: {outcome.skipped}, weights unchanged: {same}")
    assert same
    assert outcome.skipped
    assert abs(at_once.norm - in_parts.norm) < 1e-5 * at_once.norm


if __name__ == "__main__":
    main()
