"""The older FullyShardedDataParallel, with its own scaler and its own clip."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model = FSDP(net, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = ShardedGradScaler(device="cpu", init_scale=256.0)
torch.manual_seed(rank)
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    if step == 3 and rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(0.5)
    scaler.step(optimizer)
    scaler.update()
    if rank == 0:
        print(step, f"{loss.item():.6f} {norm.item():.6f}", flush=True)
dist.destroy_process_group()
