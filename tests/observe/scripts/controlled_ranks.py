"""A GradientControl of its own, over shards and over replicas; `gradilocks run` knows nothing."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradilocks import GradientControl

dist.init_process_group("gloo")
rank = dist.get_rank()


def train(model, steps):
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=1.0)
    torch.manual_seed(rank)
    for step in range(1, steps + 1):
        loss = model(torch.randn(4, 6)).square().mean()
        control.backward(loss * float("nan") if step == 3 and rank == 1 else loss)
        outcome = control.step()
        control.zero_grad()
        if rank == 0:
            print(outcome.norm, flush=True)


torch.manual_seed(0)
sharded = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
fully_shard(sharded)
train(sharded, 5)
replicated = nn.parallel.DistributedDataParallel(nn.Linear(6, 2))
train(replicated, 5)
dist.barrier()
del replicated
gc.collect()
dist.destroy_process_group()
