"""torch.distributed.checkpoint saves on four ranks, and fresh objects on 4, 2 and 1 go on alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradilocks
from tests.ranks.rank_programs import run_all

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*no_dist.*", "ignore:.*torch.distributed is.*", "ignore:TypedStorage"
)

LEARNS = gradilocks.chain(
    gradilocks.ZScoreClip(0.5, warmup=2), gradilocks.QuantileClip(0.5, window=4)
)
CASES: dict[str, dict[str, Any]] = {
    "torch's AdamW": {"optim": torch.optim.AdamW, "clip": LEARNS},
    "our AdamW": {"optim": gradilocks.optim.AdamW, "clip": LEARNS},
    "our SGD": {"optim": gradilocks.optim.SGD, "clip": 1.0, "momentum": 0.9},
    "masters": {"optim": gradilocks.optim.AdamW, "clip": LEARNS, "master_weights": True},
    "AdaGC": {"optim": torch.optim.AdamW, "clip": gradilocks.AdaGC(warmup=2)},
}


def _made(*, optim: Any, clip: Any, **more: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    if more.get("master_weights"):
        model = model.to(torch.bfloat16)
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optim(model.parameters(), lr=0.1, **more)
    scale = gradilocks.DynamicScale(init_scale=8.0, growth_interval=2)
    return (
        model,
        optimizer,
        gradilocks.GradientControl(optimizer, model=model, scale=scale, clip=clip),
    )


def _trained(model: nn.Module, control: Any, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 6, generator=generator)
        outputs = model(inputs.to(next(model.parameters()).dtype))
        control.backward(outputs.float().square().mean())
        outcome = control.step()
        seen.append((outcome.step, outcome.norm, outcome.limit, control.scale))
        control.zero_grad()
    return seen


class _In:
    """A program that also gets a folder."""

    def __init__(self, program: Callable[[Path], Any], folder: Path) -> None:
        self.__name__ = program.__name__
        self._program, self._folder = program, folder

    def __call__(self, rank: int) -> Any:
        return self._program(self._folder)


def saving(folder: Path) -> dict[str, Any]:
    found = {}
    for name, settings in CASES.items():
        model, optimizer, control = _made(**settings)
        _trained(model, control, range(4))
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optim": state, "control": control}
        dcp.save(saved, checkpoint_id=folder / name)
        found[name] = _trained(model, control, range(4, 8))
    return found


def loading(folder: Path) -> dict[str, Any]:
    found = {}
    for name, settings in CASES.items():
        model, optimizer, control = _made(**settings)
        weights, state = get_state_dict(model, optimizer)
        loaded: dict[str, Any] = {"model": weights, "optim": state, "control": control}
        dcp.load(loaded, checkpoint_id=folder / name)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optim"],
        )
        found[name] = _trained(model, control, range(4, 8))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    programs: Any = [_In(saving, folder)]
    every = run_all(programs, tmp_path_factory.mktemp("saving"), ranks=4)["saving"]
    assert all(each == every[0] for each in every)
    return folder, every[0]


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_fresh_objects_go_on_as_if_nothing_had_happened(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, ranks: int
) -> None:
    folder, expected = saved
    if ranks == 1:
        returned = [loading(folder)]
    else:
        programs: Any = [_In(loading, folder)]
        returned = run_all(programs, tmp_path, ranks=ranks)["loading"]
    for found in returned:
        for name in CASES:
            assert [each[0] for each in found[name]] == [5, 6, 7, 8]
            assert found[name] == expected[name], name
