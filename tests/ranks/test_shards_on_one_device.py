"""FSDP2 on a mesh of one device trains as the whole model does, also through the collective of several ranks.

NCCL serves no CPU tensors, so what ranks exchange must be on the GPU. The same runs over gloo on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import local_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradilocks
from gradilocks import control as control_module
from gradilocks.ranks.layout import Layout, collective_device, layout_of

STEPS, BAD_STEP = 6, 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh of one device, over the usual backend of that device."""
    kind, options = request.param, {}
    if kind == "cuda":
        torch.zeros(1, device="cuda")  # A mesh warns if nobody has chosen the device before.
        options["device_id"] = torch.device("cuda", 0)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1, **options
    )
    try:
        yield init_device_mesh(kind, (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank takes the path of several."""

    def layout(params: Any, *_: Any, **__: Any) -> Layout:
        world = dist.group.WORLD
        groups, shares, device = (world,), (1.0,) * len(params), collective_device(world, params)
        return Layout((0,), groups, groups, (), 0, shares, device)

    monkeypatch.setattr(control_module, "layout_of", layout)


def model_on(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh()
    return nn.Sequential(*layers).to(device)


def loss_of(model: nn.Module, step: int, device: str) -> Tensor:
    data = torch.linspace(-1.0, 1.0, 32, device=device).reshape(4, 8) + step
    return (model(data) * 3.0).square().sum()  # type: ignore[no-any-return]


def write_inf(model: nn.Module, step: int) -> None:
    if step == BAD_STEP:
        local_of(next(model.parameters()).grad).view(-1)[0] = math.inf


def by_control(model: nn.Module, device: str, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> list[Any]:
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    control = gradilocks.GradientControl(optimizer, model=model, **options)
    seen: list[Any] = []
    for step in range(STEPS):
        control.backward(loss_of(model, step, device))
        write_inf(model, step)
        outcome = control.step()
        assert outcome.skipped == (step == BAD_STEP)
        assert outcome.culprits == (("0.weight",) if outcome.skipped else ())
        seen += [outcome.norm, outcome.limit, control.scale]
        control.zero_grad()
    if options.get("scale", "dynamic") is None:
        assert control.scale == 1.0
    return seen


def by_scaler(model: nn.Module, device: str, *, fused: bool) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = gradilocks.GradScaler(device, model=model)
    seen: list[Any] = []
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, device)).backward()
        write_inf(model, step)
        scaler.unscale_(optimizer)
        seen.append(gradilocks.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad()
    return seen


TRAININGS: dict[str, Callable[[nn.Module, str], list[Any]]] = {
    "no scale": lambda model, device: by_control(model, device, scale=None, clip=1.0),
    "dynamic scale": lambda model, device: by_control(model, device, clip=1.0),
    "headroom": lambda model, device: by_control(model, device, scale=gradilocks.HeadroomScale(), clip=1.0),
    "single tensors": lambda model, device: by_control(model, device, clip=gradilocks.AdaGC(warmup=2)),
    "a policy that learns": lambda model, device: by_control(model, device, clip=gradilocks.ZScoreClip(0.1, warmup=2)),
    "our AdamW": lambda model, device: by_control(model, device, gradilocks.optim.AdamW, clip=1.0),
    "our SGD": lambda model, device: by_control(model, device, gradilocks.optim.SGD, clip=1.0),
    "a scaler": lambda model, device: by_scaler(model, device, fused=False),
    "a scaler, fused": lambda model, device: by_scaler(model, device, fused=True),
}


def compare(mesh: Any, training: str, **options: Any) -> None:
    device = mesh.device_type
    whole, sharded = model_on(device), model_on(device)
    fully_shard(sharded, mesh=mesh, **options)
    original, control_module.layout_of = control_module.layout_of, layout_of
    try:
        expected = TRAININGS[training](whole, device)
    finally:
        control_module.layout_of = original
    found = TRAININGS[training](sharded, device)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(local_of(ours).cpu(), theirs.cpu(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("training", TRAININGS)
def test_a_sharded_model_trains_as_the_whole_one(mesh: Any, training: str) -> None:
    compare(mesh, training)


@pytest.mark.usefixtures("collective")
@pytest.mark.parametrize("training", [name for name in TRAININGS if "scaler" not in name])
def test_a_sharded_model_trains_as_the_whole_one_through_the_collective(mesh: Any, training: str) -> None:
    compare(mesh, training)


@pytest.mark.gpu
@pytest.mark.usefixtures("collective")
@pytest.mark.parametrize("mesh", ["cuda"], indirect=True)
@pytest.mark.parametrize("training", TRAININGS)
def test_an_offloaded_model_trains_as_the_whole_one(mesh: Any, training: str) -> None:
    compare(mesh, training, offload_policy=CPUOffloadPolicy())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.usefixtures("collective")
@pytest.mark.parametrize("mesh", ["cuda"], indirect=True)
@pytest.mark.parametrize("optimizer_class", [gradilocks.optim.AdamW, torch.optim.AdamW], ids=["ours", "torch's"])
@pytest.mark.parametrize("clip", [None, 1.0, gradilocks.ZScoreClip()], ids=["none", "norm", "learns"])
def test_a_step_over_ranks_does_not_synchronize(mesh: Any, optimizer_class: Any, clip: Any) -> None:
    model = model_on("cuda")
    fully_shard(model, mesh=mesh)
    control = gradilocks.GradientControl(
        optimizer_class(model.parameters(), lr=0.01, fused=True)
        if optimizer_class is torch.optim.AdamW
        else optimizer_class(model.parameters(), lr=0.01),
        model=model,
        clip=clip,
        give_up_after=3,
    )
    for step in range(24):  # Past the copy of the rows at step 16 and its reading LAG steps later.
        loss = loss_of(model, step, "cuda")
        if step > 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            control.backward(loss)
            control.step()
            control.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert control.outcome is not None
    assert control.outcome.step == 24


CLIPS = {
    "norm": lambda: gradilocks.ClipByNorm(0.5),
    "learns": lambda: gradilocks.ZScoreClip(),
    "learns per tensor": lambda: gradilocks.AdaGC(warmup=2),
}
SCALES = {
    "dynamic": lambda: gradilocks.DynamicScale(init_scale=2.0**10, growth_interval=3),
    "headroom": lambda: gradilocks.HeadroomScale(),
}
SHAPES = [(16, 8), (16,), (4, 16), ()]


class GivenGradients:
    """Parameters sharded over the mesh, whose gradients are the inputs."""

    def __init__(self, mesh: Any, clip: str, scale: str, make_optimizer: Callable[[Any], Any]) -> None:
        values = self.random(0)
        self.params = nn.ParameterList(
            nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]) if value.ndim else value) for value in values
        )
        optimizer = make_optimizer(self.params.parameters())
        self.control = gradilocks.GradientControl(
            optimizer, model=self.params, clip=CLIPS[clip](), scale=SCALES[scale]()
        )
        self.inputs = [torch.zeros_like(value) for value in values]

    @staticmethod
    def random(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).cuda() for shape in SHAPES]

    def load(self, step: int) -> None:
        for into, new in zip(self.inputs, self.random(step), strict=True):
            into.copy_(new)
        if step in (3, 6):
            self.inputs[2][1, 3] = math.inf

    def step(self) -> gradilocks.Outcome:
        loss: Any = sum((local_of(p) * i).sum() for p, i in zip(self.params, self.inputs, strict=True))
        self.control.zero_grad()
        self.control.backward(loss)
        return self.control.step()


@pytest.mark.gpu
@pytest.mark.usefixtures("collective")
@pytest.mark.parametrize("mesh", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda params: gradilocks.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True, capturable=True),
    ],
    ids=["ours", "torch's"],
)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("clip", CLIPS)
def test_replays_of_a_users_graph_equal_eager_steps(mesh: Any, clip: str, scale: str, make_optimizer: Any) -> None:
    eager, captured = (GivenGradients(mesh, clip, scale, make_optimizer) for _ in range(2))
    for training in (eager, captured):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(3):
                training.load(100 + step)
                training.step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = captured.step()

    def numbers(outcome: gradilocks.Outcome) -> tuple[Any, ...]:
        norm = outcome.norm if math.isfinite(outcome.norm) else "not finite"
        return outcome.skipped, outcome.scale, outcome.clipped, norm, outcome.culprits

    for step in range(10):
        eager.load(step)
        expected = numbers(eager.step())
        captured.load(step)
        graph.replay()
        assert numbers(outcome) == expected, step
        assert expected[0] == (step in (3, 6))
    for one, other in zip(eager.params, captured.params, strict=True):
        assert torch.equal(local_of(one), local_of(other))
