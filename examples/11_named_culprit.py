"""A training script with a fault. `gradilocks run examples/11_named_culprit.py` names the operation.

The fault: an empty sample gives a zero vector, and the derivative of sqrt at zero is infinite. The loss is finite.
"""

import torch
from torch import nn

torch.manual_seed(0)


class Normalize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.square().sum(dim=-1, keepdim=True).sqrt()
        return x / (length + 1e-6)  # Finite at zero, but the derivative of sqrt at zero is not.


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 32, bias=False))
        self.normalize = Normalize()
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.normalize(self.encoder(x)))


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 121):
    x = torch.randn(64, 8)
    target = x[:, :4].argmax(dim=1)
    if step == 90:
        x[5] = 0.0  # An empty sample.
    loss = nn.functional.cross_entropy(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss of the last step: {loss.item()}")
