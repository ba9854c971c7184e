"""Tensor parallel blocks; norms and a head that are in no plan are plain tensors on every rank."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(8), Block(8), nn.Linear(8, 1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        if step == 4:
            loss = loss * float("nan")
        loss.backward()
        if step != 4:
            optimizer.step()
    dist.destroy_process_group()
