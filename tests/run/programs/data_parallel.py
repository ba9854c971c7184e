"""DDP over gloo; rank 1 divides by zero in step 3. Run by torchrun."""

import torch
import torch.distributed as dist
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        return x / (x - x) if step == 3 and dist.get_rank() == 1 else x


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), Gate(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(1, 6):  # noqa: B007 (read by Gate)
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
