"""Parameters, and a process group if one was named, in; which ranks measure them together out.

A DTensor says by its mesh which ranks hold it and who holds the same elements. What lies outside
its mesh it does not say: copies of the model (data parallel) or other parts of it (pipeline stages,
experts). The drop-ins, as torch, take each tensor over its own mesh. A GradientControl makes one
decision for one model, so it takes only what is known to be one, and refuses the rest.

Who takes part follows from the parameters, never from which gradients there are. Nothing is sent
from here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradilocks._torch import device_kinds, is_flattened
from gradilocks.values import RankGroup

__all__ = [
    "Layout",
    "ModelRanks",
    "any_distributed",
    "common_mesh",
    "covers_world",
    "device_for",
    "has_other_ranks",
    "is_distributed",
    "layout_of",
    "model_ranks_of",
    "rank_groups_of",
    "refuse_fsdp1_shards",
    "shortened",
    "with_sums_reduced",
]

_Name = Callable[[Tensor], str]


class Layout(NamedTuple):
    """How a distributed gradient lies on its mesh."""

    ranks: tuple[int, ...]
    """The ranks of the mesh, ascending."""
    counts: bool
    """Whether this rank's elements count: of the ranks that hold the same ones, the first's do."""
    mesh: Any
    """The DeviceMesh itself."""


def has_other_ranks() -> bool:
    """Whether other ranks train along."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    return int(dist.get_world_size()) > 1


def covers_world(rank_group: RankGroup) -> bool:
    """Whether all ranks that there are take part."""
    import torch.distributed as dist

    return len(rank_group.ranks) == dist.get_world_size()


def is_distributed(tensor: object) -> bool:
    """Whether `tensor` is a DTensor; does not import torch.distributed to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_distributed(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is a DTensor.

    Asked of parameters, not of gradients: a rank without gradients must not stay away.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    return any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def layout_of(
    param: Tensor, grad: Tensor, name: _Name, known: dict[tuple[int, Any], Layout]
) -> Layout:
    """How the distributed gradient of `param` lies on its mesh; its ranks hold elements of it.

    Args:
        param: the parameter, or whatever holds the gradient in its place.
        grad: its gradient, a DTensor.
        name: tells the parameter's name, for the error message.
        known: the layouts found so far, to be added to.
    """
    mesh, placements = cast("Any", grad).device_mesh, cast("Any", grad).placements
    if isinstance(param, Tensor):
        home = cast("Any", param).device_mesh if is_distributed(param) else None
        if home is not mesh and (home is None or _ranks_on(home) != _ranks_on(mesh)):
            raise ValueError(
                f"the gradient of {name(param)} is a DTensor on other ranks than the parameter, so "
                "which ranks measure it together is not known. Give it a gradient on its own mesh."
            )
    if (id(mesh), placements) in known:
        return known[id(mesh), placements]
    counts, mine = True, mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if placement.is_replicate() and mine is not None and mine[dim] != 0:
            counts = False
    layout = known[id(mesh), placements] = Layout(_ranks_on(mesh), counts, mesh)
    return layout


def with_sums_reduced(param: Tensor, grad: Tensor) -> Tensor:
    """The distributed gradient of `param` as elements, where its ranks hold summands (Partial).

    They are added up at the gradient's own size, by all ranks of its mesh, and take the parameter's
    placement. The parameter gets the result as its gradient: it is what an optimizer needs.

    Args:
        param: the parameter, or the gradient itself if it belongs to none.
        grad: a DTensor.
    """
    from torch.distributed.tensor import Replicate

    given: Any = grad
    if not any(placement.is_partial() for placement in given.placements):
        return grad
    home: Any = param if param is not grad and is_distributed(param) else None
    if home is None or len(home.placements) != len(given.placements):
        wanted = [Replicate()] * len(given.placements)
    else:
        wanted = home.placements
    placements = [
        new if old.is_partial() else old for old, new in zip(given.placements, wanted, strict=True)
    ]
    reduced: Tensor = given.redistribute(placements=placements)
    if param is not grad:
        param.grad = reduced
    return reduced


def common_mesh(layouts: Sequence[Layout | None]) -> Any:
    """The mesh on which all of these gradients lie; None if there is none, or not one."""
    meshes = [layout.mesh for layout in layouts if layout is not None]
    if not meshes or len(meshes) != len(layouts) or any(mesh != meshes[0] for mesh in meshes):
        return None
    return meshes[0]


def rank_groups_of(tensors: Sequence[Tensor], *, group: Any = None) -> list[RankGroup]:
    """The ranks that hold some of `tensors` together with this one, each on a mesh of its own.

    Args:
        tensors: parameters or gradients.
        group: ranks that belong together besides, whatever the tensors are.

    Returns:
        The groups in an order that all of their ranks keep. Meshes of one shape come after each
        other, so that going through all groups once reaches every rank of a regular grid.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[Any, Tensor]]] = {}
    for mesh, tensor in _meshes_of(tensors):
        if mesh.get_coordinate() is not None:  # Else this rank holds nothing of it.
            by_ranks.setdefault(_ranks_on(mesh), []).append((mesh, tensor))
    found = {ranks: _rank_group(ranks, meshes) for ranks, meshes in by_ranks.items()}
    if group is not None:
        ranks = _ranks_in(group)
        near = found[ranks].device if ranks in found else tensors[0].device
        found[ranks] = RankGroup(ranks, (group,), device_for(group, near.type, near))
    return sorted(found.values(), key=_in_order)


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that hold one model together, as far as this rank can know."""

    rank_group: RankGroup
    unknown: str | None
    """What this rank does not know, in words, if anything: all ranks have to be told."""
    params: tuple[Tensor, ...]
    """All parameters of this rank."""
    plain: tuple[Tensor, ...]
    """Plain parameters beside distributed ones that are trained, the same on every rank."""
    plain_are_parts: bool
    """Whether plain tensors are parts of the model, as the user has said by a process group."""
    shapes: int
    """A number that stands for the shapes of all parameters, in order."""
    is_first: bool
    """Whether this rank is the one that counts, where all of them hold the same."""

    def counts(self, layouts: Sequence[Layout | None]) -> list[bool]:
        """Whether this rank's elements count, for each gradient."""
        own = self.plain_are_parts or self.is_first
        return [own if layout is None else layout.counts for layout in layouts]


def refuse_fsdp1_shards(params: Sequence[Tensor], *, name: _Name, way_out: str) -> None:
    """Raises if FSDP1 has cut plain parameters into shards, which nothing else shows.

    Args:
        params: parameters that no process group was named for.
        name: tells a parameter's name.
        way_out: what to do instead, in words.
    """
    flattened = _flattened(params)
    if flattened:
        raise ValueError(
            f"{name(flattened[0])} belongs to FullyShardedDataParallel (FSDP1): each rank holds a "
            f"shard of it as a plain tensor, and would measure that shard alone. {way_out}"
        )


def _flattened(params: Sequence[Tensor]) -> list[Tensor]:
    """Those that FSDP1 has cut into shards, as torch marks them; none where no other rank is."""
    if not has_other_ranks() or "torch.distributed.fsdp" not in sys.modules:
        return []
    return [param for param in params if is_flattened(param)]


def _refuse_beside_flattened(params: Sequence[Tensor], *, name: _Name) -> None:
    """Raises if there are trained parameters that FSDP1 was told to leave alone, beside others."""
    flattened = {id(param) for param in _flattened(params)}
    left = [p for p in params if flattened and id(p) not in flattened and _is_trained(p)]
    if left:
        raise ValueError(
            f"{name(left[0])} is a plain tensor beside shards of FullyShardedDataParallel (FSDP1), "
            "which was told to ignore it. Whether the ranks of process_group= hold copies of it or "
            "other parts of the model is not known, and the norm depends on it. Let FSDP shard it, "
            "or use fully_shard (FSDP2)."
        )


def model_ranks_of(
    params: Sequence[Tensor], *, group: Any, name: _Name, way_out: str = ""
) -> ModelRanks | None:
    """Which ranks hold one model together; None if each holds all of it.

    Args:
        params: all parameters of the model on this rank.
        group: the process group that the user has named, or None.
        name: tells a parameter's name.
        way_out: what to do where it cannot be known, in words, if not what a GradientControl needs.

    Raises:
        ValueError: if it cannot be known and no other rank would wait to hear of it.
    """
    if group is None:
        refuse_fsdp1_shards(params, name=name, way_out=way_out or _NAME_THE_GROUP)
    meshes = _meshes_of(params)
    if not meshes and group is None:
        return None
    import torch.distributed as dist

    ranks = tuple(range(dist.get_world_size())) if group is None else _ranks_in(group)
    fitting = [(mesh, param) for mesh, param in meshes if _ranks_on(mesh) == ranks]
    if group is None and not fitting:
        raise ValueError(_part_of_the_world(*meshes[0], name, way_out))
    if len(ranks) > 1 and group is not None:
        _refuse_beside_flattened(params, name=name)
    strangers = [(mesh, param) for mesh, param in meshes if _ranks_on(mesh) != ranks]
    unknown = None
    if strangers:
        named = group is not None
        unknown = _other_ranks(*strangers[0], name, ranks, named=named, way_out=way_out)
    near = fitting[0][1].device if fitting else params[0].device
    kind = fitting[0][0].device_type if fitting else near.type
    plain = [p for p in params if not is_distributed(p) and _is_trained(p)] if meshes else []
    return ModelRanks(
        rank_group=RankGroup(ranks, (group,), device_for(group, kind, near)),
        unknown=unknown,
        params=tuple(params),
        plain=tuple(plain),
        plain_are_parts=not meshes,
        shapes=hash(tuple(tuple(param.shape) for param in params)) & 0xFFFFFFFF,
        is_first=dist.get_rank() == ranks[0],
    )


def _is_trained(param: Tensor) -> bool:
    """Whether a gradient of `param` may count, now or later."""
    return (param.requires_grad or param.grad is not None) and param.numel() > 0


def _meshes_of(tensors: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
    """The meshes of distributed tensors, each once, with the first tensor that lies on it."""
    if not any_distributed(tensors):
        return []
    found: dict[int, tuple[Any, Tensor]] = {}
    for tensor in tensors:
        if is_distributed(tensor):
            mesh = cast("Any", tensor).device_mesh
            found.setdefault(id(mesh), (mesh, tensor))
    return list(found.values())


def _ranks_on(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _ranks_in(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    if dist.get_rank(group) < 0:
        raise ValueError(
            "process_group= names ranks of which this one is none. Give it on the ranks of the "
            "group only, and to each rank the group that it is in."
        )
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _rank_group(ranks: tuple[int, ...], meshes: Sequence[tuple[Any, Tensor]]) -> RankGroup:
    """By one process group where torch has one for all of these ranks, else one a dimension."""
    import torch.distributed as dist

    mesh, tensor = min(meshes, key=lambda pair: int(pair[0].ndim))
    groups = tuple(mesh.get_all_groups())
    if mesh.ndim > 1 and len(ranks) == dist.get_world_size():
        kinds = _kinds(None)
        if not kinds or mesh.device_type in kinds:
            groups = (None,)
    return RankGroup(ranks, groups, device_for(groups[0], mesh.device_type, tensor.device))


def _in_order(rank_group: RankGroup) -> tuple[Any, ...]:
    first = rank_group.ranks[0]
    return len(rank_group.ranks), tuple(rank - first for rank in rank_group.ranks), first


def device_for(group: Any, kind: str, near: torch.device) -> torch.device:
    """Where the group's collectives run: this rank's device of a kind that it has a backend for.

    NCCL has none for the CPU, where gradients lie that are offloaded; gloo has one for both.

    Args:
        group: a process group; None is the default one.
        kind: of the device that is wanted.
        near: a device of this rank, taken if it is of the right kind.
    """
    kinds = _kinds(group)
    if kinds and kind not in kinds:
        kind = kinds[0]
    if kind in (near.type, "cpu"):
        return near if near.type == kind else torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _kinds(group: Any) -> list[str]:
    """The kinds of devices that a group has a backend for; none if it makes one when first used."""
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    return device_kinds(group)


def _described(mesh: Any) -> str:
    names = mesh.mesh_dim_names
    dims = "" if names is None else f" ({', '.join(names)})"
    return f"the mesh{dims} of ranks {shortened(_ranks_on(mesh))}"


def shortened(items: Sequence[object]) -> str:
    """The items as text, the first 16 if there are more."""
    more = f", ... {len(items)} in all" if len(items) > 16 else ""
    return f"[{', '.join(map(str, items[:16]))}{more}]"


_NAME_THE_GROUP = (
    "Write GradientControl(..., process_group=model.process_group) with the FSDP model, or "
    "process_group=torch.distributed.group.WORLD if it is sharded over all ranks. With NO_SHARD "
    "every rank holds all of it: use DistributedDataParallel."
)


def _part_of_the_world(mesh: Any, param: Tensor, name: _Name, way_out: str) -> str:
    import torch.distributed as dist

    line = "mesh.get_group()" if mesh.ndim == 1 else "mesh._flatten().get_group()"
    way_out = way_out or (
        f"If these ranks hold a whole model between them, write "
        f"GradientControl(..., process_group={line}) with mesh = that parameter's device_mesh. If "
        "the others hold other parts, bring get_total_norm's results together yourself and use "
        "clip_grads_with_norm_."
    )
    return (
        f"{name(param)} is a DTensor on {_described(mesh)}, and {dist.get_world_size()} ranks run. "
        "Whether the others hold copies of the model (data parallel) or other parts of it "
        f"(pipeline stages, experts) is not known, and the norm depends on it. {way_out}"
    )


def _other_ranks(
    mesh: Any, param: Tensor, name: _Name, ranks: tuple[int, ...], *, named: bool, way_out: str
) -> str:
    whose = "process_group= names" if named else "other parameters lie on"
    way_out = way_out or (
        "Distribute every parameter over one mesh, with Replicate() where ranks hold copies, or "
        "use gradilocks.GradScaler and gradilocks.clip_grad_norm_, which take each tensor over its "
        "own mesh."
    )
    return (
        f"{name(param)} is a DTensor on {_described(mesh)}, and {whose} ranks {shortened(ranks)}. "
        "Whether the ranks of one and not of the other hold copies of it or other parts of the "
        f"model is not known, and the norm depends on it. {way_out}"
    )
