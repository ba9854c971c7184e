"""FSDP2 in fp16 on two ranks: an overflow on one of them, a checkpoint, the run file of rank 0.

`torchrun --nproc-per-node 2 examples/09_fsdp2.py`; without torchrun it starts that itself.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.run import main as torchrun

from gradilocks import GradientControl, read_run


def make(record=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, GradientControl(optimizer, model=model, clip=1.0, record=record)


def train(model, control, numbers, rank):
    for number in numbers:
        inputs = torch.rand(32, 16, generator=torch.Generator().manual_seed(2 * number + rank))
        loss = (model(inputs).float() - inputs[:, :4].sin()).square().mean()
        control.backward(loss)
        if number == 15 and rank == 1:
            model[2].weight.grad.to_local()[0, 0] = float("inf")
        outcome = control.step()
        control.zero_grad()
        if outcome.skipped:
            print(f"rank {rank} skips step {number}: {outcome.describe()}", flush=True)
    return loss


if not dist.is_torchelastic_launched():
    raise SystemExit(torchrun(["--standalone", "--nproc-per-node", "2", __file__]))
dist.init_process_group("gloo")  # On GPUs "nccl", after torch.cuda.set_device(local_rank).
rank, folder = dist.get_rank(), [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)  # Rank 0's, for all.
model, optimizer, control = make(record=f"{folder[0]}/run.jsonl")
train(model, control, range(1, 21), rank)
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": moments, "control": control}, checkpoint_id=folder[0])
loss = train(model, control, range(21, 41), rank)
control.recorder.close()
model, optimizer, control = make()  # Another day: the same training, to the last bit.
weights, moments = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optim": moments, "control": control}, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
assert train(model, control, range(21, 41), rank).equal(loss)
if rank == 0:
    print("skipped:", *(s.step for s in read_run(f"{folder[0]}/run.jsonl").steps if s.skipped))
dist.barrier()
dist.destroy_process_group()
