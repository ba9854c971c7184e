"""What a check knows of the ranks: which one it is, how many there are, on which device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """This rank among all, inside a process group that covers them."""

    rank: int
    size: int
    device: torch.device

    def mesh(self, *dims: tuple[str, int]) -> Any:
        """A mesh of all ranks, a name and a size a dimension; the same one each time."""
        return _mesh(self.device.type, dims)


@functools.cache  # Every mesh makes process groups, which takes a tenth of a second on a CPU.
def _mesh(kind: str, dims: tuple[tuple[str, int], ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    names, shape = zip(*dims, strict=True)
    return init_device_mesh(kind, shape, mesh_dim_names=names)
