"""torch's ZeroRedundancyOptimizer on two ranks: each steps its share, by one decision.

The share of a rank may need what that of another does not (buffers of a fused SGD's first step):
both must then go the same way, for after its step each waits for the other's parameters.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, optim
from gradilocks.step.update import takes_decision
from tests.ranks.rank_programs import run_all

MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "SGD momentum fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "our SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "our AdamW": (optim.AdamW, {"lr": 0.1}),
}
FACTORS = [math.nan, 1.0, 0.5, math.inf, 2.0]
Returned = dict[str, list[Any]]


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def train(model: Any, optimizer: Any) -> list[list[float]]:
    control = GradientControl(optimizer, model=model, clip=0.1)
    for step, factor in enumerate(FACTORS):
        control.zero_grad()
        loss = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean() * (1 + step) * factor
        control.backward(loss)
        assert control.step().skipped == (not math.isfinite(factor))
    return [param.detach().flatten().tolist() for param in model.parameters()]


def sharded(rank: int, *, name: str, adopted: bool = False) -> tuple[bool, list[list[float]]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    kind, settings = MAKERS[name]
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **settings)
    if adopted:
        optim.adopt(optimizer)
    return takes_decision(optimizer), train(model, optimizer)


def every_kind(rank: int) -> dict[str, Any]:
    found = {name: sharded(rank, name=name) for name in MAKERS}
    return {**found, "adopted": sharded(rank, name="AdamW", adopted=True)}


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    ranks = run_all([every_kind], tmp_path_factory.mktemp("zero"))["every_kind"]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", MAKERS)
def test_all_ranks_step_and_skip_as_one_process_does(returned: Returned, name: str) -> None:
    kind, settings = MAKERS[name]
    model = network()
    expected = train(model, kind(model.parameters(), **settings))
    inside = name not in ("AdamW", "SGD momentum fused")
    for decided, found in returned[name]:
        assert decided == inside
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    assert returned[name][0] == returned[name][1]


def test_an_adopted_one_steps_as_ours_on_all_ranks(returned: Returned) -> None:
    assert returned["adopted"] == returned["our AdamW"]
