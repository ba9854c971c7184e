"""The drop-ins with DTensors on four ranks: torch's results, and one decision of all ranks of a mesh."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradScaler
from ranks.rank_world import world


def layouts():
    """Parameters of every placement on one and two dimensions, and plain ones; the same on every rank."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))
    placements = {
        "hsdp": (mesh, [Replicate(), Shard(0)]),
        "fsdp and tp": (mesh, [Shard(0), Shard(1)]),
        "replicated": (mesh, [Replicate(), Replicate()]),
        "fsdp": (flat, [Shard(0)]),
        "tp": (mesh["tp"], [Shard(0)]),
    }
    torch.manual_seed(0)
    params = {}
    for name, (own, placement) in placements.items():
        params[name] = nn.Parameter(distribute_tensor(torch.zeros(5, 4), own, placement))
        params[name].grad = distribute_tensor(torch.randn(5, 4), own, placement)
    params["plain"] = nn.Parameter(torch.zeros(3))
    params["plain"].grad = torch.randn(3)
    return params


def same_as_torch(rank):
    """The norms of torch and ours with their types, and the gradients clipped by both."""
    results = []
    for clip in (torch.nn.utils, gradilocks):
        params = layouts()
        chosen = [params["hsdp"], params["fsdp and tp"]]
        norm = clip.clip_grad_norm_(chosen, 0.5)
        results.append((type(norm).__name__, norm.full_tensor(), [param.grad.full_tensor() for param in chosen]))
    return results


def test_clipping_dtensors_returns_what_torch_returns():
    for expected, got in world(4).run(same_as_torch):
        assert got[0] == expected[0] == "DTensor"
        torch.testing.assert_close(got[1:], expected[1:], rtol=1e-6, atol=1e-7)


def step_with_an_inf_on_rank_one(rank, names, fused, unscale_first, has_gradients):
    """Parameters after a skipped and a taken step, the scale after each, and the culprits of this rank."""
    params = layouts()
    chosen = [params[name] for name in names]
    scaler = GradScaler("cpu", init_scale=8.0, model=nn.ParameterDict({name: params[name] for name in names}))
    optimizer = torch.optim.Adam(chosen, lr=1.0, fused=fused)
    history = []
    for is_bad in (True, False):
        scaler.scale(torch.ones(()))
        for param in chosen:
            param.grad = (torch.zeros_like(param) + 1.0) * scaler.get_scale()
        if is_bad and rank == 1:
            gradient = chosen[0].grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = math.inf
        if not has_gradients and rank == 0:
            for param in chosen:
                param.grad = None
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        culprits = scaler.outcome.culprits
        scaler.update()
        values = [param.detach().to_local() if hasattr(param, "to_local") else param.detach() for param in chosen]
        history.append((torch.cat([value.flatten() for value in values]).tolist(), scaler.get_scale(), culprits))
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
def test_an_overflow_on_one_rank_skips_the_step_on_all(names, fused, unscale_first):
    for rank, (skipped, taken) in enumerate(
        world(4).run(step_with_an_inf_on_rank_one, names, fused, unscale_first, True)
    ):
        assert set(skipped[0]) <= {0.0}
        assert skipped[1] == 4.0
        assert skipped[2] == ((names[0],) if rank == 1 else ())
        assert taken[0] == pytest.approx([-1.0] * len(taken[0]))
        assert taken[1:] == (4.0, ())


def test_a_rank_without_gradients_takes_part():
    for skipped, taken in world(4).run(step_with_an_inf_on_rank_one, ["fsdp"], False, True, False):
        assert skipped[1] == taken[1] == 4.0
