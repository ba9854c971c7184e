"""Comparison of replicas, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.errors import ReplicasDiffer
from gradilocks.ranks.collective import gather_flat
from gradilocks.ranks.layout import collective_device, dtensor_spec, format_ranks, local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 22
"""Elements hashed at a time, so that a large embedding needs 64 MB of temporary memory and not twice its size."""
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads positions over 64 bits. Weights are made odd below, so that a change of any one element changes the sum."""


def check_replicas(params: Iterable[Tensor], group: Any = None, *, names: Sequence[str] | None = None) -> None:
    """Checks that replicas hold identical bits. A collective of all ranks of the group that waits for the device.

    A plain tensor is compared over all ranks of the group, a DTensor over those that hold the same shard. Reads every
    element once and sends 16 bytes per tensor and rank.

    Args:
        params: parameters, gradients or other tensors, in the same order on every rank.
        group: process group of ranks with the same list of parameters; None for all ranks.
        names: their names, for the error.

    Raises:
        ReplicasDiffer: on every rank, with the names of the tensors and the groups of ranks that agree.

    Examples:
        >>> linear = torch.nn.Linear(4, 2)
        >>> check_replicas(linear.parameters())  # One rank has nothing to compare.
    """
    import torch.distributed as dist

    tensors = list(params)
    names = [f"tensor {i}" for i in range(len(tensors))] if names is None else list(names)
    if not (dist.is_available() and dist.is_initialized()):
        return
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    device = collective_device(group, tensors)
    text = repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in zip(names, tensors, strict=True)])
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    digests = gather_flat(torch.tensor([digest], device=device), group).tolist()
    if len(set(digests)) > 1:
        parts = _partition(digests, ranks)
        owners = " and ".join(map(format_ranks, parts))
        raise ReplicasDiffer(
            f"names, shapes or dtypes of the parameters differ: {owners} have different lists. Pass "
            "the group of ranks that hold the same parameters.",
            ranks=parts,
        )
    if not tensors:
        return
    shards = torch.tensor([_shard_index(tensor) for tensor in tensors], device=device)
    sums = torch.stack([_checksum(local(tensor)).to(device) for tensor in tensors])
    gathered = gather_flat(torch.cat([shards, sums]), group).view(len(ranks), 2, len(tensors)).cpu()
    different: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, shard, checksum in zip(names, *gathered.permute(1, 2, 0).tolist(), strict=True):
        holders: dict[int, set[int]] = {}
        for index, value in zip(shard, checksum, strict=True):
            holders.setdefault(index, set()).add(value)
        differing = next((index for index, values in holders.items() if len(values) > 1), None)
        if differing is not None:
            members = [i for i, index in enumerate(shard) if index == differing]
            different[name] = _partition([checksum[i] for i in members], [ranks[i] for i in members])
    if different:
        shown = [f"{name} ({' against '.join(map(format_ranks, parts))})" for name, parts in different.items()]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        raise ReplicasDiffer(
            f"replicas differ: {', '.join(shown[:3])}{more}. Parameters were not broadcast at the start, gradients "
            "were not averaged, or a rank stepped alone.",
            tensors=tuple(different),
            ranks=next(iter(different.values())),
        )


def _shard_index(tensor: Tensor) -> int:
    """Index of this rank's shard of a DTensor; replicas of a shard have the same index."""
    spec = dtensor_spec(tensor)
    if spec is None:
        return 0
    coordinate, index = spec.device_mesh.get_coordinate(), 0
    for dim, placement in enumerate(spec.placements):
        if not placement.is_replicate():
            index = index * spec.device_mesh.size(dim) + coordinate[dim]
    return index


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    """Sum of the bits of all elements, weighted by position, modulo 2 ** 64: exact in any order. 0-d int64 tensor."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    total = torch.full((), bits.numel(), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), _PIECE):
        piece = bits[begin : begin + _PIECE].to(torch.int64)
        position = torch.arange(begin, begin + piece.numel(), device=piece.device)
        total += (piece * ((position * _MULTIPLIER) | 1)).sum()
    return total


def _partition(values: Sequence[int], ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with equal values, in order of their first rank."""
    groups: dict[int, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        groups.setdefault(value, []).append(rank)
    return tuple(map(tuple, groups.values()))
