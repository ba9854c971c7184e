"""Ranks that step by themselves, each as often as it has data, and average now and then."""

import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for epoch in range(3):
    for _ in range(3 + 4 * rank):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p)
            p /= dist.get_world_size()
    if rank == 0:
        print("averaged", epoch, flush=True)
print(rank, f"{sum(p.sum().item() for p in model.parameters()):.8f}", flush=True)
dist.destroy_process_group()
