"""Fully sharded training as its recipes have it, with torch's scaler or without."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(16), nn.Linear(16, 4))
    for module in model:
        fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp, init_scale=1024.0)
    torch.manual_seed(100 + rank)
    for step in range(8):
        x, y = torch.randn(4, 8), torch.randint(4, (4,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if args.amp and step == 5 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        full = norm.full_tensor().item()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f} norm {full:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
