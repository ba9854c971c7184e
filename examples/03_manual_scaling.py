"""Manual loss scaling compared with a control: the same numbers with fewer lines."""

import torch
from torch import nn

from gradilocks import GradientControl, StaticScale

SCALE, MAX_NORM, STEPS = 1024.0, 1.0, 30
torch.manual_seed(0)
inputs = torch.randn(STEPS, 32, 8)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


manual, optimizer = new_model()
for x in inputs:
    optimizer.zero_grad()
    (loss_of(manual, x) * SCALE).backward()
    grads = [param.grad for param in manual.parameters()]
    for grad in grads:
        grad /= SCALE
    if all(grad.isfinite().all() for grad in grads):  # One wait for the device per tensor.
        torch.nn.utils.clip_grad_norm_(manual.parameters(), MAX_NORM)
        optimizer.step()

controlled, optimizer = new_model()
control = GradientControl(optimizer, model=controlled, scale=StaticScale(SCALE), clip=MAX_NORM)
for x in inputs:
    control.zero_grad()
    control.backward(loss_of(controlled, x))
    control.step()

pairs = zip(manual.parameters(), controlled.parameters(), strict=True)
difference = max((a - b).abs().max().item() for a, b in pairs)
print(f"largest difference of a parameter after {STEPS} steps: {difference:.1e}")
assert difference < 1e-6
