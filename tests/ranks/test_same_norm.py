"""The same gradients on 1, 2, 4 and 8 ranks, laid out in every way: one norm, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradilocks
from tests.ranks.rank_programs import run_all

ORDERS = (1.0, 2.0, 3.0, math.inf)
DRAWS = 6
SHAPES = [(7,), (5, 3), (16, 2), (1,), (3, 4, 2), (33, 17), (2, 2)]
STEPS, BAD_STEP = 10, 6


def _gradients(draw: int) -> list[Tensor]:
    """Of magnitudes from 1e-20 to 1e15, a tensor of zeros among them."""
    generator = torch.Generator().manual_seed(draw)
    made = []
    for number, shape in enumerate(SHAPES):
        size = 10.0 ** float(torch.randint(-20, 16, (), generator=generator))
        made.append(torch.randn(shape, generator=generator) * (size if draw % 2 else 1.0))
        if number == draw % len(SHAPES):
            made[-1].zero_()
    return made


def _ways(ranks: int) -> dict[str, tuple[Any, list[Any], dict[str, Any]]]:
    """By name: a mesh, the placements to be taken in turn, and what a control is told."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    ways: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
        "FSDP2": (line, [[Shard(0)]], {}),
        "copies": (line, [[Replicate()]], {}),
        "mixed": (line, [[Shard(0)], [Replicate()]], {}),
    }
    if ranks > 2:
        grid = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        every = [[a, b] for a in (Shard(0), Replicate()) for b in (Shard(0), Replicate())]
        ways["grid"] = grid, every, {}
        ways["HSDP"] = grid, [[Replicate(), Shard(0)]], {}
        ways["tp inside dp"] = grid["tp"], [[Shard(0)], [Replicate()]], {"mesh": grid}
        ways["told"] = grid["dp"], [[Shard(0)]], {"mesh": grid}
    return ways


def norms(rank: int) -> dict[str, list[list[float]]]:
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor

    found = {}
    for name, (mesh, placements, told) in _ways(dist.get_world_size()).items():
        found[name] = [
            _norms(
                [
                    distribute_tensor(grad, mesh, placements[number % len(placements)])
                    for number, grad in enumerate(_gradients(draw))
                ],
                **told,
            )
            for draw in range(DRAWS)
        ]
    return found


def _norms(grads: list[Tensor], **told: Any) -> list[float]:
    params = []
    for grad in grads:
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        params.append(param)
    found = []
    for order in ORDERS:
        control = gradilocks.GradientControl(
            torch.optim.SGD(params, lr=0.0),
            scale=None,
            clip=gradilocks.ClipByNorm(1e30, order=order),
            **told,
        )
        found.append(control.step().norm)
    return found


POLICIES: dict[str, dict[str, Any]] = {
    "norm": {"clip": 20.0},
    "headroom": {"clip": 20.0, "scale": gradilocks.HeadroomScale(init_scale=4.0)},
    "per tensor": {"clip": gradilocks.ClipPerTensor(3.0)},
    "per group": {"clip": gradilocks.ClipPerGroup({0: 5.0, 1: 20.0})},
    "AdaGC": {"clip": gradilocks.AdaGC(warmup=2)},
    "z-score": {"clip": gradilocks.ZScoreClip(0.1, warmup=2)},
    "quantile": {"clip": gradilocks.QuantileClip(0.5, window=4)},
    "value": {"clip": gradilocks.ClipByValue(0.5)},
    "spikes": {
        "clip": gradilocks.chain(
            gradilocks.SkipSpikes(0.5, window=4, at_least=2), gradilocks.ClipByNorm(20.0)
        )
    },
}


def training(rank: int) -> dict[str, Any]:
    """Every policy in some layout, and each layout under some policy: all of them take minutes."""
    import torch.distributed as dist

    chosen = {"grid": POLICIES, "FSDP2": POLICIES if dist.get_world_size() < 4 else ("norm",)}
    if dist.get_world_size() == 8:
        chosen["grid"] = ("norm", "per tensor", "z-score")
    return _training(rank, lambda name: chosen.get(name, ("norm",)))


def all_training(rank: int) -> dict[str, Any]:
    return _training(rank, lambda name: POLICIES)


def _training(rank: int, policies: Callable[[str], Any]) -> dict[str, Any]:
    """Ten steps with an overflow on the last rank in one of them, under a scale that moves."""
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor

    found = {}
    last = rank == dist.get_world_size() - 1
    for name, (mesh, placements, told) in _ways(dist.get_world_size()).items():
        placed = [placements[number % len(placements)] for number in range(len(SHAPES))]

        def gradients(
            step: int, scale: float, mesh: Any = mesh, placed: list[Any] = placed
        ) -> list[Tensor]:
            made = [
                distribute_tensor(grad * scale, mesh, each)
                for grad, each in zip(_training_gradients(step), placed, strict=True)
            ]
            local: Any = made[2]  # No rank's shard of it is empty.
            if step == BAD_STEP and last and local.to_local().numel():
                local.to_local().reshape(-1)[0] = math.inf
            return made

        for policy in policies(name):
            params = [
                nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, each))
                for shape, each in zip(SHAPES, placed, strict=True)
            ]
            seen = _trained(params, gradients, **told, **POLICIES[policy])
            values = [param.full_tensor().tolist() for param in params]  # type: ignore[operator]
            found[f"{name}, {policy}"] = seen, values
    return found


def _training_gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _trained(
    params: list[nn.Parameter], gradients: Callable[[int, float], list[Tensor]], **told: Any
) -> list[tuple[bool, bool, float, float]]:
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    scale = gradilocks.DynamicScale(init_scale=4.0, growth_interval=3)
    control = gradilocks.GradientControl(
        torch.optim.AdamW(groups, lr=0.1, fused=False), **{"scale": scale, **told}
    )
    seen = []
    for step in range(STEPS):
        control.scale_loss(torch.ones((), requires_grad=True))
        for param, grad in zip(params, gradients(step, control.scale), strict=True):
            param.grad = grad
        outcome = control.step()
        norm = outcome.norm if math.isfinite(outcome.norm) else 0.0
        seen.append((outcome.skipped, outcome.clipped, norm, control.scale))
        control.zero_grad()
    return seen


# Eight processes on two cores: with `make long`.
EIGHT = pytest.param(8, marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[2, 4, EIGHT])
def returned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    return run_all([norms, training], tmp_path_factory.mktemp("norms"), ranks=request.param)


def test_the_norm_is_that_of_one_process_bit_for_bit(returned: dict[str, list[Any]]) -> None:
    expected = [_norms(_gradients(draw)) for draw in range(DRAWS)]
    for found in returned["norms"]:
        for name, draws in found.items():
            for draw, (mine, alone) in enumerate(zip(draws, expected, strict=True)):
                for order, a, b in zip(ORDERS, mine, alone, strict=True):
                    where = f"{name}, draw {draw}, order {order}"
                    if order == 3.0:
                        assert a == pytest.approx(b, rel=1e-7), where
                    else:
                        assert a == b, where


def test_training_is_that_of_one_process_bit_for_bit(returned: dict[str, list[Any]]) -> None:
    _check_training(returned["training"])


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4, EIGHT])
def test_all_policies_train_as_one_process_in_all_layouts(
    tmp_path_factory: pytest.TempPathFactory, ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("policies")
    _check_training(run_all([all_training], folder, ranks=ranks)["all_training"])


def _check_training(of_ranks: list[Any]) -> None:
    def gradients(step: int, scale: float) -> list[Tensor]:
        made = [grad * scale for grad in _training_gradients(step)]
        if step == BAD_STEP:
            made[2][0, 0] = math.inf
        return made

    expected = {}
    for policy, settings in POLICIES.items():
        params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        seen = _trained(params, gradients, **settings)
        expected[policy] = seen, [param.detach().tolist() for param in params]
        assert seen[BAD_STEP][0]
        assert any(clipped for _, clipped, *_ in seen), policy
    for found in of_ranks:
        for name, (seen, mine) in found.items():
            alone, values = expected[name.rpartition(", ")[2]]
            assert seen == alone, name
            assert mine == values, name
