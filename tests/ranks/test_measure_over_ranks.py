"""`gradilocks.measure`: norms and culprits of gradients over ranks, without a step."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_one_process import CollectiveCounter
from parallel_models import CASES, grid, line, mesh_of, seeded, sharded
from rank_world import caught, world
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from gradilocks import measure


def numbers(measurement: Any) -> tuple[float, dict[str, float]]:
    return measurement.norm.item(), {name: norm.item() for name, norm in measurement.norms.items()}


# --- one process -----------------------------------------------------------------------------------------------------


def test_one_process_measures_norms_and_names_culprits() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1))
    model[0].weight.grad = torch.tensor([[3.0, 4.0]])
    model[1].weight.grad = torch.tensor([[12.0]])
    measurement = measure(model)
    assert numbers(measurement) == (13.0, {"0.weight": 5.0, "1.weight": 12.0})
    assert measurement.culprits == ()
    model[1].weight.grad.fill_(math.nan)
    measurement = measure(model.named_parameters())
    assert math.isnan(measurement.norm.item())
    assert measurement.culprits == ("1.weight",)
    assert measurement.norms["0.weight"].item() == 5.0


@pytest.mark.parametrize(("order", "norm"), [(1.0, 19.0), (2.0, 13.0), (3.0, 1819.0 ** (1 / 3)), (math.inf, 12.0)])
def test_every_order(order: float, norm: float) -> None:
    params = [torch.zeros(2), torch.zeros(3)]
    params[0].grad, params[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0, 12.0])
    measurement = measure(params, order=order)
    assert measurement.norm.item() == pytest.approx(norm, rel=1e-7)
    assert list(measurement.norms) == ["parameter 0", "parameter 1"]


def test_gradients_may_be_elsewhere_than_in_grad() -> None:
    """Megatron accumulates them in `main_grad`."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    param.main_grad = torch.tensor([3.0, 4.0])  # type: ignore[attr-defined]
    assert measure([("weight", param)], grad=lambda p: p.main_grad).norm.item() == 5.0  # type: ignore[attr-defined]


def test_the_same_parameters_under_other_names() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, math.inf]]), torch.tensor([4.0])
    assert measure(model).culprits == ("weight",)
    assert measure(list(model.parameters())).culprits == ("parameter 0",)
    assert measure(model.weight).culprits == ("parameter 0",)


def test_a_parameter_that_is_listed_twice_counts_once() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert numbers(measure([weight, weight])) == (5.0, {"parameter 0": 5.0})
    assert numbers(measure([("w", weight), ("w", weight)])) == (5.0, {"w": 5.0})
    assert numbers(measure([("encoder.w", weight), ("decoder.w", weight)])) == (5.0, {"encoder.w": 5.0})


def test_two_parameters_of_one_name_are_an_error() -> None:
    """Their norms have one key."""
    layers = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(ValueError, match="two parameters have the name 'weight'"):
        measure([pair for layer in layers for pair in layer.named_parameters()])


@pytest.mark.parametrize(
    "given", [dict(nn.Linear(2, 1).named_parameters()), torch.optim.SGD(nn.Linear(2, 1).parameters()).param_groups]
)
def test_anything_but_parameters_is_an_error(given: Any) -> None:
    with pytest.raises(TypeError, match=r"measure\(\) takes .*, got items of type (str|dict)"):
        measure(given)


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="none of the 2 parameters has a gradient; call measure"):
        measure(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="was given no parameters"):
        measure([])
    with pytest.raises(ValueError, match="was given no parameters"):
        measure(nn.Tanh())
    with pytest.raises(ValueError, match="order must be at least 1"):
        measure(nn.Linear(2, 2), order=0.5)


def test_measuring_changes_nothing() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in layer.parameters()]  # type: ignore[union-attr]
    measure(layer)
    for param, (value, grad) in zip(layer.parameters(), before, strict=True):
        assert torch.equal(param, value)
        assert torch.equal(param.grad, grad)  # type: ignore[arg-type]


# --- over ranks ------------------------------------------------------------------------------------------------------


def whole_norms(named: list[tuple[str, Any]]) -> dict[str, float]:
    grads = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in named}
    return {name: torch.linalg.vector_norm(grad.double()).item() for name, grad in grads.items()}


def fsdp2_and_tp(rank: int) -> dict[str, Any]:
    found = {}
    for name in ("FSDP2", "HSDP", "TP", "FSDP2 over TP", "mixed placements"):
        case: Any = CASES[name](rank)

        class Unscaled:
            scale = 1.0

            def backward(self, loss: Tensor) -> None:
                loss.backward()  # type: ignore[no-untyped-call]

            def scale_loss(self, loss: Tensor) -> Tensor:
                return loss

        case.backward(Unscaled(), 0)
        measurement = measure(case.model, **case.options)
        found[name] = numbers(measurement), whole_norms(case.named_parameters), measurement.culprits
    return found


def test_norms_over_ranks_are_those_of_whole_tensors() -> None:
    for found in world(4).run(fsdp2_and_tp):
        for name, ((total, norms), expected, culprits) in found.items():
            assert norms == pytest.approx(expected, rel=1e-6), name
            assert total == pytest.approx(math.sqrt(sum(norm**2 for norm in expected.values())), rel=1e-6), name
            assert culprits == ()


def other_placements(rank: int) -> list[float]:
    """Gradients whose placements are not those of their parameter."""
    mesh, whole, found = line(), torch.tensor([3.0, 4.0, 0.0, 12.0]), []
    for placement in (Shard(0), Replicate()):
        param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [placement]))
        for other in (Shard(0), Replicate(), Partial()):
            param.main_grad = distribute_tensor(whole, mesh, [other])  # type: ignore[attr-defined]
            found.append(measure([param], grad=lambda p: p.main_grad).norm.item())  # type: ignore[attr-defined]
    return found


def test_gradients_may_have_other_placements_than_their_parameters() -> None:
    assert world(2).run(other_placements) == [pytest.approx([13.0] * 6, rel=1e-7)] * 2


def stages(rank: int) -> list[Any]:
    """Two stages with different parameters, two replicas each; rank 2 alone has NaN."""
    mesh, stage = mesh_of((2, 2), ("pp", "dp")), rank // 2
    model = nn.ModuleDict({f"layer{i}": nn.Linear(2, 1, bias=False) for i in range(stage, 2 * stage + 1)})
    for i, param in enumerate(model.parameters()):
        param.grad = torch.tensor([[3.0, 4.0]]) * (1 + stage + i)
    healthy = measure(model, mesh=mesh, distinct="pp")
    if rank == 2:
        model["layer2"].weight.grad[0, 0] = math.nan
    sick = measure(model, mesh=mesh, distinct="pp")
    return [numbers(healthy), healthy.culprits, math.isfinite(sick.norm.item()), sick.culprits]


def test_pipeline_stages_are_measured_together_and_named_by_their_owner() -> None:
    for rank, ((total, norms), no_culprits, is_finite, culprits) in enumerate(world(4).run(stages)):
        assert total == pytest.approx(5.0 * math.sqrt(1 + 4 + 9), rel=1e-7)
        assert norms == pytest.approx(
            {"layer0.weight": 5.0} if rank < 2 else {"layer1.weight": 10.0, "layer2.weight": 15.0}
        )
        assert (no_culprits, is_finite, culprits) == ((), False, ("layer2.weight",))


def rank_without_gradients(rank: int) -> Any:
    mesh = line("ep")
    expert = nn.Linear(2, 1, bias=False)
    if rank == 0:
        expert.weight.grad = torch.tensor([[3.0, 4.0]])
    return numbers(measure(expert, mesh=mesh, distinct="ep"))


def test_a_rank_without_gradients_takes_part() -> None:
    first, second = world(2).run(rank_without_gradients)
    assert first == (5.0, {"weight": 5.0})
    assert second == (5.0, {})


def hand_made_parts(rank: int) -> list[Any]:
    """Every rank has a part of one matrix; rank 1 has one more parameter."""
    share, found = {"part": 1.0, "shared": 0.5, "extra": 1.0}, []
    for names in (["part", "shared"], ["part", "shared", "extra"][: 2 + rank]):
        params = {name: torch.zeros(1) for name in names}
        for param, value in zip(params.values(), ((3.0, 4.0)[rank], 12.0, 5.0), strict=False):
            param.grad = torch.tensor([value])
        found.append(numbers(measure(params.items(), share=lambda name, param: share[name])))
    return found


def test_parts_declared_by_share_count_once() -> None:
    for rank, (same, different) in enumerate(world(2).run(hand_made_parts)):
        assert same == (13.0, {"part": 5.0, "shared": 12.0})
        assert different[0] == pytest.approx(math.sqrt(169.0 + 25.0), rel=1e-7)
        assert different[1]["part"] == (3.0, 4.0)[rank]  # Lists differ, so norms are of this rank's part.


def second_call(rank: int) -> list[Any]:
    """The first call compares parameter lists and may search for DistributedDataParallel; the second does neither."""
    model = sharded(rank)
    model(torch.ones(2, 8)).square().mean().backward()
    searches = []
    original = gc.get_objects
    gc.get_objects = lambda *a: (searches.append(1), original(*a))[1]  # type: ignore[assignment, func-returns-value]
    try:
        collectives = []
        for _ in range(3):
            with CollectiveCounter() as counter:
                measure(model)
            collectives.append(counter.calls)
        replicated = nn.parallel.DistributedDataParallel(seeded(lambda: nn.Linear(2, 2)))
        replicated(torch.ones(1, 2)).sum().backward()
        with CollectiveCounter() as counter:
            for _ in range(3):  # Parameters alone do not lead to their DistributedDataParallel.
                measure(replicated.module.parameters(), share=None)
        return [collectives, counter.calls, len(searches)]
    finally:
        gc.get_objects = original


def test_a_second_call_neither_searches_nor_compares_names_again() -> None:
    for (first, *later), of_ddp, searches in world(2).run(second_call):
        assert len(first) > 2
        for calls in later:
            assert [kind for kind, _ in calls] == ["allreduce", "allgather_base"]
        assert of_ddp == []
        assert searches == 1


def errors(rank: int) -> Any:
    model = nn.Linear(2, 2)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    mesh = grid("dp", "tp")
    return [
        caught(lambda: measure(model, mesh=mesh, distinct="pp"))[1],
        caught(lambda: measure(list(model.parameters())[: 1 + rank % 2], mesh=dist.group.WORLD))[0],
    ]


def test_wrong_layouts_are_errors_on_every_rank() -> None:
    for unknown, different in world(4).run(errors):
        assert unknown == "distinct= names pp, but mesh= has dimensions dp, tp."
        assert different == "RanksDiffer"


_EXIT = """
import atexit, gc, sys, weakref
atexit.register(lambda: print("freed" if gc.collect() >= 0 and group() is None else "alive"))
import torch, torch.distributed as dist, gradilocks
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
param = torch.nn.Parameter(torch.ones(2))
param.grad = torch.ones(2)
gradilocks.measure(param)
dist.destroy_process_group()
"""


def test_no_process_group_is_kept_until_the_interpreter_ends(tmp_path: Path) -> None:
    run = [sys.executable, "-c", _EXIT, str(tmp_path / "store")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    assert subprocess.run(run, capture_output=True, text=True, env=environment).stdout == "freed\n"
