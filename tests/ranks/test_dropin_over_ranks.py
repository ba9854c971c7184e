"""GradScaler and the clip functions over DTensors: loops as other projects write them, beside one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_one_process import CollectiveCounter
from parallel_models import batch, grid, line, local_of, loss_of, mesh_of, sharded, tensor_parallel
from rank_world import world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gradilocks

ORDERS = (2.0, 1.0, 3.0, math.inf)


def whole_grads(params: list[Any]) -> list[Tensor]:
    return [(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone() for p in params]


def norm_of(tensors: list[Tensor], order: float = 2.0) -> float:
    return torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors]).double(), order).item()


def placed(mesh: Any, number: int, *placements: Any, shape: tuple[int, ...] = (5, 4)) -> nn.Parameter:
    """A parameter with the same random gradient on all ranks."""
    param = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
    param.grad = distribute_tensor(batch(number, 0, *shape), mesh, placements)
    return param


def scaler_recipe(rank: int, layout: str) -> list[str]:
    """scale, backward, unscale_, clip, step, update over FSDP2 or TP; one rank overflows once."""
    model = sharded(rank) if layout == "FSDP2" else tensor_parallel(line("tp"))
    shape, part = ((4, 8), rank) if layout == "FSDP2" else ((2, 8, 8), 0)
    params = list(model.parameters())
    whole = [nn.Parameter(p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()) for p in params]
    sides = []
    for side in (params, whole):
        scaler = gradilocks.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        sides.append((side, torch.optim.SGD(side, lr=0.01, momentum=0.9), scaler))
    wrong = []
    for step in range(8):
        for _, optimizer, _ in sides:
            optimizer.zero_grad()
        sides[0][2].scale(loss_of(model, step, part, *shape)).backward()
        if step == 5 and rank == 3:
            next(local_of(p.grad) for p in params if hasattr(p.grad, "to_local") and local_of(p.grad).numel()).view(-1)[
                0
            ] = math.inf
        sides[1][2].scale(torch.ones(()))
        for param, grad in zip(whole, whole_grads(params), strict=True):
            param.grad = grad
        norms, scales = [], []
        for side, optimizer, scaler in sides:
            scaler.unscale_(optimizer)
            norm: Any = gradilocks.clip_grad_norm_(side, 1.0)
            norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        if not math.isclose(*norms, rel_tol=1e-6) or scales[0] != scales[1] or math.isinf(norms[0]) != (step == 5):
            wrong.append(f"step {step}: norms {norms}, scales {scales}")
    for i, (param, other) in enumerate(zip(params, whole, strict=True)):
        value: Any = param.full_tensor() if hasattr(param, "full_tensor") else param
        if not torch.allclose(value, other, rtol=1e-5, atol=1e-6):
            wrong.append(f"parameter {i}")
    return wrong


@pytest.mark.parametrize("layout", ["FSDP2", "TP"])
def test_the_scaler_recipe_trains_as_one_process(layout: str) -> None:
    assert world(4).run(scaler_recipe, layout) == [[]] * 4


def step_with_an_inf_on_rank_one(
    rank: int, names: list[str], fused: bool, unscale_first: bool, has_gradients: bool
) -> list[Any]:
    """Parameters after a skipped and a taken step, the scale after each, and the culprits of this rank."""
    mesh, flat = grid("dp", "tp"), line()
    layouts: dict[str, tuple[Any, ...]] = {
        "hsdp": (mesh, Replicate(), Shard(0)),
        "fsdp and tp": (mesh, Shard(0), Shard(1)),
        "replicated": (mesh, Replicate(), Replicate()),
        "fsdp": (flat, Shard(0)),
        "tp": (mesh["tp"], Shard(0)),
    }
    params = [
        placed(layouts[name][0], 0, *layouts[name][1:], shape=(5, 4))
        if name in layouts
        else nn.Parameter(torch.zeros(3))
        for name in names
    ]
    model = nn.ParameterDict(zip(names, params, strict=True))
    scaler, optimizer = gradilocks.GradScaler("cpu", 8.0, model=model), torch.optim.Adam(params, lr=1.0, fused=fused)
    history = []
    for is_bad in (True, False):
        scaler.scale(torch.ones(()))
        for param in params:
            param.grad = (torch.zeros_like(param) + scaler.get_scale()) if has_gradients or rank else None
        if is_bad and rank == 1:
            local_of(params[0].grad).view(-1)[0] = math.inf
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        outcome: Any = scaler.outcome
        culprits = outcome.culprits
        scaler.update()
        values = torch.cat([local_of(param.detach()).flatten() for param in params])
        history.append((values.tolist(), scaler.get_scale(), culprits))
    return history


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize(
    ("names", "fused"),
    [
        (["hsdp", "plain"], False),
        (["fsdp and tp", "replicated"], False),
        (["fsdp and tp", "replicated"], True),  # torch's fused steps reject other mixtures.
        (["fsdp", "tp", "plain"], False),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(names: list[str], fused: bool, unscale_first: bool) -> None:
    results = world(4).run(step_with_an_inf_on_rank_one, names, fused, unscale_first, True)
    for rank, (skipped, taken) in enumerate(results):
        assert set(skipped[0]) <= {0.0}
        assert skipped[1:] == (4.0, (names[0],) if rank == 1 else ())
        assert taken[0] == pytest.approx([-1.0] * len(taken[0]))
        assert taken[1:] == (4.0, ())


def test_a_rank_without_gradients_takes_part() -> None:
    for skipped, taken in world(4).run(step_with_an_inf_on_rank_one, ["fsdp"], False, True, False):
        assert skipped[1] == taken[1] == 4.0


def clip_in_layouts(rank: int) -> list[Any]:
    """torch's placements, several meshes in one call, plain tensors beside DTensors, partial sums."""
    mesh, flat = grid("dp", "tp"), line()
    found = []
    for order in ORDERS:
        cases = {
            "one mesh": [placed(flat, 1, Shard(0)), placed(flat, 2, Replicate())],
            "one mesh, created twice": [placed(line(), 1, Shard(0)), placed(line(), 2, Shard(1), shape=(3, 5))],
            "a grid": [placed(mesh, 1, Shard(0), Shard(1)), placed(mesh, 2, Replicate(), Shard(0))],
            "experts": [placed(flat, 1, Shard(0)), placed(mesh, 2, Shard(1), Shard(0), shape=(4, 6, 2))],
            "a part of the world": [placed(mesh["tp"], 1, Shard(0))],
        }
        plain = nn.Parameter(torch.zeros(3))
        plain.grad = batch(3, 0, 3)
        cases["plain beside"] = [placed(flat, 1, Shard(0)), plain]
        partial = placed(flat, 1, Replicate())
        partial.grad = DTensor.from_local(batch(1, 0, 5, 4) / 4, flat, [Partial()])
        cases["partial sums"] = [partial]
        for name, params in cases.items():
            expected = norm_of(whole_grads(params), order)
            before = gradilocks.get_total_norm([p.grad for p in params], order)  # type: ignore[misc]
            norm: Any = gradilocks.clip_grad_norm_(params, 1.0, order)
            numbers = [(n.full_tensor() if hasattr(n, "full_tensor") else n).item() for n in (before, norm)]
            is_dtensor = isinstance(norm, DTensor)
            found.append(
                (f"{name}, order {order}", expected, *numbers, norm_of(whole_grads(params), order), is_dtensor)
            )
    return found


def test_the_norm_over_dtensors_is_that_of_the_whole_tensors() -> None:
    for found in world(4).run(clip_in_layouts):
        for name, expected, before, norm, after, is_dtensor in found:
            assert before == pytest.approx(expected, rel=1e-6), name
            assert norm == pytest.approx(expected, rel=1e-6), name
            assert after == pytest.approx(min(1.0, expected), rel=1e-5), name
            # torchtune and others call full_tensor() on what torch returns for DTensors of one mesh.
            assert is_dtensor == name.startswith(("one mesh", "a grid", "a part", "partial")), name


def over_stages(rank: int) -> list[Any]:
    """torchtitan: the norm of a stage is reduced over "pp" by hand, then applied."""
    mesh, found = mesh_of((2, 1, 2), ("pp", "dp", "tp")), []
    for order in ORDERS:
        stages = [
            [
                placed(mesh["dp", "tp"], 10 * stage, Shard(0), Shard(1)),
                placed(mesh["dp"], 10 * stage + 1, Shard(0)),
            ]
            for stage in (0, 1)
        ]
        expected = norm_of([grad for params in stages for grad in whole_grads(params)], order)
        params = stages[rank // 2]
        before = norm_of(whole_grads(params), order)
        total: Any = gradilocks.get_total_norm([p.grad for p in params], order)  # type: ignore[misc]
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        if math.isinf(order):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=mesh["pp"].get_group())
        else:
            total = total**order
            dist.all_reduce(total, group=mesh["pp"].get_group())
            total = total ** (1.0 / order)
        gradilocks.clip_grads_with_norm_(params, 1.0, total)
        found.append((total.item(), expected, norm_of(whole_grads(params), order) / before))
    return found


def test_a_norm_reduced_over_stages_by_hand_clips_all_of_them() -> None:
    for found in world(4).run(over_stages):
        for total, expected, ratio in found:
            assert total == pytest.approx(expected, rel=1e-6)
            assert ratio == pytest.approx(1.0 / expected, rel=1e-5)


def collectives(rank: int) -> dict[str, Any]:
    mesh, found = grid("dp", "tp"), {}
    for name, params in {
        "line": [placed(line(), i, Shard(0)) for i in range(3)],
        "grid": [placed(mesh, i, Replicate(), Shard(0)) for i in range(3)],
    }.items():
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = gradilocks.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        counts = []
        for call in (
            lambda: scaler.unscale_(optimizer),  # noqa: B023
            lambda: gradilocks.clip_grad_norm_(params, 1.0),  # noqa: B023
            lambda: (scaler.step(optimizer), scaler.update()),  # noqa: B023
        ):
            with CollectiveCounter() as counter:
                call()
            counts.append(len(counter.calls))
        found[name] = counts
    return found


def test_unscale_and_clip_send_one_collective_per_mesh_dimension_and_step_none() -> None:
    for found in world(4).run(collectives):
        assert found == {"line": [1, 1, 0], "grid": [2, 2, 0]}
