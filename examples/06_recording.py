"""Recording: train with a run file, overflow once, and read back who it was.

The file is written to a temporary folder. It has every step, and every fifth tensor by tensor.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from gradilocks import GradientControl, Recorder, read_run


def train(recorder, *, steps=40, overflow_at=25):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    control = GradientControl(optimizer, model=model, clip=1.0, record=recorder)
    for number in range(1, steps + 1):
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        if number == overflow_at:
            loss = loss * 1e36  # Times a scale of 65536, more than float32 holds.
        control.backward(loss)
        control.step()
        control.zero_grad()


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with Recorder(path, detail_every=5) as recorder:
            train(recorder)
        run = read_run(path)
    first, last = run.steps[0], run.steps[-1]
    print(f"{len(run.steps)} steps, loss {first.loss:.2f} to {last.loss:.2f}, {run.end.status}")
    for step in run.steps:
        if step.skipped:
            names = ", ".join(f"{c.name} ({c.inf} Inf, {c.nan} NaN)" for c in step.culprits)
            print(f"step {step.step} was skipped at scale {step.scale:g}: {names}")
    names = run.optimizers[0].names
    for name, norm, ratio in zip(names, first.detail.norm, first.detail.update, strict=True):
        print(f"step 1: {name:8} gradient norm {norm:8.3g}, moved by {ratio:.2%} of itself")


if __name__ == "__main__":
    main()
