"""Two ranks that share one GPU, over gloo: the device decides from the rows of both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_world import caught, world
from torch import nn

import gradilocks
from gradilocks import GradientControl
from gradilocks.step.host_copy import LAG

pytestmark = pytest.mark.gpu


def control_of(rank: int, optimizer_class: Any, **options: Any) -> tuple[nn.ParameterDict, GradientControl]:
    """Rank 0 has [3] and rank 1 [4] of a vector; both have [12]."""
    params = nn.ParameterDict({"part": nn.Parameter(torch.ones(1)), "shared": nn.Parameter(torch.ones(1))}).cuda()
    optimizer = optimizer_class(params.parameters(), lr=0.1)
    share = {"part": 1.0, "shared": 0.5}
    options = {"scale": 4.0, "mesh": dist.group.WORLD, "share": lambda name, param: share[name], **options}
    return params, GradientControl(optimizer, model=params, **options)


def set_gradients(params: Any, control: Any, rank: int, factor: float = 4.0) -> None:
    control.zero_grad()
    control.scale_loss(torch.ones((), device="cuda", requires_grad=True))
    params["part"].grad = torch.tensor([(3.0, 4.0)[rank] * factor], device="cuda")
    params["shared"].grad = torch.tensor([12.0 * factor], device="cuda")


def steps(rank: int, kind: str) -> list[Any]:
    optimizer_class = {"ours": gradilocks.optim.SGD, "torch's": torch.optim.SGD}[kind]
    params, control = control_of(rank, optimizer_class, clip=6.5)
    seen: list[Any] = []
    for step in range(5):
        set_gradients(params, control, rank)
        if step == 3 and rank == 1:
            params["part"].grad.fill_(math.inf)
        outcome = control.step()
        seen.append((outcome.skipped, outcome.norm if step != 3 else 0.0, outcome.clipped, outcome.culprits))
    return [seen, params["part"].item(), params["shared"].item()]


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_ranks_share_norm_and_decision(kind: str) -> None:
    for rank, (seen, part, shared) in enumerate(world(2).run(steps, kind)):
        assert seen == [(False, 13.0, True, ())] * 3 + [(True, 0.0, False, ("part",))] + [(False, 13.0, True, ())]
        assert part == pytest.approx(1.0 - 4 * 0.1 * (1.5, 2.0)[rank], rel=1e-5)
        assert shared == pytest.approx(1.0 - 4 * 0.1 * 6.0, rel=1e-5)


def different_scales(rank: int) -> list[Any]:
    params, control = control_of(rank, gradilocks.optim.SGD, scale=gradilocks.DynamicScale(init_scale=4.0))
    control.load_state_dict({"scale": (4.0, 8.0)[rank]})
    for step in range(20):
        set_gradients(params, control, rank, factor=(4.0, 8.0)[rank])
        kind, message = caught(control.step)
        if kind:
            return [step, kind, message, params["part"].item()]
    return []


def test_ranks_with_different_scales_skip_and_raise_exactly_some_steps_later() -> None:
    for step, kind, message, part in world(2).run(different_scales):
        assert (step, kind, part) == (LAG, "RanksDiffer", 1.0)
        assert message.startswith("scale differs: 4 on rank 0, 8 on rank 1.")
