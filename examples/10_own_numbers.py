"""Own numbers: a validation loss beside the steps, and the run found again by its numbers.

Two runs with different learning rates, each with its configuration in the header, are compared by
the last validation loss that was logged. On a GPU `log` would not wait for the number either.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from gradilocks import GradientControl, read_run


def data(count):
    inputs = torch.randn(count, 8)
    return inputs, inputs.sum(dim=1, keepdim=True)


def train(path, *, lr, epochs=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    config = {"lr": lr, "epochs": epochs}
    control = GradientControl(optimizer, model=model, clip=1.0, record=path, config=config)
    for epoch in range(1, epochs + 1):
        for _ in range(20):
            inputs, targets = data(64)
            control.backward((model(inputs) - targets).square().mean())
            control.step()
            control.zero_grad()
        with torch.no_grad():
            inputs, targets = data(256)
            control.log(val_loss=(model(inputs) - targets).square().mean(), epoch=epoch)
    control.recorder.close()


def main():
    with tempfile.TemporaryDirectory() as folder:
        for lr in (1e-3, 1e-2):
            train(Path(folder) / f"lr-{lr}.jsonl", lr=lr)
        for path in sorted(Path(folder).glob("*.jsonl")):
            run = read_run(path)
            course = ", ".join(f"{value:.2f} at {step}" for step, value in run.logged["val_loss"])
            print(f"lr {run.header.config['lr']}: val_loss {course}")


if __name__ == "__main__":
    main()
