"""Clip after unscaling: otherwise the limit of 1 is compared with the norm of scaled gradients."""

import torch
from torch import nn

from gradilocks import GradScaler, clip_grad_norm_

MAX_NORM = 1.0


def first_step(clip_before_unscaling: bool) -> float:
    """Takes one step and returns the norm of the gradients that the optimizer received."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**16)
    loss = (model(torch.ones(4, 8)) - 10.0).square().mean()
    scaler.scale(loss).backward()
    if not clip_before_unscaling:
        scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)  # Unscales unless unscale_ was called.
    scaler.update()
    used = torch.cat([param.grad.flatten() for param in model.parameters()]).norm().item()
    order = "before" if clip_before_unscaling else "after"
    print(f"clip {order:6} unscaling: the clip function received norm {norm:.4g}, the optimizer {used:.4g}")
    return used


wrong = first_step(clip_before_unscaling=True)
right = first_step(clip_before_unscaling=False)
print(f"the wrong order makes the step {right / wrong:,.0f} times too small")
assert abs(right - MAX_NORM) < 1e-4
assert wrong < 1e-4
