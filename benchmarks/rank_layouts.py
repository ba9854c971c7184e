"""How the parameters of a workload lie on ranks, as torch's wrappers leave them.

DDP: plain tensors, the same on all. FSDP2: shards along dimension 0. FSDP2 x TP: matrices also cut
along dimension 1 by pairs of ranks, which copy the rest. PP x FSDP2: two stages with half of the
tensors each, sharded by the ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from workloads import SCALE, Shapes, Workload


@dataclass(frozen=True)
class RankLayout:
    """How tensors lie on the ranks, and what a control has to be told."""

    place: Callable[[int, Tensor], Any]
    """The number of a tensor and all of it → what this rank has of it; None if nothing."""
    told: dict[str, Any] = field(default_factory=dict)
    pipeline: Any = None
    """The group of the stages, if there are any."""


def replicas(ranks: int) -> RankLayout:
    return RankLayout(lambda number, tensor: tensor.clone())


def fsdp2(ranks: int, kind: str = "cpu") -> RankLayout:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(kind, (ranks,))
    return RankLayout(lambda number, tensor: distribute_tensor(tensor, mesh, [Shard(0)]))


def fsdp2_tp(ranks: int) -> RankLayout | None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if ranks < 4 or ranks % 2:
        return None
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))

    def place(number: int, tensor: Tensor) -> Any:
        along = Shard(1) if tensor.dim() > 1 else Replicate()
        return distribute_tensor(tensor, mesh, [Shard(0), along])

    return RankLayout(place, told={"mesh": mesh})


def pp_fsdp2(ranks: int) -> RankLayout | None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if ranks < 4 or ranks % 2:
        return None
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()

    def place(number: int, tensor: Tensor) -> Any:
        if number % 2 != stage:
            return None
        return distribute_tensor(tensor, mesh["dp"], [Shard(0)])

    told = {"mesh": mesh, "distinct": ("pp",)}
    return RankLayout(place, told=told, pipeline=mesh["pp"].get_group())


LAYOUTS: dict[str, Callable[[int], RankLayout | None]] = {
    "DDP": replicas,
    "FSDP2": fsdp2,
    "FSDP2 x TP": fsdp2_tp,
    "PP x FSDP2": pp_fsdp2,
}
"""A number of ranks → the layout; None where it needs more ranks."""


class RankLoad:
    """A workload of which each rank has its part: parameters, and gradients to start rounds from.

    Args:
        shapes: of the whole parameters.
        layout: how they lie on the ranks.
        device: of this rank.
        scale: what the gradients carry.
    """

    def __init__(
        self,
        shapes: Shapes,
        layout: RankLayout,
        *,
        device: torch.device,
        scale: float = SCALE,
    ) -> None:
        self._whole = Workload(shapes, device=device, scale=scale)
        self.layout, self.device, self.scale = layout, device, scale
        self.count, self.eps, self.loss = self._whole.count, self._whole.eps, self._whole.loss
        self.count_of_tensors = len(shapes)
        self.described = self._whole.describe(self._whole.norm / 2)
        self._scaled = [local(each) for each in self._placed(iter(self._whole.scaled))]
        self._whole.scaled = []

    def parameters(self) -> list[Any]:
        """A fresh set of what this rank holds, with room for gradients."""
        made = [each.requires_grad_() for each in self._placed(self._whole.start())]
        for param in made:
            param.grad = torch.zeros_like(param)
        return made

    def put_gradients(self, params: list[Any]) -> None:
        """Scaled gradients, as backward would leave them; on all ranks at about the same time."""
        room = [local(param.grad) for param in params]
        torch._foreach_copy_(room, self._scaled)
        for param, values in zip(params, room, strict=True):
            param.grad = laid_out_like(param, values)  # Another object: it counts as a new one.
        if dist.get_world_size() > 1:
            dist.barrier()

    def results(self, params: list[Any]) -> list[Tensor]:
        """What this rank holds of the parameters."""
        return [local(param) for param in params]

    def start(self) -> Iterator[Tensor]:
        """The same before the first step."""
        return (local(each) for each in self._placed(self._whole.start()))

    def _placed(self, tensors: Iterator[Tensor]) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            placed = self.layout.place(number, tensor)
            if placed is not None:
                yield placed.detach()


def laid_out_like(param: Any, values: Tensor) -> Any:
    """This rank's elements as a tensor that lies as the parameter does, in the same memory."""
    from torch.distributed.tensor import DTensor

    if not isinstance(param, DTensor):
        return values
    return DTensor.from_local(
        values,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def local(tensor: Any) -> Tensor:
    """This rank's elements, in the same memory."""
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor.detach()
