"""A script to audit, in parts, and what an audit of it has found."""

from __future__ import annotations

from pathlib import Path

import gradilocks
from gradilocks.lab.audit import Audit

HEAD = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
"""
LOOP = """
for number in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 6)).square().mean()
    loss.backward()
    optimizer.step()
    print("stepped", number)
print("to the end")
"""


def found_in(folder: Path) -> Audit:
    (path,) = (folder / "runs").glob("*.jsonl")
    return Audit.from_plain(gradilocks.read_run(path).audit)
