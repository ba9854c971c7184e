"""Whole training steps on several ranks, under DistributedDataParallel and FSDP2.

    torchrun --nproc-per-node 2 benchmarks/bench_ranks.py                    # CPU, gloo, float32, one thread per rank
    torchrun --nproc-per-node 8 benchmarks/bench_ranks.py --device cuda      # NCCL, bfloat16 autocast
    torchrun --nproc-per-node 2 benchmarks/bench_ranks.py --rows FSDP2-1.6M -o ranks.json

Each contender trains its own GPT from the same weights, with a batch of its own on each rank. A timed call is ten steps
with one synchronization at the end. The times are those of rank 0, which waits for the slowest rank at every step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from functools import partial

import torch
import torch.distributed as dist
from bench_training import GPT, QUICK, Work, ready
from contenders import control_step, scaler_step
from harness import Contender, Row, arguments, compete, environment, measure_rows
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from versions import V3

MODELS = {"1.6M": Work(96, 128, 8, 4, (2, 32), rounds=21), "14M": Work(4096, 320, 10, 5, (2, 32), rounds=9)}


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 with one group of parameters per block of the GPT."""
    for child in model.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block)
    fully_shard(model)
    return model


WRAPPERS = {"DDP": data_parallel, "FSDP2": sharded}
ROWS = {f"{layout}-{size}": (layout, size) for layout in WRAPPERS for size in MODELS}


def measure(name: str, options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Times all contenders on one model under one layout."""
    layout, size = ROWS[name]
    work = QUICK if options.quick else MODELS[size]
    make = partial(ready, work, device, wrap=WRAPPERS[layout], seed=dist.get_rank(), dtype=torch.bfloat16)
    contenders = [
        Contender("torch", partial(make, scaler_step)),
        Contender("0.3 drop-in", partial(make, scaler_step), V3),
        Contender("0.3 control, fused AdamW", partial(make, partial(control_step, own=False)), V3),
        Contender("0.3 control, optim", partial(make, control_step), V3),
    ]

    def start() -> Iterator[Tensor]:
        return WRAPPERS[layout](GPT(work).to(device)).parameters()

    sizes = [param.numel() for param in GPT(work).parameters()]
    return compete(
        f"{layout}, {dist.get_world_size()} ranks: {sum(sizes) / 1e6:.1f} M in {len(sizes)} tensors",
        contenders,
        device=device,
        rounds=options.rounds or work.rounds,
        modes=["loop"],
        start=start,
        tolerance=5e-2 if device.type == "cuda" else 2e-3,
        compare_after=False,
    )


def main() -> None:
    options = arguments("Training steps on several ranks beside torch's.", list(ROWS)).parse_args()
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    facts = {**environment(options.commit), "ranks": dist.get_world_size()}
    is_first = dist.get_rank() == 0
    with open(os.devnull, "w") as sink, nullcontext() if is_first else redirect_stdout(sink):
        output = options.output if is_first else None
        measure_rows(options.rows or list(ROWS), lambda name: measure(name, options, device), facts, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
