"""Two optimizers that are stepped one by one, on two ranks: the numbers of one process."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradilocks import AdaGC, DynamicScale, GradientControl, read_run
from tests.ranks.rank_programs import run_all

STEPS = [(1.0, 1.0), (math.inf, 1.0), (1.0, math.nan), (2.0, 0.5), (9.0, 1.0), (0.5, 2.0)]
SCALE = DynamicScale(init_scale=2.0**10, growth_interval=2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.d, self.g = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, name: str, factor: float) -> torch.Tensor:
        rows = torch.linspace(-1, 1, 8).view(2, 4)
        return (getattr(self, name)(rows) * factor).square().mean()


def _trained(model: Any, inner: Any, record: str | None = None, **settings: Any) -> list[Any]:
    """Joint losses, then a loss each; weights, and what each step said."""
    pair = {n: torch.optim.SGD(getattr(inner, n).parameters(), lr=0.1) for n in ("d", "g")}
    control = GradientControl(*pair.values(), model=model, scale=SCALE, record=record, **settings)
    scaler, told = control.as_scaler(), []

    def step(name: str) -> None:
        norm = control.norm(only=pair[name]).item()
        scaler.step(pair[name])
        outcome = control.outcome
        assert outcome is not None
        assert repr(norm) == repr(outcome.norm) or not math.isfinite(norm)
        told.append([name, outcome.step, outcome.skipped, repr(outcome.norm), outcome.clipped])

    for of_d, of_g in STEPS:
        for name, factor in (("d", of_d), ("g", of_g)):
            scaler.scale(model(name, factor)).backward()
            step(name)
            scaler.update()
            told.append(control.scale)
            control.zero_grad()
    if control.recorder is not None:
        control.recorder.close()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [told, [w.detach().clone().tolist() for w in weights]]


def data_parallel(rank: int) -> list[Any]:
    model = nn.parallel.DistributedDataParallel(Pair(), find_unused_parameters=True)
    return _trained(model, model.module, clip=0.5)


def sharded(rank: int, record: str | None = None) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = Pair()
    for part in (model.d, model.g):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained(model, model, record, clip=0.5)


def sharded_apart(rank: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = Pair()
    for part in (model.d, model.g):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained(model, model, clip=AdaGC(warmup=1))


def recorded(rank: int) -> list[Any]:
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    found = sharded(rank, f"{folder[0]}/run.jsonl")
    dist.barrier()
    run = read_run(f"{folder[0]}/run.jsonl")
    return [*found, [[step.optimizer, step.step, step.skipped, step.loss] for step in run.steps]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_all([data_parallel, sharded, sharded_apart, recorded], folder)


@pytest.mark.parametrize("program", ["data_parallel", "sharded", "sharded_apart", "recorded"])
def test_the_ranks_and_one_process_tell_the_same(found: dict[str, list[Any]], program: str) -> None:
    model = Pair()
    clip = AdaGC(warmup=1) if program == "sharded_apart" else 0.5
    expected = _trained(model, model, clip=clip)
    first, second = found[program]
    assert first[:2] == second[:2]
    assert first[0] == expected[0]
    for one, other in zip(first[1], expected[1], strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-7)


def test_one_file_has_the_steps_of_both(found: dict[str, list[Any]]) -> None:
    told, _, steps = found["recorded"][0]
    by_step = [each for each in told if isinstance(each, list)]
    assert [[("d", "g")[which], step, skipped] for which, step, skipped, _ in steps] == [
        each[:3] for each in by_step
    ]
    losses = [loss for _, _, skipped, loss in steps if not skipped]
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
