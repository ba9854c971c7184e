"""A step was bad hours ago, and never again: run it once more from its file.

The router divides by the weights that dropout leaves. One day it leaves none. The control skips the
step and writes it down: parameters, optimizer state, inputs, random states. `BadStep` puts them
into a fresh model and runs the step again. `gradilocks run --guard stop train.py` writes the same
file for a script that knows nothing of it.
"""

import torch
from torch import nn

import gradilocks


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.drop = nn.Linear(8, 4), nn.Dropout(0.4)

    def forward(self, x):
        weights = self.drop(self.scores(x).softmax(-1))
        return weights / weights.sum(-1, keepdim=True)  # 0 / 0 if all of a row were dropped.


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Router(), nn.Linear(4, 1))


torch.manual_seed(0)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
control = gradilocks.GradientControl(
    optimizer, model=model, scale=None, keep_bad_step="runs/first-bad-step.pt"
)
for _ in range(100):
    control.backward(model(torch.randn(2, 8)).square().mean())
    control.step()
    control.zero_grad()

# On another day, on another machine:
bad = gradilocks.BadStep.load("runs/first-bad-step.pt")
print(f"step {bad.step} was bad in", *(n for n, g in bad.gradients.items() if g["nan"] or g["inf"]))

model = build()
bad.load_into(model, torch.optim.AdamW(model.parameters()))
found = bad.run(model)
print(f"{found.certainty}: {found.text}")

# By hand, to look at what is inside:
(call,) = bad.calls
call.generators.restore()
with torch.no_grad():
    weights = model[2].drop(model[2].scores(model[:2](*call.args)).softmax(-1))
print("what dropout has left:", weights.sum(-1).tolist())
