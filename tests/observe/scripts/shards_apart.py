"""Sharded parameters that every rank steps by itself: one rank stops early, or is killed."""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
layer = nn.Module()
layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
dist.barrier()
for step in range(1, 7):
    if rank == 1 and step == 4:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        break
    # Four elements a rank: rank 0's norm is 6 a step, rank 1's 8.
    local = torch.full((2, 2), step * (3.0 + rank))
    layer.weight.grad = DTensor.from_local(local, mesh, [Shard(0)])
    optimizer.step()
if sys.argv[1] == "fewer":
    dist.barrier()
    dist.destroy_process_group()
