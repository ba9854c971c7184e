"""Tensors in; how each lies on its own mesh, and by which process groups its ranks meet, out.

A DTensor says by its mesh which ranks hold it and who holds the same elements. That is all that the
drop-ins need: as torch, they take each tensor over its own mesh. Who holds a whole model together
is `model_ranks`' subject. Who takes part follows from the tensors, never from which gradients there
are. Nothing is sent from here, but where a gradient's ranks hold summands (Partial).
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gradilocks._torch import (
    DEFAULT_GROUP,
    DTENSOR_PARTS,
    default_group,
    device_kinds,
    is_flattened,
    local_tensor,
)
from gradilocks.kernels import native
from gradilocks.kernels.guards import Guard, attribute, item
from gradilocks.kernels.host_numbers import numbers_on
from gradilocks.values import RankGroup

__all__ = [
    "Layout",
    "Summand",
    "any_distributed",
    "common_mesh",
    "covers_world",
    "data_parallel_around",
    "device_for",
    "dtensor_parts",
    "flattened_among",
    "global_rows",
    "has_other_ranks",
    "is_distributed",
    "laid_out_like",
    "layout_of",
    "layout_on",
    "lie_alike",
    "local_of",
    "meshes_of",
    "my_rank",
    "placed_like",
    "rank_groups_of",
    "rank_guards",
    "ranks_in",
    "ranks_on",
    "refuse_fsdp1_shards",
    "replicas_of",
    "shortened",
    "whole_group",
    "with_sums_reduced",
    "without_missing_summands",
    "world_size",
]

_Name = Callable[[Tensor], str]
_DISTRIBUTED = "torch.distributed.distributed_c10d"


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
    dist = sys.modules.get(_DISTRIBUTED)  # Missing where it is not built.
    if dist is None:
        return False
    try:
        is_one_of_several: bool = default_group(dist) is not None
    except AttributeError:
        is_one_of_several = dist.is_initialized()
    return is_one_of_several and world_size() > 1


def rank_guards() -> list[Guard] | None:
    """What must be as it is now for `has_other_ranks` to say the same.

    None if there is a process group: torch wants nobody to hold it, so that one has to be asked.
    """
    known = item(sys.modules, _DISTRIBUTED)
    dist: Any = sys.modules.get(_DISTRIBUTED)
    if dist is None:
        return known
    world, group = DEFAULT_GROUP
    try:
        inner = attribute(getattr(dist, world), group)
    except AttributeError:  # As `default_group` may be missing: it is asked in another way.
        return None
    return None if inner[0][-1] is not None else [*known, *attribute(dist, world), *inner]


def replicas_of(model: object) -> Any:
    """The process group of a DistributedDataParallel model; None for any other."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None or not isinstance(model, module.DistributedDataParallel):
        return None
    return cast("Any", model).process_group


def data_parallel_around(model: object, param: Tensor, *, search: bool) -> Any:
    """The DistributedDataParallel that trains a parameter; None if there is none.

    It may be inside of wrappers of `model`, as under torch.compile. If only what it wraps was
    handed over and one is to `search`, all objects that are alive are looked at, once: some 0.1
    seconds.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None:
        return None
    kind = module.DistributedDataParallel
    inside = model.modules() if isinstance(model, nn.Module) else ()
    alive = (each for each in gc.get_objects() if issubclass(type(each), kind)) if search else ()
    for each in itertools.chain((part for part in inside if isinstance(part, kind)), alive):
        try:
            if any(param is own for own in each.parameters()) and ranks_in(each.process_group):
                return each
        except Exception:  # Its making has failed, or its process group is destroyed.
            continue
    return None


def whole_group(group: Any, near: torch.device) -> RankGroup:
    """The ranks of a process group, with what they meet by.

    Args:
        group: a process group that this rank is in.
        near: a device of this rank.
    """
    return RankGroup(ranks_in(group), (group,), device_for(group, near.type, near))


def world_size() -> int:
    """How many ranks there are."""
    import torch.distributed as dist

    return int(dist.get_world_size())


def my_rank() -> int:
    """The number of this rank."""
    import torch.distributed as dist

    return dist.get_rank()


def covers_world(rank_group: RankGroup) -> bool:
    """Whether all ranks that there are take part."""
    import torch.distributed as dist

    return len(rank_group.ranks) == dist.get_world_size()


def is_distributed(tensor: object) -> bool:
    """Whether `tensor` is a DTensor; does not import torch.distributed to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def dtensor_parts() -> tuple[Any, ...] | None:
    """What C++ has to know of DTensors to walk over them; None as long as there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else (module.DTensor, *DTENSOR_PARTS)


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
        if home is not mesh and (home is None or ranks_on(home) != ranks_on(mesh)):
            raise ValueError(
                f"the gradient of {name(param)} is a DTensor on other ranks than the parameter, so "
                "which ranks measure it together is not known. Give it a gradient on its own mesh."
            )
    if (id(mesh), placements) not in known:
        known[id(mesh), placements] = layout_on(mesh, placements)
    return known[id(mesh), placements]


def layout_on(mesh: Any, placements: Sequence[Any]) -> Layout:
    """How what is placed so lies on a mesh."""
    counts, mine = True, mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if placement.is_replicate() and mine is not None and mine[dim] != 0:
            counts = False
    return Layout(ranks_on(mesh), counts, mesh)


class Summand(NamedTuple):
    """How a rank held its summand of a parameter's gradient, when the ranks of its mesh did so."""

    param: Tensor
    placements: tuple[Any, ...]
    like: Tensor
    """Without elements: of the summand's shape, dtype and device kind."""
    device: torch.device


def without_missing_summands(summands: Sequence[Summand]) -> None:
    """Gives parameters zeros for a gradient whose other summands are on other ranks.

    Ranks add up what they hold of a gradient (Partial), and all of the mesh must be there, also one
    that has none of it this time. Whether the others have is told by one flag a parameter; only a
    rank that has none waits to read it. Where no rank has any, the parameter has no gradient.

    A parameter does not show that its gradients are summands; the first that there are must be on
    all ranks of the mesh, or those that have one wait for the others.

    Args:
        summands: of the parameters whose gradients the ranks have added up before.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    for rank_group in rank_groups_of([summand.param for summand in summands]):
        here = [each for each in summands if ranks_on(_mesh(each.param)) == rank_group.ranks]
        have = [_is_partial(each.param.grad) for each in here]
        flags = numbers_on(rank_group.device, tuple(have), torch.float32).clone()
        for group in rank_group.groups:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        if all(each.param.grad is not None for each in here):
            continue
        for each, others_have in zip(here, flags.tolist(), strict=True):
            if others_have and each.param.grad is None:
                each.param.grad = DTensor.from_local(
                    torch.zeros_like(each.like, device=each.device),
                    _mesh(each.param),
                    each.placements,
                    run_check=False,
                    shape=each.param.shape,
                    stride=each.param.stride(),
                )


def _mesh(param: Tensor) -> Any:
    return cast("Any", param).device_mesh


def _is_partial(grad: Any) -> bool:
    return is_distributed(grad) and any(each.is_partial() for each in grad.placements)


def with_sums_reduced(
    param: Tensor, grad: Tensor, summands: dict[int, Summand] | None = None
) -> Tensor:
    """The distributed gradient of `param` as elements, where its ranks hold summands (Partial).

    They are added up at the gradient's own size, by all ranks of its mesh, and take the parameter's
    placement. The parameter gets the result as its gradient: it is what an optimizer needs.

    Args:
        param: the parameter, or the gradient itself if it belongs to none.
        grad: a DTensor.
        summands: by the parameter's id, to be added to: for `without_missing_summands`.
    """
    given: Any = grad
    if not _is_partial(grad):
        return grad
    from torch.distributed.tensor import Replicate

    home: Any = param if param is not grad and is_distributed(param) else None
    adds = all(getattr(each, "reduce_op", "sum") in ("sum", "avg") for each in given.placements)
    if home is not None and summands is not None and id(param) not in summands and adds:
        local = local_of(grad)
        like = torch.empty_like(local, device="meta")
        summands[id(param)] = Summand(param, given.placements, like, local.device)
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


def lie_alike(param: Any, other: Any) -> bool:
    """Whether a gradient or a state lies on the ranks as its parameter does: elements of it, not
    summands, and the same ones."""
    if is_distributed(param) != is_distributed(other):
        return False
    if not is_distributed(param):
        return True
    if param.device_mesh != other.device_mesh or param.placements != other.placements:
        return False
    return not any(placement.is_partial() for placement in other.placements)


def placed_like(param: Tensor, other: Tensor, what: str) -> Tensor:
    """What belongs to the DTensor `param`, brought to where the elements of the parameter are.

    By all ranks of the mesh, at its own size. They do it together or not at all: how a tensor is
    placed is the same on all of them.

    Args:
        param: the parameter.
        other: its gradient, or something of its state, of the same shape.
        what: its name, for the error message.

    Raises:
        ValueError: if that is not known, or torch has no way there.
    """
    home, given = cast("Any", param), cast("Any", other)
    if not is_distributed(other):
        raise ValueError(
            f"{what} is a plain tensor and the parameter a DTensor as {home.placements}: which of "
            "its elements belong to this rank is not known. Make it a DTensor on the parameter's "
            "mesh, by DTensor.from_local or distribute_tensor."
        )
    if given.device_mesh != home.device_mesh:
        raise ValueError(
            f"{what} is a DTensor on {given.device_mesh} and the parameter on {home.device_mesh}, "
            "and torch brings no tensor from one mesh to another. Make it on the parameter's mesh."
        )
    placed: Tensor = given.redistribute(placements=home.placements)
    return placed


def global_rows(tensor: Tensor, name: str) -> Tensor:
    """The rows of a whole tensor that this rank's elements of it belong to; int64, on the host.

    Args:
        tensor: a DTensor of two dimensions or more, of which the ranks hold elements.
        name: of its parameter, for the error message.

    Raises:
        ValueError: if the placements do not account for the rows that there are.
    """
    given: Any = tensor
    mesh, mine = given.device_mesh, given.device_mesh.get_coordinate()
    rows = torch.arange(given.shape[0], device="cpu")
    local = given.to_local().shape[0] if mine is not None else 0
    if mine is None:
        return rows[:0]
    cuts = [
        (at, placement)
        for at, placement in enumerate(given.placements)
        if getattr(placement, "dim", None) in (0, -given.dim())
    ]
    # A strided shard is one that was cut after those of later dimensions of the mesh: FSDP2 cuts
    # what tensor parallelism has left.
    strided = [cut for cut in cuts if hasattr(cut[1], "split_factor")]
    for at, _ in [cut for cut in cuts if cut not in strided] + strided[::-1]:
        pieces = torch.chunk(rows, mesh.size(at))
        rows = pieces[mine[at]] if mine[at] < len(pieces) else rows[:0]
    if rows.numel() != local:
        raise ValueError(
            f"{name} is a DTensor of {given.shape[0]} rows as {given.placements} on a mesh of "
            f"{tuple(mesh.mesh.shape)}, by which {rows.numel()} of them should be here, and "
            f"{local} are: which ones is not known. Distribute it by distribute_tensor or "
            "fully_shard, or leave it out of the policy by exclude=."
        )
    return rows


def local_of(tensor: Any) -> Any:
    """This rank's elements of a DTensor, in the same memory; anything else as it is."""
    if not is_distributed(tensor):
        return tensor
    local = local_tensor(tensor)
    return tensor.to_local().detach() if local is None else local


def laid_out_like(param: Tensor, local: Tensor) -> Tensor:
    """This rank's elements as a DTensor that lies as the DTensor `param` does, on its device."""
    from torch.distributed.tensor import DTensor

    like: Any = param
    if local.device.type != like.device_mesh.device_type:  # Offloaded: from_local would move them.
        made: Any = torch.empty_like(like.detach(), dtype=local.dtype)
        made.to_local().copy_(local)
        return cast("Tensor", made)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def common_mesh(layouts: Sequence[Layout | None]) -> Any:
    """The mesh on which all of these gradients lie; None if there is none, or not one."""
    different = list(dict(zip(map(id, layouts), layouts, strict=True)).values())
    if not different or any(layout is None for layout in different):
        return None
    meshes = [layout.mesh for layout in different if layout is not None]
    return None if any(mesh != meshes[0] for mesh in meshes) else meshes[0]


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
    for mesh, tensor in meshes_of(tensors):
        if mesh.get_coordinate() is not None:  # Else this rank holds nothing of it.
            by_ranks.setdefault(ranks_on(mesh), []).append((mesh, tensor))
    found = {ranks: _rank_group(ranks, meshes) for ranks, meshes in by_ranks.items()}
    if group is not None:
        ranks = ranks_in(group)
        near = found[ranks].device if ranks in found else tensors[0].device
        found[ranks] = whole_group(group, near)
    return sorted(found.values(), key=_in_order)


def refuse_fsdp1_shards(params: Sequence[Tensor], *, name: _Name, way_out: str) -> None:
    """Raises if FSDP1 has cut plain parameters into shards, which nothing else shows.

    Args:
        params: parameters that no process group was named for.
        name: tells a parameter's name.
        way_out: what to do instead, in words.
    """
    flattened = flattened_among(params)
    if flattened:
        raise ValueError(
            f"{name(flattened[0])} belongs to FullyShardedDataParallel (FSDP1): each rank holds a "
            f"shard of it as a plain tensor, and would measure that shard alone. {way_out}"
        )


def flattened_among(params: Sequence[Tensor]) -> list[Tensor]:
    """Those that FSDP1 has cut into shards, as torch marks them; none where no other rank is."""
    if not has_other_ranks() or "torch.distributed.fsdp" not in sys.modules:
        return []
    return [param for param in params if is_flattened(param)]


def meshes_of(tensors: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
    """The meshes of distributed tensors, each once, with the first tensor that lies on it."""
    if not any_distributed(tensors):
        return []
    library = native.library()
    listed = None if library is None else library.meshes(list(tensors), dtensor_parts())
    if listed is not None:
        return [(mesh, tensors[place]) for mesh, place in listed]
    found: dict[int, tuple[Any, Tensor]] = {}
    for tensor in tensors:
        if is_distributed(tensor):
            mesh = cast("Any", tensor).device_mesh
            found.setdefault(id(mesh), (mesh, tensor))
    return list(found.values())


def ranks_on(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def ranks_in(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    if dist.get_rank(group) < 0:
        raise ValueError(
            "process_group= names ranks of which this one is none. Give it on the ranks of the "
            "group only, and to each rank the group that it is in."
        )
    # torch 2.6 does not take None for all ranks here.
    return tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))


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
        kind = near.type if near.type in kinds else kinds[0]
    if kind in (near.type, "cpu"):
        return near if near.type == kind else torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _kinds(group: Any) -> list[str]:
    """The kinds of devices that a group has a backend for; none if it makes one when first used."""
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    return device_kinds(group)


def shortened(items: Sequence[object]) -> str:
    """The items as text, the first 16 if there are more."""
    more = f", ... {len(items)} in all" if len(items) > 16 else ""
    return f"[{', '.join(map(str, items[:16]))}{more}]"
