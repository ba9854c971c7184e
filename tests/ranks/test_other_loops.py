"""Loops as other projects write them, with our functions in the place of torch's, on four ranks.

Each is a few lines that call as the project's own sources do, and its norm and parameters are those
of one process on the whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradilocks
from tests.ranks.parallel_models import (
    Net,
    batch,
    factor,
    grid,
    line,
    loss_of,
    mesh_of,
    seeded,
)
from tests.ranks.rank_programs import run_all

Returned = dict[str, list[Any]]
ORDERS = (2.0, 1.0, math.inf)


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    programs: list[Callable[[int], Any]] = [
        the_recipe_of_fsdp2,
        torchtitan_with_a_pipeline,
        torchtitan_with_experts,
        torchtitan_with_experts_on_one_stage_only,
        torchtune,
        megatron,
        deepspeed,
    ]
    return run_all(programs, tmp_path_factory.mktemp("loops"), ranks=4)


def _whole(params: list[nn.Parameter]) -> list[Tensor]:
    found: list[Any] = [param.grad for param in params]
    whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]
    return [grad.clone() for grad in whole]  # On a mesh of one it is the gradient's own memory.


def _norm(tensors: list[Tensor], order: float) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors]).double()
    return torch.linalg.vector_norm(flat, order).float().item()


def _on(mesh: Any, number: int, *placements: Any, shape: tuple[int, ...] = (6, 4)) -> nn.Parameter:
    """A parameter of zeros with the same random gradient on all ranks."""
    from torch.distributed.tensor import distribute_tensor

    param = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
    param.grad = distribute_tensor(batch(number, 0, *shape), mesh, placements)
    return param


# torch: FSDP2 and a GradScaler.


def the_recipe_of_fsdp2(rank: int) -> list[str]:
    """scale, backward, unscale_, clip, step, update; one rank overflows once."""
    from torch.distributed.fsdp import fully_shard

    model = seeded(Net)
    alone = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    fully_shard(model.body, mesh=line())
    fully_shard(model, mesh=line())
    params = list(model.parameters())
    made = []
    for each in (params, alone):
        scaler = gradilocks.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        made.append((torch.optim.AdamW(each, lr=0.01, fused=False), scaler))
    (optimizer, scaler), (optimizer_alone, scaler_alone) = made
    wrong = []
    for step in range(10):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        if step == 6 and rank == 3:
            local = next(p.grad.to_local() for p in params if p.grad.to_local().numel())
            local.view(-1)[0] = math.inf
        scaler_alone.scale(torch.ones(()))
        for param, grad in zip(alone, _whole(params), strict=True):
            param.grad = grad
        norms = []
        for each, of, to in ((scaler, optimizer, params), (scaler_alone, optimizer_alone, alone)):
            each.unscale_(of)
            norm: Any = gradilocks.clip_grad_norm_(to, 1.0)
            norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
            each.step(of)
            each.update()
        scales = scaler.get_scale(), scaler_alone.get_scale()
        if norms[0] != norms[1] or scales[0] != scales[1]:
            wrong.append(f"step {step}: {norms}, {scales}")
        if math.isinf(norms[0]) != (step == 6):
            wrong.append(f"step {step}: {norms[0]}")
    for (name, _), param, other in zip(model.named_parameters(), params, alone, strict=True):
        if not torch.equal(param.full_tensor(), other):  # type: ignore[operator]
            wrong.append(name)
    return wrong


def test_torchs_recipe_for_fsdp2_and_a_scaler_trains_as_one_process(returned: Returned) -> None:
    assert returned["the_recipe_of_fsdp2"] == [[]] * 4


# torchtitan: one norm of all DTensors, then a pipeline's stages by hand.


def _over_stages(total: Any, order: float, group: Any) -> Tensor:
    if hasattr(total, "full_tensor"):
        total = total.full_tensor()
    if math.isinf(order):
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
    else:
        total **= order
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        total **= 1.0 / order
    return total  # type: ignore[no-any-return]


def torchtitan_with_a_pipeline(rank: int) -> list[Any]:
    """Stages whose layers lie on one mesh, or on two, as FSDP2 leaves what TP does not cover."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of((2, 1, 2), ("pp", "dp", "tp"))
    stage, found = rank // 2, []
    for mixed in (False, True):
        for order in ORDERS:
            every = []
            for number in (0, 1):  # What the other stage has, to know what is right.
                params = [_on(mesh["dp", "tp"], 10 * number, Shard(0), Shard(1))]
                params.append(_on(mesh["dp", "tp"], 10 * number + 1, Shard(0), Shard(0)))
                if mixed:
                    params.append(_on(mesh["dp"], 10 * number + 2, Shard(0)))
                every.append(params)
            expected = _norm([*_whole(every[0]), *_whole(every[1])], order)
            mine = every[stage]
            grads: Any = [param.grad for param in mine]
            total = _over_stages(
                gradilocks.get_total_norm(grads, order), order, mesh["pp"].get_group()
            )
            before = _whole(mine)
            gradilocks.clip_grads_with_norm_(mine, 1.0, total)
            shrunk = _norm(_whole(mine), order) / _norm(before, order)
            found.append((total.item(), expected, shrunk))
    return found


def test_torchtitans_pipeline_gets_the_norm_of_all_stages(returned: Returned) -> None:
    for found in returned["torchtitan_with_a_pipeline"]:
        for total, expected, shrunk in found:
            assert total == pytest.approx(expected, rel=1e-6)
            assert shrunk == pytest.approx(1.0 / expected, rel=1e-5)


def _with_experts(params: list[nn.Parameter], order: float, group: Any = None) -> Tensor:
    """Dense tensors and experts apart, then together."""
    experts = [p for p in params if "ep" in p.device_mesh.mesh_dim_names]  # type: ignore[union-attr]
    dense = [p for p in params if all(p is not expert for expert in experts)]
    totals = []
    for each in (dense, experts):
        grads: Any = [param.grad for param in each]
        total: Any = gradilocks.get_total_norm(grads, order)
        totals.append(total.full_tensor() if hasattr(total, "full_tensor") else total)
    if math.isinf(order):
        together = torch.maximum(*totals)
    else:
        together = (totals[0] ** order + totals[1] ** order) ** (1.0 / order)
    if group is not None:
        together = _over_stages(together, order, group)
    for each in (dense, experts):
        gradilocks.clip_grads_with_norm_(each, 1.0, together)
    return together


def torchtitan_with_experts(rank: int) -> list[Any]:
    from torch.distributed.tensor import Shard

    dense, sparse = line(), grid("efsdp", "ep")
    found = []
    for order in ORDERS:
        params = [_on(dense, 1, Shard(0)), _on(sparse, 2, Shard(1), Shard(0), shape=(4, 6, 2))]
        expected = _norm(_whole(params), order)
        plain: Any = gradilocks.clip_grad_norm_(params, math.inf, order)  # All in one call.
        total = _with_experts(params, order)
        found.append((total.item(), plain.item(), expected, _norm(_whole(params), order)))
    return found


def test_torchtitans_clip_with_experts_gets_one_norm(returned: Returned) -> None:
    for found in returned["torchtitan_with_experts"]:
        for total, plain, expected, after in found:
            assert total == pytest.approx(expected, rel=1e-6)
            assert plain == expected
            assert after == pytest.approx(1.0, rel=1e-5)


def torchtitan_with_experts_on_one_stage_only(rank: int) -> list[Any]:
    """A stage without experts has an empty list there, and its norm is 0."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of((2, 2), ("pp", "ep"))
    flat = mesh_of((2, 2), ("pp", "dp"))
    found = []
    for order in ORDERS:
        both = [_on(flat["dp"], 1, Shard(0)), _on(mesh["ep"], 2, Shard(0))]
        expected = _norm([*_whole(both), *_whole(both[:1])], order)
        mine = both if rank < 2 else both[:1]
        total = _with_experts(mine, order, mesh["pp"].get_group())
        found.append((total.item(), expected))
    return found


def test_a_stage_without_experts_takes_part(returned: Returned) -> None:
    for found in returned["torchtitan_with_experts_on_one_stage_only"]:
        for total, expected in found:
            assert total == pytest.approx(expected, rel=1e-6)


# torchtune: the norm is logged.


def torchtune(rank: int) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    model, logged = seeded(Net), []
    fully_shard(model, mesh=line())
    for step in range(3):
        loss_of(model, step, rank).backward()
        expected = _norm(_whole(list(model.parameters())), 2.0)
        norm: Any = gradilocks.clip_grad_norm_(model.parameters(), max_norm=float(1 + step))
        logged.append((norm.full_tensor().item(), norm.item(), expected))
        model.zero_grad()
    return logged


def test_torchtunes_logged_norm_is_the_whole_models(returned: Returned) -> None:
    for logged in returned["torchtune"]:
        for full, item, expected in logged:
            assert full == item == pytest.approx(expected, rel=1e-6)


# Megatron: plain shards; each rank leaves out what another counts.


def megatron(rank: int) -> list[Any]:
    mesh = grid("pp", "tp")
    place, found = rank % 2, []
    for order in ORDERS:
        cut, copied = batch(5, rank, 6, 4), batch(6, rank // 2, 8)
        params = [nn.Parameter(torch.zeros_like(each)) for each in (cut, copied)]
        params[0].grad, params[1].grad = cut.clone(), copied.clone()
        counted = [cut] if place else [cut, copied]
        total = gradilocks.get_total_norm(counted, order)
        if math.isinf(order):
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        else:
            total **= order
            dist.all_reduce(total)
            total **= 1.0 / order
        every = [batch(5, number, 6, 4) for number in range(4)]
        every += [batch(6, number, 8) for number in range(2)]
        gradilocks.clip_grads_with_norm_(params, 1.0, total.item())  # type: ignore[arg-type]
        control = _megatron_control(cut, copied, order, mesh["tp"].get_group())
        found.append((total.item(), control, _norm(every, order), params[0].grad / cut))
    return found


def _megatron_control(cut: Tensor, copied: Tensor, order: float, tensor_group: Any) -> float:
    """The same by a control, which goes by Megatron's marks."""
    params = [nn.Parameter(torch.zeros_like(each)) for each in (cut, copied)]
    params[0].grad, params[1].grad = cut.clone(), copied.clone()
    params[0].tensor_model_parallel = True  # type: ignore[attr-defined]
    control = gradilocks.GradientControl(
        torch.optim.SGD(params, lr=0.0),
        scale=None,
        clip=gradilocks.ClipByNorm(1.0, order=order),
        process_group=dist.group.WORLD,
        copies=gradilocks.megatron_copies(tensor_group=tensor_group),
    )
    return control.step().norm


def test_megatrons_norm_by_groups_is_right(returned: Returned) -> None:
    for found in returned["megatron"]:
        for total, control, expected, shrunk in found:
            assert total == pytest.approx(expected, rel=1e-6)
            assert control == expected
            torch.testing.assert_close(shrunk, torch.full_like(shrunk, 1.0 / (expected + 1e-6)))


# DeepSpeed: flat partitions of each parameter group, one norm a group.


def deepspeed(rank: int) -> list[Any]:
    """ZeRO: every rank has a quarter of each group; the scale is divided out at the end."""
    found = []
    for step in range(2):
        groups = [batch(step, number, 64) * factor(step) * 128.0 for number in (1, 2)]
        mine = [group.chunk(4)[rank].clone() for group in groups]
        norms = []
        for partition in mine:
            squared = gradilocks.get_total_norm([partition]) ** 2
            dist.all_reduce(squared)
            norms.append(squared.sqrt())
        scaled = gradilocks.get_total_norm(norms)
        flat = [nn.Parameter(torch.zeros_like(partition)) for partition in mine]
        for param, partition in zip(flat, mine, strict=True):
            param.grad = partition / 128.0
        gradilocks.clip_grads_with_norm_(flat, 1.0, scaled / 128.0)
        expected = _norm(groups, 2.0) / 128.0
        limited = min(1.0, 1.0 / (expected + 1e-6))
        ratio = flat[0].grad / (groups[0].chunk(4)[rank] / 128.0)  # type: ignore[operator]
        found.append((scaled.item() / 128.0, expected, ratio.max().item(), limited))
    return found


def test_deepspeeds_norms_by_partition_are_right(returned: Returned) -> None:
    for found in returned["deepspeed"]:
        for norm, expected, ratio, limited in found:
            assert norm == pytest.approx(expected, rel=1e-6)
            assert ratio == pytest.approx(limited, rel=1e-5)
