"""Exploding gradients of an RNN, with and without clipping.

The recurrent weight multiplies the norm of the state by 1.15, so 60 time steps can multiply a gradient by 1.15**60 =
4,400.
"""

import torch
from torch import nn

from gradilocks import GradientControl


class MeanRNN(nn.Module):
    """Reads 60 numbers and predicts their mean."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.encoder = nn.Linear(1, width)
        self.recurrent = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 1)
        nn.init.orthogonal_(self.recurrent.weight, gain=1.15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], self.width)
        for number in x.unbind(dim=1):
            state = torch.relu(self.recurrent(state) + self.encoder(number[:, None]))
        return self.head(state)


def train(clip: float | None) -> tuple[list[float], list[float]]:
    """Trains for 80 steps and returns the gradient norms and the losses."""
    torch.manual_seed(0)
    model = MeanRNN()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.01), model=model, scale=None, clip=clip)
    norms, losses = [], []
    for _ in range(80):
        x = torch.rand(32, 60)
        control.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.mean(dim=1, keepdim=True))
        control.backward(loss)
        norms.append(control.step().norm)
        losses.append(loss.item())
    return norms, losses


for clip in (None, 1.0):
    norms, losses = train(clip)
    print(f"clip={clip}: first norm {norms[0]:.2e}, loss {losses[0]:.2e} -> {losses[1]:.2e} -> {losses[-1]:.2e}")
    assert norms[0] > 1e3
    assert losses[-1] < 0.01 * losses[0] if clip else not losses[-1] < losses[0]
