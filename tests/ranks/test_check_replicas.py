"""`check_replicas` finds a single bit that differs between replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import grid, line, local_of, mesh_of, seeded, sharded, tensor_parallel
from rank_world import world
from torch import nn

from gradilocks import check_replicas
from gradilocks.errors import ReplicasDiffer


def error_of(*arguments: Any, **options: Any) -> tuple[str, tuple[str, ...], Any]:
    try:
        check_replicas(*arguments, **options)
    except ReplicasDiffer as error:
        return str(error), error.tensors, error.ranks
    return "", (), ()


def plain_replicas(rank: int) -> dict[str, Any]:
    model = seeded(lambda: nn.Linear(4, 4))
    names = [name for name, _ in model.named_parameters()]
    found = {"equal": error_of(model.parameters(), names=names)}
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        tensor = torch.ones(5).to(dtype)
        found[f"equal {dtype}"] = error_of([tensor])
        tensor[3] = 0 if rank == 1 else 1
        found[f"one element of {dtype}"] = error_of([tensor])
    with torch.no_grad():
        if rank in (1, 2):
            value = model.bias[0].clone()
            model.bias[0] = torch.nextafter(value, value + 1)
    found["one bit"] = error_of(model.parameters(), names=names)
    found["signed zero"] = error_of([torch.tensor([-0.0 if rank == 0 else 0.0])])
    found["exchanged"] = error_of([torch.tensor([1.0, 2.0] if rank else [2.0, 1.0])])
    found["equal NaN"] = error_of([torch.tensor([float("nan")])])
    found["other shapes"] = error_of([torch.zeros(2 + (rank == 3))])
    half = dist.new_group([0, 3])
    if rank in (0, 3):
        found["a group of equal ranks"] = error_of(model.parameters(), half)
    found["nothing"] = error_of([])
    found["strided"] = error_of([torch.arange(12.0).view(3, 4).t()[1:]])
    return found


def test_replicas_of_plain_tensors() -> None:
    for rank, found in enumerate(world(4).run(plain_replicas)):
        for name, (message, tensors, ranks) in found.items():
            if name.startswith(("equal", "a group", "nothing", "strided")):
                assert message == "", name
            if name.startswith("one element"):
                assert (tensors, ranks) == (("tensor 0",), ((0, 2, 3), (1,))), name
        assert found["one bit"][0].startswith(
            "replicas differ: bias (ranks 0, 3 against ranks 1-2). Parameters were not"
        )
        assert found["one bit"][1:] == (("bias",), ((0, 3), (1, 2)))
        assert found["signed zero"][2] == found["exchanged"][2] == ((0,), (1, 2, 3))
        assert found["other shapes"][0].startswith(
            "names, shapes or dtypes of the parameters differ: ranks 0-2 and rank 3"
        )
        assert ("a group of equal ranks" in found) == (rank in (0, 3))


def distributed_replicas(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["FSDP2 has no replicas"] = error_of(sharded(rank, mesh=line()).parameters())
    model = sharded(rank, mesh=grid("replicate", "shard"))
    names = [name for name, _ in model.named_parameters()]
    found["HSDP"] = error_of(model.parameters(), names=names)
    with torch.no_grad():
        if rank == 3:
            local_of(model.head.weight).view(-1)[0] += 1.0
    found["one shard of HSDP"] = error_of(model.parameters(), names=names)
    outside = tensor_parallel(mesh_of((4,), ("tp",)))
    names = [name for name, _ in outside.named_parameters()]
    with torch.no_grad():
        if rank == 2:
            outside.norm.bias[1] += 1.0
    found["outside of the plan of TP"] = error_of(outside.parameters(), names=names)
    for param in outside.parameters():
        param.grad = torch.ones_like(param)
    found["gradients"] = error_of([param.grad for param in outside.parameters()])
    return found


def test_shards_are_compared_with_replicas_of_the_same_shard() -> None:
    for found in world(4).run(distributed_replicas):
        assert found["FSDP2 has no replicas"][0] == found["HSDP"][0] == found["gradients"][0] == ""
        assert found["one shard of HSDP"][1:] == (("head.weight",), ((1,), (3,)))
        assert found["outside of the plan of TP"][1:] == (("norm.bias",), ((0, 1, 3), (2,)))


def test_one_process_has_nothing_to_compare() -> None:
    check_replicas([torch.zeros(2)])
    with pytest.raises(TypeError):
        check_replicas(3)  # type: ignore[arg-type]
