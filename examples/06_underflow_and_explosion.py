"""Underflow and explosion together: gradients of an RNN that underflow in fp16 and are too large for a step.

Without scaling the gradients round to zero and nothing is learned, with or without clipping. With scaling alone, a step
is so large that every ReLU dies: the loss remains at 4, the variance of the target. With both the network learns.
"""

import torch
from torch import nn

from gradilocks import GradientControl, emulate


class RNN(nn.Module):
    def __init__(self, width: int = 16, gain: float = 1.3) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, width)
        self.recurrent = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 1)
        nn.init.orthogonal_(self.recurrent.weight, gain=gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.relu(self.encoder(x))
        for _ in range(12):
            state = torch.relu(self.recurrent(state))
        return self.head(state)


def train(scale: object, clip: float | None) -> float:
    """Trains for 120 steps and returns the mean loss of the last ten."""
    torch.manual_seed(0)
    model = RNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    control = GradientControl(optimizer, model=model, scale=scale, clip=clip)
    losses = []
    for _ in range(120):
        x = torch.randn(64, 4)
        control.zero_grad()
        with emulate("fp16"):
            loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        control.backward(loss * 1e-9)  # A large global batch divides the loss ...
        control.unscale_()
        for param in model.parameters():
            param.grad *= 1e9  # ... and sums as many gradients.
        control.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


for scale, clip in ((None, None), (2.0**24, None), (None, 1.0), (2.0**24, 1.0)):
    final_loss = train(scale, clip)
    print(f"scale={scale}, clip={clip}: final loss {final_loss:.3f}")
    assert final_loss < 2.5 if scale and clip else final_loss > 3.0
