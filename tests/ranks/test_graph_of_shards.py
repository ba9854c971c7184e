"""A step over shards in a CUDA graph: the collective, the decision and the update are replayed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradilocks
from gradilocks import control as control_module

pytestmark = pytest.mark.gpu
BAD = {3, 6}
STEPS = 10

CLIPS = {
    "norm": lambda: gradilocks.ClipByNorm(0.5),
    "tensors apart": lambda: gradilocks.ClipPerTensor(0.1),
    "learning": lambda: gradilocks.ZScoreClip(),
    "learning of each tensor": lambda: gradilocks.AdaGC(warmup=2),
    "rows apart": lambda: gradilocks.AdaptiveClip(),
}
SCALES = {
    "dynamic": lambda: gradilocks.DynamicScale(init_scale=2.0**10, growth_interval=3),
    "headroom": lambda: gradilocks.HeadroomScale(),
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.zeros(1, device="cuda")
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


class _Training:
    """Parameters, sharded over the mesh, whose gradients are given."""

    def __init__(self, mesh: Any, clip: str, scale: str, optimizer: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        generator = torch.Generator().manual_seed(0)
        shapes = [(16, 8), (16,), (4, 16), ()]
        values = [torch.randn(shape, generator=generator).cuda() for shape in shapes]
        self.model = nn.ParameterList(
            nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]) if value.ndim else value)
            for value in values
        )
        self.control = gradilocks.GradientControl(
            optimizer(self.model.parameters()), model=self.model, clip=CLIPS[clip](),
            scale=SCALES[scale](),
        )  # fmt: skip
        self.inputs = [torch.zeros_like(local(param)) for param in self.model]

    def step(self) -> Any:
        loss = sum((local(p) * i).sum() for p, i in zip(self.model, self.inputs, strict=True))
        assert isinstance(loss, torch.Tensor)
        self.control.zero_grad()
        self.control.backward(loss)
        return self.control.step()


def local(param: Any) -> torch.Tensor:
    return param.to_local() if hasattr(param, "to_local") else param  # type: ignore[no-any-return]


def inputs(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(shape, generator=generator) for shape in [(16, 8), (16,), (4, 16), ()]]
    if step in BAD:
        found[2][1, 3] = math.inf
    return [each.cuda() for each in found]


def seen(outcome: Any) -> tuple[Any, ...]:
    norm = outcome.norm if math.isfinite(outcome.norm) else str(outcome.norm)
    return outcome.skipped, outcome.scale, outcome.clipped, norm, outcome.culprits


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: gradilocks.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True, capturable=True),
    ],
    ids=["ours", "torch's"],
)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("clip", CLIPS)
def test_replays_give_what_eager_steps_give(
    mesh: Any, clip: str, scale: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the collective: alone on its mesh a rank would go the way of one process."""
    monkeypatch.setattr(control_module, "has_other_ranks", lambda: True)
    eager, captured = (_Training(mesh, clip, scale, optimizer) for _ in range(2))
    expected = []
    for training in (eager, captured):  # Alike: kernels are compiled, state is made.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(3):
                for into, new in zip(training.inputs, inputs(100 + step), strict=True):
                    into.copy_(new)
                training.step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = captured.step()
    for step in range(STEPS):
        for into, new in zip(eager.inputs, inputs(step), strict=True):
            into.copy_(new)
        expected.append(seen(eager.step()))
        for into, new in zip(captured.inputs, inputs(step), strict=True):
            into.copy_(new)
        graph.replay()
        assert seen(outcome) == expected[-1], step
    assert [each[0] for each in expected] == [step in BAD for step in range(STEPS)]
    for one, other in zip(eager.model, captured.model, strict=True):
        assert torch.equal(local(one), local(other))
