"""Shares follow from the parameters; what cannot be known is an error at construction."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import mesh_of
from rank_world import caught, world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gradilocks.ranks import layout as layouts
from gradilocks.ranks.layout import format_ranks, layout_of


def params_of(model: nn.Module) -> tuple[list[Any], list[str]]:
    named = list(model.named_parameters())
    return [param for _, param in named], [name for name, _ in named]


def tensor_parallel(mesh: Any) -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))
    return parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})


def shares(model: nn.Module, **arguments: Any) -> dict[str, float] | None:
    params, names = params_of(model)
    layout = layout_of(params, names, **arguments)
    return None if layout is None else dict(zip(names, layout.shares, strict=True))


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)


def data_parallel(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    whole = DistributedDataParallel(Partly())
    found["DDP"] = shares(whole, models=[whole])
    found["the module inside DDP"] = shares(whole.module)
    frozen = Partly()
    frozen.head.requires_grad_(False)
    frozen_ddp = DistributedDataParallel(frozen)
    found["frozen head"] = shares(frozen_ddp)
    part = Partly()
    part.body = DistributedDataParallel(part.body)
    found["DDP around a part"] = caught(lambda: shares(part, models=[part]))
    found["the same, nothing passed"] = caught(lambda: shares(part))
    found["the same, declared"] = shares(part, mesh=dist.group.WORLD)
    left_out = Partly()
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(left_out, ["head.weight"])
    ignoring = DistributedDataParallel(left_out)
    found["ignored parameter"] = caught(lambda: shares(ignoring, models=[ignoring]))
    mesh = mesh_of((2, 2), ("dp", "tp"))
    halves = DistributedDataParallel(Partly(), process_group=mesh["dp"].get_group())
    found["DDP over half"] = caught(lambda: shares(halves))
    found["DDP over half, declared"] = shares(halves, mesh=mesh["dp"].get_group())
    inside = DistributedDataParallel(tensor_parallel(mesh["tp"]), device_mesh=mesh["dp"])
    found["TP inside DDP"] = caught(lambda: shares(inside))
    found["TP inside DDP, declared"] = shares(inside, mesh=mesh)
    return found


def test_data_parallel_replicas_decide_alone_and_partial_ones_are_an_error() -> None:
    for found in world(4).run(data_parallel):
        assert found["DDP"] is None
        assert found["the module inside DDP"] is None
        assert found["frozen head"] is None
        for case in ("DDP around a part", "the same, nothing passed"):
            kind, message = found[case]
            assert kind == "ValueError"
            assert message.startswith("head.weight, head.bias are outside of DistributedDataParallel")
            assert "mesh=" in message
            assert "share=" in message
        assert set(found["the same, declared"].values()) == {0.25}
        assert found["ignored parameter"][1].startswith("module.head.weight is outside of Distributed")
        assert found["DDP over half"][1].startswith("DistributedDataParallel spans 2 of 4 ranks. Pass mesh=")
        assert set(found["DDP over half, declared"].values()) == {0.5}
        assert found["TP inside DDP"][0] == "ValueError"
        declared = found["TP inside DDP, declared"]
        assert (declared["module.0.weight"], declared["module.1.weight"]) == (0.25, 0.5)
        assert declared["module.2.bias"] == 0.25


def errors(rank: int) -> dict[str, Any]:
    grid, model = mesh_of((2, 2), ("dp", "tp")), nn.Linear(8, 8)
    found: dict[str, Any] = {}
    found["sub-mesh"] = caught(lambda: shares(tensor_parallel(grid["tp"])))
    found["not in mesh"] = caught(lambda: shares(tensor_parallel(grid["tp"]), mesh=grid["dp"]))
    found["unknown dimension"] = caught(lambda: shares(model, mesh=grid, distinct=("pp",)))
    found["no mesh"] = caught(lambda: shares(model, distinct="pp"))
    found["group has no names"] = caught(lambda: shares(model, mesh=dist.group.WORLD, distinct="pp"))
    found["wrong type"] = caught(lambda: shares(model, mesh="dp"))
    found["wrong share"] = caught(lambda: shares(model, mesh=grid, share=lambda name, param: 2.0))
    partial = nn.Module()
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh_of((4,), ("dp",)), [Partial()]))
    found["partial sum"] = caught(lambda: shares(partial))
    single = mesh_of((4, 1), ("dp", "pp"))
    found["mesh of one rank"] = caught(lambda: shares(tensor_parallel(single["dp"]), mesh=single["pp"]))
    half = DeviceMesh("cpu", [0, 1])
    found["left out"] = caught(lambda: shares(model, mesh=half))
    group = dist.new_group([0, 1])
    found["no member"] = caught(lambda: shares(model, mesh=group))
    flat = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"), use_orig_params=True)
    found["FSDP1"] = caught(lambda: shares(flat))
    found["FSDP1, declared"] = shares(flat, share=lambda name, param: 1.0)
    layouts._warned = False
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found["nothing known"] = [shares(model), shares(model)]
    found["warnings"] = [str(each.message) for each in warned]
    return found


def test_layouts_that_cannot_be_known_are_errors() -> None:
    for rank, found in enumerate(world(4).run(errors)):
        tp, dp = ("0-1", "2-3")[rank // 2], ("0, 2", "1, 3")[rank % 2]
        assert found["sub-mesh"] == (
            "ValueError",
            f"1.weight is a DTensor on ranks {tp} of 4. Pass mesh=, the DeviceMesh of all ranks that train the model, "
            'and distinct=("pp",) for pipeline stages.',
        )
        assert found["not in mesh"][1] == (
            f"1.weight is a DTensor on ranks {tp}, which is not a sub-mesh of mesh= (ranks {dp})."
        )
        assert found["partial sum"][1].startswith("weight is a partial sum, (Partial(sum),): redistribute it")
        assert found["mesh of one rank"][1] == (
            f"1.weight is a DTensor on ranks 0-3, which is not a sub-mesh of mesh= (rank {rank})."
        )
        assert found["unknown dimension"][1] == "distinct= names pp, but mesh= has dimensions dp, tp."
        assert found["no mesh"][1] == "distinct=('pp',) names dimensions of mesh=. Pass mesh= too."
        assert found["group has no names"][1] == "distinct= names pp, but mesh= has no named dimensions."
        assert found["wrong type"] == ("TypeError", "mesh= takes a DeviceMesh or a ProcessGroup, got str.")
        assert found["wrong share"][1].startswith("share= returned 2.0 for weight")
        if rank > 1:
            assert found["left out"][1] == f"rank {rank} is not in mesh= (ranks 0-1)."
            assert found["no member"][1].startswith(f"rank {rank} is not in mesh=")
        assert "FSDP1" in found["FSDP1"][1]
        assert "share=" in found["FSDP1"][1]
        assert set(found["FSDP1, declared"].values()) == {1.0}
        assert found["nothing known"] == [None, None]
        assert len(found["warnings"]) == 1
        assert found["warnings"][0].startswith("4 ranks, plain parameters, no DistributedDataParallel")


def test_one_process_has_no_layout() -> None:
    assert shares(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 3], "ranks 0-3"), ([6, 0, 1], "ranks 0-1, 6")])
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
