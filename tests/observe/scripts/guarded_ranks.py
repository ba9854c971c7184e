"""One rank has NaN in a batch; with `ddp` they share a model. Prints whether they stayed alike."""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
trained = DistributedDataParallel(model) if "ddp" in sys.argv else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
try:
    for number in range(5):
        optimizer.zero_grad()
        x = torch.randn(2, 4)
        if number == 2 and rank == 1:
            x[0, 0] = float("nan")
        trained(x).square().mean().backward()
        optimizer.step()
finally:
    everywhere = [None, None]
    dist.all_gather_object(everywhere, [p.tolist() for p in model.parameters()])
    print(everywhere[0] == everywhere[1], bool(all(p.isfinite().all() for p in model.parameters())))
    del trained, model, optimizer
    gc.collect()
    dist.destroy_process_group()
