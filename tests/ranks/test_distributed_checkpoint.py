"""torch.distributed.checkpoint: saved on 4 ranks, training resumes on 4 bit for bit, and on 2 and 1 within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_models import line, mesh_of, seeded
from rank_world import world
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import gradilocks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*no_dist", "ignore:TypedStorage")

CASES: dict[str, tuple[Any, Any]] = {
    "AdaGC": (torch.optim.AdamW, gradilocks.AdaGC(warmup=2)),
    "ZScoreClip": (torch.optim.SGD, gradilocks.ZScoreClip(0.5, warmup=2)),
    "a chain, our AdamW": (
        gradilocks.optim.AdamW,
        gradilocks.chain(gradilocks.QuantileClip(0.5, window=4), gradilocks.AdaGC(warmup=3)),
    ),
}


def make(optimizer_class: Any, clip: Any) -> tuple[Any, Any, gradilocks.GradientControl]:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)))
    if dist.is_initialized():
        fully_shard(model, mesh=line())
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    scale = gradilocks.DynamicScale(init_scale=8.0, growth_interval=3)
    return model, optimizer, gradilocks.GradientControl(optimizer, model=model, scale=scale, clip=clip)


def train(model: Any, control: Any, steps: range) -> list[Any]:
    """Every rank sees the same batch, so that gradients are the same on any number of ranks."""
    seen = []
    for step in steps:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        control.backward(model(inputs).square().mean() * (float("inf") if step == 6 else 1.0))
        outcome = control.step()
        control.zero_grad()
        norm = 0.0 if outcome.skipped else outcome.norm
        seen.append([outcome.step, outcome.skipped, norm, outcome.limit, control.scale])
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return [seen, [param.tolist() for param in whole]]


def save(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        model, optimizer, control = make(*case)
        train(model, control, range(4))
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state, "control": control}, checkpoint_id=folder / name)
        found[name] = train(model, control, range(4, 8))
    return found


def load(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        model, optimizer, control = make(*case)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state, "control": control}, checkpoint_id=folder / name)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        found[name] = train(model, control, range(4, 8))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, world(4).run(save, folder)[0]


def test_training_resumes_bit_for_bit_on_the_same_ranks(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = saved
    assert world(4).run(load, folder) == [expected] * 4


@pytest.mark.parametrize("ranks", [2, 1])
def test_training_resumes_on_fewer_ranks(saved: tuple[Path, dict[str, Any]], ranks: int) -> None:
    folder, expected = saved
    for found in world(ranks).run(load, folder) if ranks > 1 else [load(0, folder)]:
        for name, (seen, params) in expected.items():
            for step, wanted in zip(found[name][0], seen, strict=True):
                assert step == pytest.approx(wanted, rel=1e-4), name
            torch.testing.assert_close(
                [torch.tensor(p) for p in found[name][1]], [torch.tensor(p) for p in params], rtol=1e-3, atol=1e-5
            )


def optimizers_that_step_alone(rank: int, folder: Path, is_loading: bool) -> Any:
    model: Any = fully_shard(seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))), mesh=line())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    control = gradilocks.GradientControl(*optimizers, model=model, clip=gradilocks.AdaGC(warmup=1), scale=None)
    if is_loading:
        dcp.load({"control": control}, checkpoint_id=folder)
        return str(control.state_dict())
    for step in range(3):
        model(torch.full((2, 3), 1.0 + step)).square().mean().backward()
        for optimizer in optimizers:
            control.step(only=optimizer)
        control.zero_grad()
    dcp.save({"control": control}, checkpoint_id=folder)
    return str(control.state_dict())


def test_the_memory_of_optimizers_that_step_alone_is_loaded(tmp_path: Path) -> None:
    saved = world(2).run(optimizers_that_step_alone, tmp_path, False)
    assert world(2).run(optimizers_that_step_alone, tmp_path, True) == saved


def stages(rank: int, folder: Path, is_loading: bool) -> Any:
    """Each stage saves the memory of its own parameters; the checkpoint has all of them."""
    mesh = mesh_of((2,), ("pp",))
    model = seeded(lambda: nn.ModuleDict({f"layer{rank}": nn.Linear(3, 2)}), seed=rank)
    control = gradilocks.GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        clip=gradilocks.AdaGC(warmup=1),
        scale=None,
        mesh=mesh,
        distinct="pp",
    )

    def step(number: int) -> Any:
        for i, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 * (1 + rank + i) * (1 + number % 3))
        return control.step().norm

    if is_loading:
        dcp.load({"control": control}, checkpoint_id=folder)
    else:
        for number in range(3):
            step(number)
        dcp.save({"control": control}, checkpoint_id=folder)
    minima = control.state_dict()["gradilocks"]["clip"]["0"]["0"]
    return [{key: value for key, value in minima.items() if key != "policy"}, step(3)]


def test_pipeline_stages_save_and_load_the_memory_of_their_own_parameters(tmp_path: Path) -> None:
    before, after = (world(2).run(stages, tmp_path, is_loading) for is_loading in (False, True))
    assert before == after
    names = [{name for value in entry.values() if isinstance(value, dict) for name in value} for entry, _ in before]
    assert names == [{"layer0.weight", "layer0.bias"}, {"layer1.weight", "layer1.bias"}]
