"""What each rank runs, in processes of its own over loopback; results come back through a file."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import PATIENCE

Program = Callable[[int], Any]

# With what torch itself imports late: an optimizer needs dynamo, a mesh the distributed tensors.
IMPORTED_ONCE = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "tests.ranks.rank_programs",
    "gradilocks.dropin.grad_scaler",
]


def run_all(programs: list[Program], folder: Path, *, ranks: int = 2) -> dict[str, list[Any]]:
    """Runs every program on every rank, one after another; what each rank returned, by name.

    One set of processes serves all programs, because starting one takes seconds. They are forked
    from a server that has imported torch once for all of them.
    """
    set_forkserver_preload(IMPORTED_ONCE)
    mp.start_processes(
        _enter,
        args=(programs, str(folder), ranks),
        nprocs=ranks,
        join=True,
        start_method="forkserver",
    )
    by_rank = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {p.__name__: [returned[p.__name__] for returned in by_rank] for p in programs}


def _enter(rank: int, programs: list[Program], folder: str, ranks: int) -> None:
    gc.freeze()  # Else each collection, and the process's end, look through all that torch is.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rank_group",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(
            seconds=PATIENCE
        ),  # A rank that is waited for in vain ends the test, not CI.
    )
    try:
        torch.save({p.__name__: p(rank) for p in programs}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
