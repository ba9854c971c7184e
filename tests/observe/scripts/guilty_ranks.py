"""Data-parallel training in which one rank, or each, makes NaN at single steps.

    guilty_ranks.py FAULTS [WAY]

FAULTS: as in forward:3,batch:5 what is planted at which step on rank 1 alone; with a plus before
it on every rank, with a minus on rank 0 alone. WAY: scaled (with DDP looking for unused
parameters), static, sync (a module that ranks meet in) or plain (no scaler).
"""

import contextlib
import gc
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

FAULTS = {int(step): what for what, step in (each.split(":") for each in sys.argv[1].split(","))}
WAY = sys.argv[2] if len(sys.argv) > 2 else "scaled"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
planted = ""


class Divide(nn.Module):
    def forward(self, x):
        return x / (0.0 if planted == "forward" else 1.0)


class Length(nn.Module):
    def forward(self, x):
        bad = planted == "backward"
        return (x * (0.0 if bad else 1.0)).square().sum(-1, keepdim=True).add(not bad).sqrt()


class Mean(torch.autograd.Function):
    """As SyncBatchNorm has it."""

    @staticmethod
    def forward(ctx, x):
        mean = x.mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()

    @staticmethod
    def backward(ctx, grad):
        mean = grad.mean(0)
        dist.all_reduce(mean)
        return grad - mean / dist.get_world_size()


class Centred(nn.Module):
    def forward(self, x):
        return Mean.apply(x) if WAY == "sync" else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), Centred(), nn.Dropout(0.2))
        self.divide, self.head, self.length = Divide(), nn.Linear(16, 4), Length()

    def forward(self, x):
        return self.length(self.head(self.divide(self.stem(x))))


net = Net()
model = DDP(net, static_graph=WAY == "static", find_unused_parameters=WAY == "scaled")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=WAY != "plain")
torch.manual_seed(rank)
for step in range(1, max(FAULTS) + 3):
    optimizer.zero_grad()
    for micro in range(2):
        synced = micro == 1 or WAY == "static"
        with contextlib.nullcontext() if synced else model.no_sync():
            x = torch.randn(4, 8)
            fault = FAULTS.get(step, "") if micro == 1 else ""
            whose = {"+": (0, 1), "-": (0,)}.get(fault[:1], (1,))
            planted = fault.lstrip("+-") if rank in whose else ""
            if planted == "batch":
                x[0, 0] = float("nan")
            loss = model(x).square().mean() / 2
            if planted == "loss":
                loss = loss * float("nan")
            scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    held = [*net.parameters(), *net.buffers()]
    print(step, *(each.double().sum().item() for each in held), torch.rand(1).item(), flush=True)
dist.barrier()
del model, optimizer
gc.collect()
dist.destroy_process_group()
