"""A training script without Gradilocks, for bench_record.py: python benchmarks/plain_script.py MODEL DEVICE STEPS

Prints one JSON line: milliseconds and processor milliseconds per step, and a digest of the trained parameters.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
from bench_training import GPT, Work
from torch import Tensor, nn

WARM_UP = 20
GPTS = {"cpu": Work(96, 128, 8, 4, (2, 32)), "cuda": Work(96, 256, 12, 4, (8, 128))}


def make(name: str, device: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model that returns its loss, and a batch."""
    torch.manual_seed(0)
    if name == "gpt":
        work = GPTS[device]
        tokens = torch.randint(work.vocabulary, (2, *work.batch))
        return GPT(work).to(device), (tokens[0].to(device), tokens[1].to(device))
    layers: list[nn.Module] = [nn.Linear(16, 16) for _ in range(200)]  # 400 tensors.
    if name == "mlp":
        layers = [nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)]
    model: Any = Regression(nn.Sequential(*layers))
    return model.to(device), (torch.randn(32, 16, device=device), torch.randn(32, 16, device=device))


class Regression(nn.Module):
    """The squared error of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = (self.model(inputs) - targets).square().mean()
        return loss


def main(name: str, device: str, steps: int) -> None:
    model, batch = make(name, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            torch.cuda.synchronize() if device == "cuda" else None
            begin, processor = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize() if device == "cuda" else None
    wall, processor = time.perf_counter() - begin, time.process_time() - processor
    numbers = torch.cat([param.detach().float().flatten() for param in model.parameters()]).cpu()
    digest = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]
    print(json.dumps({"wall": 1e3 * wall / steps, "host": 1e3 * processor / steps, "digest": digest}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
