"""Distribution of the parameters over ranks.

Each parameter has one number, its share: the weight of this rank's elements in a sum over all ranks. With

    share = shards · distinct / ranks

every element of the model counts once in  norm ** p = Σ over ranks of share · ‖local elements‖ ** p:

- ranks: number of ranks that decide together: those of `mesh=`, else all.
- shards: number of parts the parameter is split into: the product of the mesh sizes of its Shard placements; 1 for a
  plain tensor.
- distinct: number of different parameters that the ranks hold in its place: the product of the sizes of the `distinct=`
  dimensions (pipeline stages, experts) that its own mesh does not span.

Examples with 8 ranks. FSDP2: 8 · 1 / 8 = 1. A norm layer outside the plan of tensor parallelism: 1 · 1 / 8. A plain
tensor of one of 2 pipeline stages with 4 replicas each: 1 · 2 / 8.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks.torch_private import is_fsdp1_shard, local_tensor, localized_spec

ShareFunction = Callable[[str, Tensor], "float | None"]


@dataclass(frozen=True)
class Layout:
    """The ranks that decide together, and the share of each parameter on this rank."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of gathered rows."""
    groups: tuple[Any, ...]
    """Process groups whose collectives, one after the other, reach all of `ranks`. A single group, unless `mesh=` has
    several dimensions and omits some ranks of the world."""
    spmd_groups: tuple[Any, ...]
    """The same for the ranks with this rank's parameter list: `groups` without the `distinct=` dimensions."""
    distinct_groups: tuple[Any, ...]
    """Process groups of the `distinct=` dimensions."""
    stage: int
    """Index of this rank's parameter list: its row-major coordinate along the `distinct=` dimensions."""
    shares: tuple[float, ...]
    """For each parameter, the weight of this rank's elements in sums over all ranks."""
    device: torch.device
    """Device that the groups' backend supports."""
    distinct: tuple[str, ...] = ()
    """Names of the `distinct=` dimensions."""
    has_share_function: bool = False
    """True if `share=` was given, so that parameter lists may differ between ranks."""
    has_tensor_norms: bool = True
    """False if parts of one parameter may be on ranks of different stages, so that `spmd_groups` do not reach them all:
    `share=` with `distinct=`, or a DTensor that spans a `distinct=` dimension."""
    _weights: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks that decide together."""
        return len(self.ranks)

    def weights(self, like: Tensor) -> Tensor:
        """The shares as a tensor with the device and dtype of `like`, copied there once."""
        key = (like.device, like.dtype)
        if key not in self._weights:
            self._weights[key] = copy_to(torch.tensor(self.shares, dtype=like.dtype), like.device)
        return self._weights[key]


@dataclass(frozen=True)
class _RankGrid:
    """The ranks of `mesh=`, or all ranks, as a grid with named dimensions."""

    ranks: Tensor
    names: tuple[str, ...]
    dim_groups: tuple[Any, ...]
    is_world: bool
    """True if these are all ranks."""
    is_declared: bool
    """True if `mesh=` was given."""


def layout_of(
    params: Sequence[Tensor],
    names: Sequence[str],
    *,
    mesh: Any = None,
    distinct: str | Iterable[str] = (),
    share: ShareFunction | None = None,
    models: Iterable[nn.Module] = (),
) -> Layout | None:
    """Finds the ranks that must decide together, and the share of each parameter, without communication.

    Args:
        params: all parameters of this rank's optimizers.
        names: their names.
        mesh: DeviceMesh or ProcessGroup of the ranks that train the model; None for all ranks.
        distinct: names of the dimensions of `mesh` along which ranks hold different parameters.
        share: function of name and parameter that overrides the share where it does not return None.
        models: searched for DistributedDataParallel modules first; if they have none, all objects of the process are
            searched (0.1 to 0.4 s).

    Returns:
        None if one rank decides alone: a single rank, or replicas whose gradients DistributedDataParallel averages, so
        that every rank decides the same.

    Raises:
        ValueError: if the parameters and the arguments do not determine the shares.
    """
    distinct = (distinct,) if isinstance(distinct, str) else tuple(distinct)
    if distinct and mesh is None:
        raise ValueError(f"distinct={distinct!r} names dimensions of mesh=. Pass mesh= too.")
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    grid = _rank_grid(mesh)
    unknown = [name for name in distinct if name not in grid.names]
    if unknown:
        dims = f"has dimensions {', '.join(grid.names)}" if grid.names else "has no named dimensions"
        raise ValueError(f"distinct= names {', '.join(unknown)}, but mesh= {dims}.")
    declared_shares = [
        None if share is None else _check_share(share(name, p), name) for p, name in zip(params, names, strict=True)
    ]
    if not grid.is_declared and (
        grid.ranks.numel() == 1 or not _must_combine_norms(params, names, declared_shares, models)
    ):
        return None
    distinct_dims = [grid.names.index(name) for name in distinct]
    shares = [
        _share(param, name, grid, distinct_dims) if value is None else value
        for param, name, value in zip(params, names, declared_shares, strict=True)
    ]
    if grid.ranks.numel() == 1:
        return None
    spans_stages = any(_span(param, grid, dim) > 1 for dim in distinct_dims for param in params)
    return _make_layout(
        params,
        shares,
        grid,
        distinct_dims,
        distinct=distinct,
        has_share_function=share is not None,
        has_tensor_norms=not (distinct_dims and (share is not None or spans_stages)),
    )


def _rank_grid(mesh: Any) -> _RankGrid:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    rank = dist.get_rank()
    is_declared = mesh is not None
    mesh = mesh if is_declared else dist.group.WORLD
    if isinstance(mesh, DeviceMesh):
        ranks, names = mesh.mesh.detach().cpu(), tuple(mesh.mesh_dim_names or ())
        is_member = mesh.get_coordinate() is not None
    elif isinstance(mesh, dist.ProcessGroup):
        ranks, names = torch.tensor(dist.get_process_group_ranks(mesh)), ()
        is_member = rank in ranks
    elif mesh == dist.GroupMember.NON_GROUP_MEMBER:  # `new_group` returns it on ranks that are not members.
        raise ValueError(f"rank {rank} is not in mesh=. Construct the control on the ranks of the group only.")
    else:
        raise TypeError(f"mesh= takes a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}.")
    if not is_member:
        raise ValueError(f"rank {rank} is not in mesh= ({format_ranks(ranks.flatten().tolist())}).")
    groups = tuple(mesh.get_all_groups()) if isinstance(mesh, DeviceMesh) else (mesh,)
    return _RankGrid(ranks, names, groups, ranks.numel() == dist.get_world_size(), is_declared)


def _check_share(value: Any, name: str) -> float | None:
    if value is not None and not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"share= returned {value!r} for {name}; a share is a number from 0 to 1, or None.")
    return None if value is None else float(value)


def _must_combine_norms(
    params: Sequence[Tensor], names: Sequence[str], declared_shares: Sequence[float | None], models: Iterable[nn.Module]
) -> bool:
    """True if ranks must combine their norms although `mesh=` is missing; raises ValueError if that is unclear."""
    import torch.distributed as dist

    world = dist.get_world_size()
    undeclared = [(p, n) for p, n, value in zip(params, names, declared_shares, strict=True) if value is None]
    plain = [(p, n) for p, n in undeclared if p.requires_grad and dtensor_spec(p) is None and not is_fsdp1_shard(p)]
    group_sizes = _data_parallel_groups([param for param, _ in plain], models)
    unwrapped = [name for param, name in plain if id(param) not in group_sizes]
    if group_sizes and unwrapped:
        raise ValueError(
            f"{_format_names(unwrapped)} outside of DistributedDataParallel, which averages the other gradients: ranks "
            "would compute different norms. Wrap all trainable parameters, or pass mesh=torch.distributed.group.WORLD "
            "if you average these gradients yourself, or share= if the ranks hold different parameters."
        )
    small = [size for size in group_sizes.values() if size < world]
    if small:
        raise ValueError(
            f"DistributedDataParallel spans {small[0]} of {world} ranks. Pass mesh=, the DeviceMesh of all ranks that "
            'train the model, and distinct=("pp",) for pipeline stages; or, for several independent models, '
            "mesh=model.process_group."
        )
    if len(undeclared) < len(params) or any(dtensor_spec(p) is not None or is_fsdp1_shard(p) for p in params):
        return True
    if unwrapped:
        warnings.warn(
            f"{world} ranks, plain parameters, no DistributedDataParallel: each rank decides from its own gradients, "
            "which is correct only if you average them yourself. Pass mesh=torch.distributed.group.WORLD to decide "
            "together.",
            stacklevel=4,
        )
    return False


def replicas_of(params: Sequence[Tensor], models: Iterable[nn.Module]) -> Layout | None:
    """The ranks whose gradients DistributedDataParallel averages, as a Layout without shares; None for a single rank.

    They reach the same decision without communication, provided that their settings and scales are equal.
    """
    import torch.distributed as dist

    if world_size() == 1:
        return None
    if not _data_parallel_groups([param for param in params if param.requires_grad], models):
        return None
    world = (dist.group.WORLD,)
    ranks = tuple(range(dist.get_world_size()))
    return Layout(ranks, world, world, (), 0, (), device=collective_device(dist.group.WORLD, params))


def _data_parallel_groups(params: Sequence[Tensor], models: Iterable[nn.Module]) -> dict[int, int]:
    """For each parameter that DistributedDataParallel averages, by id: the size of its process group.

    DDP does not mark its parameters, so if `models` do not contain it, all objects of the process are searched.
    """
    kind = nn.parallel.DistributedDataParallel
    param_ids = {id(param) for param in params}
    group_sizes: dict[int, int] = {}

    def search(candidates: Iterable[Any]) -> None:
        for ddp in candidates:
            # Not isinstance(), which triggers warnings of torch's deprecated objects.
            if issubclass(type(ddp), kind) and getattr(ddp, "process_group", None) is not None:
                for name, param in ddp.module.named_parameters():
                    if id(param) in param_ids and name not in ddp.parameters_to_ignore:
                        group_sizes[id(param)] = ddp.process_group.size()

    search(module for model in models for module in model.modules())
    if len(group_sizes) < len(param_ids):
        search(gc.get_objects())
    return group_sizes


def _share(param: Tensor, name: str, grid: _RankGrid, distinct: Sequence[int]) -> float:
    if is_fsdp1_shard(param):
        raise ValueError(
            f"{name} belongs to FullyShardedDataParallel (FSDP1), whose shards are plain tensors. Use fully_shard "
            "(FSDP2), or pass share=lambda name, param: 1.0 (1 / world size with NO_SHARD)."
        )
    ranks, shards = grid.ranks, 1
    spec = dtensor_spec(param)
    if spec is not None:
        mesh_ranks = spec.device_mesh.mesh
        if any(placement.is_partial() for placement in spec.placements):
            raise ValueError(
                f"{name} is a partial sum, {tuple(spec.placements)}: redistribute it to Shard or Replicate."
            )
        placements = enumerate(spec.placements)
        shards = math.prod(mesh_ranks.size(dim) for dim, placement in placements if not placement.is_replicate())
        where = f"{name} is a DTensor on {format_ranks(mesh_ranks.flatten().tolist())}"
        if not grid.is_declared and mesh_ranks.numel() < ranks.numel():
            raise ValueError(
                f"{where} of {ranks.numel()}. Pass mesh=, the DeviceMesh of all ranks that train the model, and "
                'distinct=("pp",) for pipeline stages.'
            )
        if (
            not torch.isin(mesh_ranks, ranks).all()
            or ranks.numel() % mesh_ranks.numel()
            or spec.device_mesh.get_coordinate() is None
        ):
            raise ValueError(f"{where}, which is not a sub-mesh of mesh= ({format_ranks(ranks.flatten().tolist())}).")
    different = math.prod(ranks.size(dim) // _span(param, grid, dim) for dim in distinct)
    return shards * different / ranks.numel()


def _span(param: Tensor, grid: _RankGrid, dim: int) -> int:
    """Number of coordinates along one dimension of the grid over which the mesh of a parameter extends."""
    spec = dtensor_spec(param)
    if spec is None:
        return 1
    return len(set(torch.isin(grid.ranks, spec.device_mesh.mesh).nonzero()[:, dim].tolist()))


def _make_layout(
    params: Sequence[Tensor], shares: Sequence[float], grid: _RankGrid, stage_dims: Sequence[int], **options: Any
) -> Layout:
    import torch.distributed as dist

    sizes, rank = grid.ranks.shape, dist.get_rank()
    dims = [dim for dim in range(len(sizes)) if sizes[dim] > 1]
    groups = (dist.group.WORLD,) if grid.is_world else tuple(grid.dim_groups[dim] for dim in dims)
    coordinate = (grid.ranks == rank).nonzero()[0].tolist()
    stage = 0
    for dim in stage_dims:
        stage = stage * sizes[dim] + coordinate[dim]
    return Layout(
        ranks=tuple(range(grid.ranks.numel())) if grid.is_world else tuple(grid.ranks.flatten().tolist()),
        groups=groups,
        spmd_groups=tuple(grid.dim_groups[dim] for dim in dims if dim not in stage_dims) if stage_dims else groups,
        distinct_groups=tuple(grid.dim_groups[dim] for dim in stage_dims if dim in dims),
        stage=stage,
        shares=tuple(shares),
        device=collective_device(groups[0], params),
        **options,
    )


def collective_device(group: Any, params: Sequence[Tensor]) -> torch.device:
    """A device that the group's backend supports: that of the parameters if possible, the host for gloo.

    With CPU offload the gradients are on the host, which NCCL does not support.
    """
    import torch.distributed as dist

    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    device_types = [kind for kind, backend in backends.items() if backend != "gloo"]
    if "cpu" in backends and (not device_types or not any(param.device.type in device_types for param in params)):
        return torch.device("cpu")
    for param in params:
        if param.device.type in device_types:
            return local(param).device
    return torch.device(device_types[0], torch.get_device_module(device_types[0]).current_device())


def is_dtensor(tensor: object) -> bool:
    """True for a DTensor. Does not import torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def dtensor_spec(tensor: Tensor) -> Any:
    """An object with the `device_mesh` and `placements` of a DTensor; None for a tensor that is not distributed."""
    return tensor if is_dtensor(tensor) else localized_spec(tensor)


def meshes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """The device meshes of the DTensors among `tensors`; `fully_shard` without `mesh=` creates equal ones."""
    distributed: list[Any] = [t for t in tensors if type(t) not in (nn.Parameter, Tensor) and is_dtensor(t)]
    return list(dict.fromkeys(tensor.device_mesh for tensor in distributed))


def local(tensor: Tensor) -> Tensor:
    """This rank's elements of a DTensor, in the same memory; any other tensor itself."""
    if type(tensor) is Tensor or not is_dtensor(tensor):
        return tensor
    elements: Any = local_tensor(tensor)
    # The local tensor may be the result of a collective that is still running.
    return elements.wait() if hasattr(elements, "wait") else elements  # type: ignore[no-any-return]


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, or the tensor itself if it is there. A copy to a GPU does not wait for it."""
    source = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    # A copy to the host must be synchronous, or it could be read too early.
    return source.to(device, non_blocking=device.type == "cuda")


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def reduce_partial(grad: Tensor, param: Tensor | None) -> Tensor:
    """A DTensor gradient with the placements of its parameter: partial sums are added up by all ranks of the mesh.

    Args:
        grad: a DTensor.
        param: its parameter; without a DTensor parameter, partial sums become replicas.
    """
    from torch.distributed.tensor import Replicate

    distributed: Any = grad
    placements = getattr(param, "placements", None)
    if placements is None:
        placements = tuple(Replicate() if item.is_partial() else item for item in distributed.placements)
    if distributed.placements == placements:
        return grad
    result: Tensor = distributed.redistribute(placements=placements)
    return result


def check_rows_are_local(params: Sequence[Tensor], counts: Sequence[int], names: Sequence[str]) -> None:
    """Raises ValueError if a row of a parameter is split over ranks.

    Args:
        params: the parameters.
        counts: number of rows of each; 0 if it is excluded.
        names: their names.
    """
    split = []
    for param, count, name in zip(params, counts, names, strict=True):
        spec = dtensor_spec(param)
        placements = [item for item in spec.placements if not item.is_replicate()] if spec is not None and count else []
        if any(count == 1 or getattr(item, "dim", None) != 0 for item in placements):
            split.append(name)
    if split:
        raise ValueError(
            f"AdaptiveClip needs whole rows, but ranks hold parts of rows of {', '.join(split)}. Pass them in exclude=."
        )


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"
