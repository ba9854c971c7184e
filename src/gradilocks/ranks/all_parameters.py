"""What each rank tells of its parameters enters; one list of the parameters of all ranks leaves.

Ranks hold shards of one parameter, copies of it, or parameters of their own: pipeline stages,
experts. Who writes them all down, or bounds each of them, needs one order that every rank knows:
for each optimizer the parameters of the first rank in its own order, then those that only later
ranks have. The ranks tell each other once; nothing is sent from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from gradilocks._torch import is_flattened
from gradilocks.names import Names, OwnedParameters
from gradilocks.ranks.layout import has_other_ranks, is_distributed, my_rank, shortened
from gradilocks.ranks.model_ranks import ModelRanks

__all__ = [
    "NOBODY",
    "AllParameters",
    "HeldParameter",
    "held_parameters",
    "on_ranks",
    "owned_parameters",
    "parameters_of_all",
    "place_of",
]


class HeldParameter(NamedTuple):
    """A parameter, or a part of one, as the rank that holds it tells of it."""

    key: Hashable
    """What tells it from all others: two with one key are parts or copies of one."""
    name: str
    optimizer: int
    kind: str
    """The class of its optimizer."""
    size: int
    dtype: str
    adds_up: bool
    """Whether `size` is of a part, so that those of all ranks add up."""


class AllParameters(NamedTuple):
    """The parameters of all ranks, those of the first optimizer first."""

    optimizers: tuple[tuple[HeldParameter, ...], ...]
    """For each optimizer its parameters: whole, and under names that tell them apart."""
    places: dict[int, int]
    """By the id of a parameter of this rank, its place among all."""

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(map(len, self.optimizers))

    def begin(self, optimizer: int) -> int:
        """The place of an optimizer's first parameter."""
        return sum(map(len, self.optimizers[:optimizer]))


NOBODY = AllParameters((), {})


def held_parameters(
    model_ranks: ModelRanks, optimizers: Sequence[Any], names: Names
) -> list[HeldParameter]:
    """What this rank tells of its parameters, in the order of `model_ranks.params`.

    Where nothing tells which parameters of two ranks are one, each is the rank's own. Shards of
    FSDP1 are known by their names: it cuts the same ones on every rank of its group.
    """
    owners = {
        id(param): (number, type(optimizer).__name__)
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for param in group["params"]
    }
    rank = my_rank()
    found = []
    named = zip(model_ranks.params, names.of(model_ranks.params), strict=True)
    for at, (param, name) in enumerate(named):
        number, kind = owners[id(param)]
        flattened = is_flattened(param)
        key: Hashable = name if flattened else (name, rank)
        if model_ranks.keys is not None and model_ranks.keys[at] not in model_ranks.ambiguous:
            key = model_ranks.keys[at]
        adds_up = flattened and not is_distributed(param)
        dtype = str(param.dtype).removeprefix("torch.")
        found.append(HeldParameter(key, name, number, kind, param.numel(), dtype, adds_up))
    return found


def parameters_of_all(
    ranks: Sequence[int],
    told: Sequence[Sequence[HeldParameter]],
    *,
    held: Sequence[HeldParameter],
    ids: Sequence[int],
) -> AllParameters:
    """The parameters of all ranks in one order, the same on each.

    Args:
        ranks: in the order of `told`.
        told: what each rank holds, as `held_parameters` has it.
        held: what this rank holds.
        ids: of its parameters, in the same order.
    """
    found: dict[Hashable, HeldParameter] = {}
    where: dict[Hashable, list[int]] = {}
    for rank, theirs in zip(ranks, told, strict=True):
        for each in theirs:
            before = found.get(each.key)
            if before is not None:
                size = before.size + each.size if each.adds_up else max(before.size, each.size)
                each = before._replace(size=size)
            found[each.key] = each
            where.setdefault(each.key, []).append(rank)
    often = Counter(each.name for each in found.values())
    named = [
        each._replace(name=f"{each.name} {on_ranks(where[each.key], len(ranks))}")
        if often[each.name] > 1
        else each
        for each in found.values()
    ]
    count = max((each.optimizer for each in named), default=-1) + 1
    optimizers = tuple(
        tuple(each for each in named if each.optimizer == number) for number in range(count)
    )
    places = {each.key: place for place, each in enumerate(chain.from_iterable(optimizers))}
    here = zip(ids, held, strict=True)
    return AllParameters(optimizers, {each_id: places[each.key] for each_id, each in here})


def owned_parameters(
    params: Iterable[Tensor], names: Names, model_ranks: ModelRanks | None
) -> OwnedParameters:
    """What a checkpoint is to find the parameters of this rank by.

    Args:
        params: of this rank.
        names: of the parameters.
        model_ranks: the ranks that hold the model together, if several do.
    """
    owned = list(params)
    places: dict[int, str] = {}
    apart = False
    if model_ranks is not None:
        keys = model_ranks.keys or ()
        places = {id(p): place_of(key) for p, key in zip(model_ranks.params, keys, strict=False)}
        apart = len(model_ranks.told_apart) + len(model_ranks.copied) > 0
    named = zip(owned, names.of(owned), strict=True)
    placed = [(name, places.get(id(param), "")) for param, name in named]
    return OwnedParameters(placed, apart, alone=not has_other_ranks())


def place_of(key: Hashable) -> str:
    """What a parameter's key says beside its name: the stage or the experts; "" for nothing."""
    if not isinstance(key, tuple):
        return ""
    place = key[1] if isinstance(key[1], tuple) else (key[1],)
    return ", ".join(map(str, place))


def on_ranks(ranks: Sequence[int], count: int) -> str:
    """Which of `count` ranks, in words: "on rank 3", "on ranks 1, 2", "on all 4 ranks"."""
    if len(ranks) == 1:
        return f"on rank {ranks[0]}"
    if len(ranks) == count:
        return f"on all {count} ranks"
    return f"on ranks {shortened(ranks)[1:-1]}"
