"""A run file read with pandas (`pip install pandas`): one JSON object per line."""

import tempfile
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from gradilocks import GradientControl, SkipSpikes, chain

path = Path(tempfile.mkdtemp()) / "run.jsonl"
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
clip = chain(SkipSpikes(window=32), 1.0)
control = GradientControl(optimizer, model=model, scale=None, clip=clip, record=path)
for step in range(60):
    x = torch.randn(64, 8) * (30.0 if step == 40 else 1.0)
    control.backward((model(x) - x.sum(dim=1, keepdim=True)).square().mean())
    control.step()
    control.zero_grad()
    if step % 20 == 19:
        control.log(bias=model.bias.item())
del control  # Writes the last lines; a script that ends does the same.

lines = pd.read_json(path, lines=True)
steps = lines[lines.kind == "step"].set_index("step")
print(steps[["loss", "norm", "limit", "clipped", "skipped"]].iloc[[0, 1, 39, 40, 41]])
print("rejected:", steps.index[steps.rejected == 1].tolist())
print("logged:", lines[lines.kind == "log"].set_index("step")["values"].to_dict())
assert len(steps) == 60
assert steps.index[steps.rejected == 1].tolist() == [41]
