"""A rank raises, exits, is killed or hangs: the other one gets torch's own error, and its state is whole."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import line, local_of, mesh_of, seeded
from rank_world import LIMIT, fork_context
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradilocks

FAULT_STEP = 2


def fail(fault: str) -> None:
    if fault == "raise":
        raise RuntimeError("the batch could not be read")
    if fault == "exit":
        os._exit(4)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def rank_process(rank: int, store: str, pipe: Connection, layout: str, fault: str, place: str) -> None:
    """Trains; rank 1 fails at FAULT_STEP, rank 0 sends the error that it gets and its state before and after."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    options: dict[str, Any] = {}
    model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    if layout == "stages":
        model, options = model[:1], {"mesh": mesh_of((2,), ("pp",)), "distinct": "pp"}
    elif layout == "FSDP2":
        fully_shard(model, mesh=line())
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scale = gradilocks.DynamicScale(init_scale=64.0, growth_interval=2)
    control = gradilocks.GradientControl(
        optimizer, model=model, clip=gradilocks.ZScoreClip(3.0), scale=scale, **options
    )

    def state() -> Any:
        tensors = [*model.parameters(), *(v for entry in optimizer.state.values() for v in entry.values())]
        return [local_of(t).detach().clone() for t in tensors], copy.deepcopy(control.state_dict())

    for step in range(5):
        before, is_fault = state(), rank == 1 and step == FAULT_STEP
        try:
            if is_fault and place == "forward":
                fail(fault)
            control.zero_grad()
            control.backward(model(torch.full((2, 4), 0.1 * (step + rank))).square().mean())
            if is_fault and place == "step":
                fail(fault)
            if fault == "hang" and step == FAULT_STEP:
                # A rank that hangs is noticed by the timeout, all others by their closed connection.
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
            control.step()
        except Exception as error:
            after = state()
            is_unchanged = len(before[0]) == len(after[0]) and all(map(torch.equal, before[0], after[0]))
            pipe.send((step, f"{type(error).__name__}: {error}", is_unchanged, str(before[1]) == str(after[1])))
            os._exit(1)


@pytest.mark.parametrize(
    ("layout", "fault", "place"),
    [
        ("FSDP2", "kill", "step"),
        ("FSDP2", "raise", "forward"),
        ("FSDP2", "hang", "step"),
        ("stages", "exit", "step"),
        ("DDP", "kill", "forward"),
    ],
)
def test_the_other_rank_gets_torchs_error_and_keeps_its_state(
    tmp_path: Path, layout: str, fault: str, place: str
) -> None:
    context = fork_context()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    arguments = (layout, fault, place)
    processes: list[Any] = [
        context.Process(target=rank_process, args=(rank, str(tmp_path / "store"), pipes[rank][1], *arguments))
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        assert pipes[0][0].poll(LIMIT), "rank 0 neither failed nor finished"
        step, error, is_unchanged, is_same_state = pipes[0][0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert step == FAULT_STEP
    assert is_unchanged
    assert is_same_state
    assert ("imed out" if fault == "hang" else "onnection") in error, error
