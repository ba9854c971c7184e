"""Accelerate accumulates gradients as its users write it; the losses of each step are printed."""

import contextlib
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(name, every, count=8):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(4 * count, 6)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps, losses = [], []
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            loss = model(inputs).square().mean() + 0.5
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.append(sum(losses) / every)
            losses = []
    print(json.dumps([name, steps]))


def train_as_a_trainer(name, every, count=8):
    """As Transformers' Trainer does it: losses of tokens, divided by those of the whole step."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps = []
    for _ in range(count // every):
        sizes = [3 + number for number in range(every)]
        seen = 0.0
        for number, size in enumerate(sizes):
            with contextlib.ExitStack() as stack:
                if number + 1 < every:
                    stack.enter_context(accelerator.no_sync(model))
                logits, targets = model(torch.randn(size, 6)), torch.arange(size) % 5
                loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / sum(sizes)
                accelerator.backward(loss)
            seen += loss.item()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        steps.append(seen)
    print(json.dumps([name, steps]))


if __name__ == "__main__":
    train("not accumulated", 1)
    train("accumulated", 4)
    train("with a last window of two", 3)
    train_as_a_trainer("as a trainer", 4)
