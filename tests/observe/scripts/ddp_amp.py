"""Data-parallel training with accumulation and torch's scaler."""

import contextlib
import gc

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
torch.manual_seed(rank)
for step in range(8):
    optimizer.zero_grad()
    for micro in range(2):
        with contextlib.nullcontext() if micro == 1 else model.no_sync():
            loss = model(torch.randn(4, 8)).square().mean() / 2
            if step == 4 and rank == 1:
                loss = loss * float("nan")
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if rank == 0:
        print(step, f"{norm.item():.6f}", flush=True)
dist.barrier()
del model, optimizer
gc.collect()
dist.destroy_process_group()
