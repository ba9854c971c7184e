"""The same gradients on 1, 2, 4 and 8 ranks, in every placement: one norm, and one training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import grid, line
from rank_world import world
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gradilocks
from gradilocks import kernels

ORDERS = (1.0, 2.0, 3.0, math.inf)
SHAPES = [(7,), (5, 3), (16, 2), (1,), (3, 4, 2), (33, 17), (2, 2)]
DRAWS, STEPS, BAD_STEP = 4, 6, 4


def gradients(draw: int) -> list[Tensor]:
    """Magnitudes from 1e-20 to 1e15 in odd draws, and one tensor of zeros."""
    generator = torch.Generator().manual_seed(draw)
    result = []
    for number, shape in enumerate(SHAPES):
        size = 10.0 ** float(torch.randint(-20, 16, (), generator=generator))
        result.append(torch.randn(shape, generator=generator) * (size if draw % 2 else 1.0))
        if number == draw % len(SHAPES):
            result[-1].zero_()
    return result


def layouts() -> dict[str, tuple[Any, list[Any], dict[str, Any]]]:
    """By name: a mesh, placements to take in turn, and arguments of the control."""
    flat = line()
    found: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
        "FSDP2": (flat, [[Shard(0)]], {}),
        "replicas": (flat, [[Replicate()]], {}),
        "mixed": (flat, [[Shard(0)], [Replicate()]], {}),
    }
    if dist.get_world_size() > 2:
        mesh = grid("dp", "tp")
        every = [[a, b] for a in (Shard(0), Replicate()) for b in (Shard(0), Replicate())]
        found["grid"] = mesh, every, {}
        found["HSDP"] = mesh, [[Replicate(), Shard(0)]], {}
        found["TP inside DP"] = mesh["tp"], [[Shard(0)], [Replicate()]], {"mesh": mesh}
    return found


def norms_of(grads: list[Tensor], **options: Any) -> list[float]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return [
        gradilocks.GradientControl(
            torch.optim.SGD(params, lr=0.0), scale=None, clip=gradilocks.ClipByNorm(1e30, order=order), **options
        )
        .step()
        .norm
        for order in ORDERS
    ]


def norms_over_ranks(rank: int) -> dict[str, list[list[float]]]:
    return {
        name: [
            norms_of(
                [distribute_tensor(g, mesh, placements[i % len(placements)]) for i, g in enumerate(gradients(draw))],
                **options,
            )
            for draw in range(DRAWS)
        ]
        for name, (mesh, placements, options) in layouts().items()
    }


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.ranks)])
def test_the_norm_is_that_of_one_process(ranks: int) -> None:
    expected = [norms_of(gradients(draw)) for draw in range(DRAWS)]
    # The extension sums in float64, so that the float32 norm has the same bits however the elements are distributed.
    # Plain torch sums rows of 128 elements in float32, and shards have other rows. p = 3 is a power of a power.
    tolerance = dict.fromkeys(ORDERS, 1e-06)
    if kernels.backend_for("cpu") is not kernels.reference:
        tolerance = {1.0: 0.0, 2.0: 0.0, 3.0: 1e-7, math.inf: 0.0}
    for found in world(ranks).run(norms_over_ranks):
        for name, draws in found.items():
            for draw, norms in enumerate(draws):
                for order, norm, wanted in zip(ORDERS, norms, expected[draw], strict=True):
                    assert math.isclose(norm, wanted, rel_tol=tolerance[order]), (name, draw, order, norm, wanted)


def known_norms(rank: int) -> list[float]:
    """TP shards [3] and [4] with a replicated [12]; two experts with norms √20 and √100, also beside the shards."""
    mesh = line("ep")
    split = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    split.grad = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
    replicated = nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Replicate()]))
    replicated.grad = distribute_tensor(torch.tensor([12.0]), mesh, [Replicate()])
    control = gradilocks.GradientControl(torch.optim.SGD([split, replicated], lr=1.0), scale=None)
    expert = nn.Parameter(torch.zeros(1))
    expert.grad = torch.tensor([math.sqrt((20.0, 100.0)[rank])])
    options: dict[str, Any] = {"scale": None, "mesh": mesh, "distinct": "ep"}
    experts, both = (
        gradilocks.GradientControl(torch.optim.SGD(params, lr=1.0), **options) for params in ([expert], [expert, split])
    )
    return [control.norm().item(), control.step().norm, experts.step().norm, both.step().norm]


def test_known_norms_of_shards_and_experts() -> None:
    for before, norm, experts, both in world(2).run(known_norms):
        assert before == norm == 13.0
        assert (experts, both) == pytest.approx((10.954451, math.sqrt(145.0)), rel=1e-7)


POLICIES: dict[str, dict[str, Any]] = {
    "norm": {"clip": 20.0},
    "headroom": {"clip": 20.0, "scale": gradilocks.HeadroomScale(init_scale=4.0)},
    "per group": {"clip": gradilocks.ClipPerGroup({0: 5.0, 1: 20.0})},
    "AdaGC": {"clip": gradilocks.AdaGC(warmup=2)},
    "rows": {"clip": gradilocks.AdaptiveClip(0.5, exclude=("0", "3"))},
    "z-score": {"clip": gradilocks.ZScoreClip(0.1, warmup=2)},
    "quantile": {"clip": gradilocks.QuantileClip(0.5, window=4)},
    "value": {"clip": gradilocks.ClipByValue(0.5)},
    "spikes": {"clip": gradilocks.chain(gradilocks.SkipSpikes(0.5, window=4), gradilocks.ClipByNorm(20.0))},
}
PLACED = {2: ("mixed",), 4: ("grid",), 8: ("FSDP2", "grid", "HSDP", "TP inside DP")}


def training_gradients(step: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def trained(params: list[nn.Parameter], grads_of: Callable[[int, float], list[Tensor]], **options: Any) -> list[Any]:
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    scale = gradilocks.DynamicScale(init_scale=4.0, growth_interval=3)
    options = {"scale": scale, "model": nn.ParameterList(params), **options}
    control = gradilocks.GradientControl(torch.optim.SGD(groups, lr=0.1, momentum=0.9), **options)
    seen = []
    for step in range(STEPS):
        control.scale_loss(torch.ones((), requires_grad=True))
        for param, grad in zip(params, grads_of(step, control.scale), strict=True):
            param.grad = grad
        outcome = control.step()
        seen.append((outcome.skipped, outcome.clipped, outcome.norm, outcome.limit, control.scale))
        control.zero_grad()
    return seen


def training_over_ranks(rank: int) -> dict[tuple[str, str], Any]:
    ranks, found = dist.get_world_size(), {}
    for name in PLACED[ranks]:
        mesh, placements, options = layouts()[name]
        placed = [placements[i % len(placements)] for i in range(len(SHAPES))]

        def grads_of(step: int, scale: float, mesh: Any = mesh, placed: Any = placed) -> list[Tensor]:
            whole = training_gradients(step, scale)
            grads = [distribute_tensor(g, mesh, each) for g, each in zip(whole, placed, strict=True)]
            if step == BAD_STEP and rank == ranks - 1:
                grads[2].to_local().view(-1)[0] = math.inf  # No rank's shard of it is empty.
            return grads

        for policy, settings in POLICIES.items():
            params = [
                nn.Parameter(distribute_tensor(torch.ones(shape), mesh, each))
                for shape, each in zip(SHAPES, placed, strict=True)
            ]
            seen = trained(params, grads_of, **options, **settings)
            found[name, policy] = seen, [param.full_tensor().detach() for param in params]  # type: ignore[operator]
    return found


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.ranks)])
def test_every_policy_trains_as_in_one_process(ranks: int) -> None:
    def grads_of(step: int, scale: float) -> list[Tensor]:
        grads = training_gradients(step, scale)
        if step == BAD_STEP:
            grads[2][0, 0] = math.inf
        return grads

    expected = {}
    for policy, settings in POLICIES.items():
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        seen = trained(params, grads_of, **settings)
        assert seen[BAD_STEP][0], policy
        assert any(clipped for _, clipped, *_ in seen), policy
        expected[policy] = seen, [param.detach() for param in params]
    flags_of = lambda seen: [(skipped, scale) for skipped, _, _, _, scale in seen]  # noqa: E731
    results = world(ranks).run(training_over_ranks)
    for name, policy in results[0]:
        alone, values = expected[policy]
        # A rank knows whether its own rows or tensors were clipped.
        clipped = [any(found[name, policy][0][step][1] for found in results) for step in range(STEPS)]
        assert clipped == [step[1] for step in alone], (name, policy)
        for found in results:
            seen, params = found[name, policy]
            assert flags_of(seen) == flags_of(alone), (name, policy)
            for step, (mine, theirs) in enumerate(zip(seen, alone, strict=True)):
                if step != BAD_STEP:
                    assert mine[2:4] == pytest.approx(theirs[2:4], rel=1e-6), (name, policy, step)
            for param, value in zip(params, values, strict=True):
                torch.testing.assert_close(param, value, rtol=1e-5, atol=1e-6, msg=f"{name}, {policy}")
