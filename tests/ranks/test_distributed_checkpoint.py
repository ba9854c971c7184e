"""torch.distributed.checkpoint saves on four ranks, and fresh objects on 4, 2 and 1 go on alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradilocks
from gradilocks.errors import BadState
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


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _made(*, optim: Any, clip: Any, **more: Any) -> tuple[nn.Module, Any, Any]:
    model = _model(torch.bfloat16 if more.get("master_weights") else torch.float32)
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


SCALERS: dict[str, dict[str, Any]] = {
    "as torch's": {"init_scale": 8.0, "growth_interval": 2},
    "headroom": {"policy": gradilocks.HeadroomScale(init_scale=8.0), "clip": 1.0},
    "chain": {"policy": gradilocks.DynamicScale(init_scale=8.0, growth_interval=2), "clip": LEARNS},
    "AdaGC": {"init_scale": 8.0, "growth_interval": 2, "clip": gradilocks.AdaGC(warmup=2)},
    "rows": {
        "policy": gradilocks.DynamicScale.megatron(init_scale=8.0, growth_interval=2),
        "clip": gradilocks.chain(
            gradilocks.AdaptiveClip(0.5), gradilocks.SkipSpikes(0.01, window=4, at_least=2)
        ),
    },
}


def _with_scaler(scaler: Any, optim: Any) -> tuple[nn.Module, Any, Any]:
    model = _model()
    return model, optim(model.parameters(), lr=0.1, weight_decay=0.01), scaler


def _scaled(model: nn.Module, optimizer: Any, scaler: Any, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean() * (float("inf") if step == 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        told: list[Any] = [scaler.get_scale()]
        if isinstance(scaler, gradilocks.GradScaler):
            assert scaler.outcome is not None
            told.append(scaler.outcome.skipped)
            if isinstance(scaler.outcome, gradilocks.Outcome) and not scaler.outcome.skipped:
                told += [scaler.outcome.norm, scaler.outcome.limit]
        seen.append(told)
        optimizer.zero_grad()
    return [seen, [_whole(param) for param in model.parameters()]]


def _whole(param: Any) -> Any:
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().tolist()


def scaler_saving(folder: Path) -> dict[str, Any]:
    found = {}
    for name, settings in SCALERS.items():
        scaler = gradilocks.GradScaler("cpu", **settings)
        model, optimizer, scaler = _with_scaler(scaler, gradilocks.optim.AdamW)
        _scaled(model, optimizer, scaler, range(4))
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optim": state, "scaler": scaler}
        dcp.save(saved, checkpoint_id=folder / f"scaler {name}")
        found[name] = _scaled(model, optimizer, scaler, range(4, 8))
    return found


def scaler_loading(folder: Path) -> dict[str, Any]:
    found = {}
    for name, settings in SCALERS.items():
        scaler = gradilocks.GradScaler("cpu", **settings)
        model, optimizer, scaler = _with_scaler(scaler, gradilocks.optim.AdamW)
        _load(folder / f"scaler {name}", model, optimizer, scaler)
        found[name] = _scaled(model, optimizer, scaler, range(4, 8))
    return found


def _load(path: Path, model: nn.Module, optimizer: Any, scaler: Any, **more: Any) -> None:
    weights, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optim": state, "scaler": scaler}
    dcp.load(loaded, checkpoint_id=path, **more)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"]
    )


def torch_saving(folder: Path) -> dict[str, Any]:
    """What a user of torch alone has: FSDP2, its AdamW and its GradScaler."""
    found = {}
    for fused in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        optim = functools.partial(torch.optim.AdamW, fused=fused)
        model, optimizer, _ = _with_scaler(scaler, optim)
        _scaled(model, optimizer, scaler, range(4))
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optim": state, "scaler": scaler}
        dcp.save(saved, checkpoint_id=folder / f"torch {fused}")
        found[str(fused)] = _scaled(model, optimizer, scaler, range(4, 8))
    return found


def torch_loading(folder: Path) -> dict[str, Any]:
    found = {}
    for fused in (False, True):
        for name, settings in {
            "as it is": {},
            "with a policy": {"policy": gradilocks.DynamicScale(growth_interval=2)},
            "with a clip": {"clip": gradilocks.ZScoreClip(1e9, warmup=2)},
        }.items():
            scaler = gradilocks.GradScaler("cpu", **settings)
            model, optimizer, scaler = _with_scaler(scaler, gradilocks.optim.AdamW)
            # What torch has not saved stays as it was made.
            planner = DefaultLoadPlanner(allow_partial_load=True) if settings else None
            _load(folder / f"torch {fused}", model, optimizer, scaler, planner=planner)
            found[f"{fused} {name}"] = _scaled(model, optimizer, scaler, range(4, 8))
    return found


PIPED = {
    "AdaGC": gradilocks.AdaGC(warmup=2),
    "chain": gradilocks.chain(
        gradilocks.ClipPerGroup({"*bias": 0.5}), gradilocks.AdaGC(warmup=2), LEARNS.policies[0]
    ),
}


def _stages(clip: Any, *, names: str = "whole") -> tuple[list[nn.Module], Any]:
    """Four layers on 1, 2 or 4 stages; of a chain of stages each learns from data of its own."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    every = [nn.Linear(4, 4) for _ in range(4)]
    held = range(4 * rank // ranks, 4 * (rank + 1) // ranks)
    first = 0 if names == "own" else held.start
    model = nn.ModuleDict({f"layer{at - held.start + first}": every[at] for at in held})
    more: dict[str, Any] = {}
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh

        more = {"mesh": init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))}
        more["distinct"] = "pp"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    named = None if names == "none" else model
    scale = gradilocks.DynamicScale(init_scale=8.0, growth_interval=2)
    control = gradilocks.GradientControl(optimizer, model=named, scale=scale, clip=clip, **more)
    return [every[at] for at in held], control


def _piped(layers: list[nn.Module], control: Any, steps: range) -> list[Any]:
    """Each layer has its own loss, so that the gradients are those of one process on any rank."""
    seen = []
    first = 4 * dist.get_rank() // dist.get_world_size() if dist.is_initialized() else 0
    for step in steps:
        losses = []
        for at, layer in enumerate(layers, start=first):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + at))
            losses.append(layer(inputs).square().mean() * 2.0 ** (3 * at))
        control.backward(sum(losses))
        outcome = control.step()
        seen.append((outcome.step, outcome.norm, outcome.limit, outcome.clipped, control.scale))
        control.zero_grad()
    saved = control.state_dict()["gradilocks"]
    usual = next(each for name, each in saved["clip_state"].items() if name.endswith("usual"))
    pairs = zip(saved["clip_parameters"], usual, strict=True)
    return [seen, sorted((name, place, number) for (name, place), number in pairs)]


def stage_saving(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, clip in PIPED.items():
        layers, control = _stages(clip)
        _piped(layers, control, range(4))
        dcp.save({"control": control}, checkpoint_id=folder / f"stages {name}")
        if dist.get_rank() == 3:  # One rank alone, of all: nothing waits.
            torch.save(control.state_dict(), folder / f"{name}.pt")
        found[name] = _piped(layers, control, range(4, 8))
    for names in ("own", "none"):
        layers, control = _stages(PIPED["AdaGC"], names=names)
        _piped(layers, control, range(4))
        dcp.save({"control": control}, checkpoint_id=folder / f"stages {names}")
        found[names] = _piped(layers, control, range(4, 8))
    _, fresh = _stages(PIPED["AdaGC"])
    dcp.save({"control": fresh}, checkpoint_id=folder / "stages fresh")
    return found


def _loaded(folder: Path, name: str, clip: Any, names: str = "whole") -> Any:
    layers, control = _stages(clip, names=names)
    more = {} if dist.is_initialized() else {"no_dist": True}
    try:
        dcp.load({"control": control}, checkpoint_id=folder / f"stages {name}", **more)
        return _piped(layers, control, range(4, 8))
    except (BadState, dcp.api.CheckpointException) as error:
        return str(error)


def stage_loading(folder: Path) -> dict[str, Any]:
    found = {name: _loaded(folder, name, clip) for name, clip in PIPED.items()}
    for names in ("own", "none"):
        found[names] = _loaded(folder, names, PIPED["AdaGC"], names)
    found["fresh"] = _loaded(folder, "fresh", PIPED["AdaGC"])
    found["renamed"] = _loaded(folder, "AdaGC", PIPED["AdaGC"], "own")
    for name, clip in PIPED.items():
        layers, control = _stages(clip)
        control.load_state_dict(torch.load(folder / f"{name}.pt"))
        found[f"{name} of rank 3"] = _piped(layers, control, range(4, 8))
    layers, control = _stages(PIPED["AdaGC"])
    nameless = torch.load(folder / "AdaGC.pt")
    del nameless["gradilocks"]["clip_parameters"]
    try:
        control.load_state_dict(nameless)
        found["nameless"] = "loaded"
    except BadState as error:
        found["nameless"] = str(error)
    return found


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
    programs: Any = [
        _In(each, folder) for each in (saving, stage_saving, scaler_saving, torch_saving)
    ]
    returned = run_all(programs, tmp_path_factory.mktemp("saving"), ranks=4)
    for every in returned.values():
        assert all(each == every[0] for each in every)
    return folder, {name: every[0] for name, every in returned.items()}


LOADING = (loading, stage_loading, scaler_loading, torch_loading)


@pytest.fixture(scope="module", params=[4, 2, 1])
def loaded(
    request: pytest.FixtureRequest,
    saved: tuple[Path, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[Any]]:
    folder, _ = saved
    if request.param == 1:
        return {each.__name__: [each(folder)] for each in LOADING}
    programs: Any = [_In(each, folder) for each in LOADING]
    return run_all(programs, tmp_path_factory.mktemp("loading"), ranks=request.param)


def test_fresh_objects_go_on_as_if_nothing_had_happened(
    saved: tuple[Path, dict[str, Any]], loaded: dict[str, list[Any]]
) -> None:
    expected = saved[1]["saving"]
    for found in loaded["loading"]:
        for name in CASES:
            assert [each[0] for each in found[name]] == [5, 6, 7, 8]
            assert found[name] == expected[name], name


def test_what_was_learned_of_each_parameter_goes_with_it_to_the_rank_that_holds_it(
    saved: tuple[Path, dict[str, Any]], loaded: dict[str, list[Any]]
) -> None:
    expected = saved[1]["stage_saving"]
    for found in loaded["stage_loading"]:
        for name in PIPED:
            seen, usual = expected[name]
            assert len({number for *_, number in usual}) == 8
            assert any(clipped for *_, clipped, _ in seen)
            for mine in (found[name], found[f"{name} of rank 3"]):
                assert mine[0] == seen, name
                assert [each[0] for each in mine[1]] == [each[0] for each in usual]
                assert [each[2] for each in mine[1]] == [each[2] for each in usual]


def test_names_that_stages_share_belong_to_a_stage_and_load_nowhere_else(
    saved: tuple[Path, dict[str, Any]], loaded: dict[str, list[Any]]
) -> None:
    expected, ranks = saved[1]["stage_saving"], len(loaded["stage_loading"])
    for found in loaded["stage_loading"]:
        for names in ("own", "none"):
            if ranks == 4:
                assert found[names] == expected[names]
            else:
                assert "AdaGC has learned of" in found[names]
        renamed = found["renamed"]
        if ranks == 1:
            assert renamed == found["AdaGC"]
        else:
            assert "several ranks hold a different parameter" in renamed or "learned of" in renamed


def test_a_checkpoint_that_says_not_whose_it_is_is_refused_where_ranks_differ(
    loaded: dict[str, list[Any]],
) -> None:
    for found in loaded["stage_loading"]:
        alone = len(loaded["stage_loading"]) == 1
        assert (found["nameless"] == "loaded") if alone else "but not of which" in found["nameless"]
        assert [each[0] for each in found["fresh"][0]] == [1, 2, 3, 4]


def test_a_fresh_scaler_goes_on_with_what_its_policies_have_learned(
    saved: tuple[Path, dict[str, Any]], loaded: dict[str, list[Any]]
) -> None:
    expected = saved[1]["scaler_saving"]
    for found in loaded["scaler_loading"]:
        for name, (seen, params) in expected.items():
            assert any(told[1] for told in seen)
            assert found[name][0] == [pytest.approx(told, rel=1e-6) for told in seen], name
            for mine, theirs in zip(found[name][1], params, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


def test_a_checkpoint_of_torchs_own_parts_loads_into_ours(
    saved: tuple[Path, dict[str, Any]], loaded: dict[str, list[Any]]
) -> None:
    expected = saved[1]["torch_saving"]
    for found in loaded["torch_loading"]:
        for name, (seen, params) in found.items():
            torchs, weights = expected[name.split()[0]]
            assert [told[0] for told in seen] == [told[0] for told in torchs], name
            for mine, theirs in zip(params, weights, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))
