"""Parameters and gradients in; an error on every rank if copies of them have parted, or nothing.

Ranks that hold the same elements (data parallel, the replicas of HSDP, modules outside a tensor
parallel plan) compute the same gradients and step them in the same way, so they stay equal to the
last bit. A broadcast or an all-reduce that was forgotten, a random number that each rank draws for
itself, or a device that computes wrongly ends that, and nothing shows it: each rank trains on.

At the steps that are checked every rank sends the bits of its tensors' norms and checksums of their
own bits, as whole numbers, and hears the largest and the smallest of all that hold the same
elements: one collective, whose size does not grow with the number of ranks. Only where they differ
do the ranks tell each other who has what.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gradilocks.eager import users_line
from gradilocks.errors import ReplicasDiffer
from gradilocks.ranks.layout import local_of, my_rank, shortened
from gradilocks.ranks.model_ranks import checksum, tell_all
from gradilocks.step.measure import measure
from gradilocks.values import RankGroup, moved

__all__ = ["Holdings", "ReplicaCheck", "check_every"]

_ABSENT = torch.iinfo(torch.int64).min
"""Stands for a tensor of which a rank holds nothing."""
_NONE = -1.0
"""Stands for the norm of a gradient that is None."""
_SHOWN = 3
"""How many tensors a message names."""


def check_every(number: object) -> int | None:
    """The number of steps between checks, if there are to be any; raises if it is none."""
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(
            "check_replicas_every= is the number of steps from one comparison of the replicas to "
            f"the next, 1 or more, or None for no comparison. Got {number!r}."
        )
    return number


class Holdings(NamedTuple):
    """What this rank holds."""

    rank_group: RankGroup
    """All ranks that might hold the same."""
    params: Sequence[Tensor]
    elements: Sequence[Hashable | None]
    """For each parameter, what its elements are known by on all ranks; None if nobody else is known
    to hold them."""
    gradients: Mapping[int, Tensor]
    """By a parameter's id, the elements of its gradient, if it has one."""
    numbers: Mapping[str, float]
    """What all of these ranks must have alike besides, by name: the scale, say."""
    whole: bool = False
    """Whether each of the ranks holds all of the model; elements then end in a name."""


class _Plan(NamedTuple):
    """What is compared, found out once."""

    shared: Sequence[Hashable]
    """What several ranks hold, in an order that is the same on all."""
    mine: Sequence[tuple[int, Tensor]]
    """Of those this rank's parameters, with their places in `shared`."""


class ReplicaCheck:
    """Compares the replicas of a model's tensors every so many steps.

    Args:
        every: so many steps lie from one check to the next; the first step is checked.
        names: tells the names of parameters.
    """

    def __init__(self, every: int, *, names: Callable[[Sequence[Tensor]], Sequence[str]]) -> None:
        self.every = every
        self._names = names
        self._ranks: tuple[int, ...] = ()  # That have made the plan, and of what this rank has.
        self._plan_of: tuple[Any, ...] = ()
        self._plan = _Plan((), ())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranks": (), "_plan_of": (), "_plan": _Plan((), ())}

    def is_due(self, step: int) -> bool:
        """Whether step number `step`, counted from 1, is to be checked."""
        return (step - 1) % self.every == 0

    @torch.no_grad()
    def check(self, holdings: Holdings, step: int) -> None:
        """Raises ReplicasDiffer, on every rank alike, if tensors that should be equal are not.

        Reads every parameter and every gradient that other ranks hold too, and waits for the
        device. All ranks of the group must call it at the same step.

        Args:
            holdings: the ranks, and this one's parameters and gradients.
            step: its number, for the message.
        """
        rank_group = holdings.rank_group
        known = tuple(map(id, holdings.params)), tuple(holdings.elements)
        if self._ranks != rank_group.ranks:
            self._make_plan(holdings, step)
        else:
            # What this rank holds has changed perhaps on it alone: nobody is asked before all have
            # heard of it.
            bits = self._bits_of(holdings)
            changed, differ = _compared(bits, rank_group, changed=known != self._plan_of)
            if differ and not changed:
                self._tell(list(holdings.numbers), bits.tolist(), rank_group, step)
            if not changed:
                return
            self._make_plan(holdings, step)
        self._ranks, self._plan_of = rank_group.ranks, known
        bits = self._bits_of(holdings)
        if self._plan.shared and _compared(bits, rank_group, changed=False)[1]:
            self._tell(list(holdings.numbers), bits.tolist(), rank_group, step)

    def _bits_of(self, holdings: Holdings) -> Tensor:
        """What this rank has for each of the tensors that several hold."""
        plan = self._plan
        places = [place for place, _ in plan.mine]
        count, alike = len(plan.shared), list(holdings.numbers.values())
        bits = torch.full((4, count + len(alike)), _ABSENT, dtype=torch.int64, device="cpu")
        bits[:2, places] = _bits([local_of(param) for _, param in plan.mine])
        bits[2:, places] = _bits([holdings.gradients.get(id(param)) for _, param in plan.mine])
        numbers = torch.tensor(alike, dtype=torch.float64, device="cpu")
        bits[0, count:] = numbers.view(torch.int64)
        return bits

    def _make_plan(self, holdings: Holdings, step: int) -> None:
        """Finds the tensors that several ranks hold: all of them tell each other.

        Raises, on all of them, if each should hold all of the model and one lacks a tensor of it.
        """
        rank_group = holdings.rank_group
        (group,) = rank_group.groups
        mine = {each for each in holdings.elements if each is not None}
        told = tell_all(mine, rank_group.ranks, group)
        times = Counter(each for theirs in told for each in theirs)
        for each, number in times.items() if holdings.whole else ():
            if number < len(told):
                with_it = [r for r, has in zip(rank_group.ranks, told, strict=True) if each in has]
                without = [rank for rank in rank_group.ranks if rank not in with_it]
                name = str(each[-1] if isinstance(each, tuple) else each)
                raise ReplicasDiffer(
                    _lacking(name, with_it, without, step),
                    step=step,
                    tensors=(name,),
                    ranks=(tuple(with_it), tuple(without)),
                )
        shared = sorted((each for each, ranks in times.items() if ranks > 1), key=repr)
        place = {each: number for number, each in enumerate(shared)}
        held = [
            (place[each], param)
            for param, each in zip(holdings.params, holdings.elements, strict=True)
            if each in place
        ]
        if not shared and my_rank() == rank_group.ranks[0]:
            warnings.warn(_NOTHING, stacklevel=users_line())
        self._plan = _Plan(shared, held)

    def _tell(
        self, numbers: list[str], bits: list[list[int]], rank_group: RankGroup, step: int
    ) -> NoReturn:
        """Raises the error that says who has what."""
        plan, (group,) = self._plan, rank_group.groups
        names = self._names([param for _, param in plan.mine])
        mine = {place: name for (place, _), name in zip(plan.mine, names, strict=True)}
        told = tell_all((mine, bits), rank_group.ranks, group)
        called = {len(plan.shared) + at: name for at, name in enumerate(numbers)}
        for theirs, _ in told:
            called = called | theirs
        parted: dict[str, _ByBits] = {}
        for row, what in ((0, "{}"), (2, "the gradient of {}")):
            for place, name in called.items():
                by_bits: _ByBits = {}
                for rank, (_, theirs) in zip(rank_group.ranks, told, strict=True):
                    if theirs[row][place] != _ABSENT:
                        seen = _norm(theirs[row][place]), theirs[row + 1][place]
                        by_bits.setdefault(seen, []).append(rank)
                if len(by_bits) > 1:
                    parted[what.format(name)] = by_bits
        raise ReplicasDiffer(
            _described(parted, step, numbers),
            step=step,
            tensors=tuple(parted),
            ranks=tuple(map(tuple, next(iter(parted.values())).values())),
        )


_ByBits = dict[tuple[float | None, int], list[int]]
"""By the norm of a tensor, None where there is none, and the checksum of its bits: the ranks."""


def _bits(tensors: Sequence[Tensor | None]) -> Tensor:
    """int64, two rows: the bits of each tensor's norm, taken in float64, those of -1 for None; and
    what follows from the bits of all its elements, 0 if one is NaN or Inf."""
    there = [at for at, tensor in enumerate(tensors) if tensor is not None]
    found = measure([each for each in tensors if each is not None], home=torch.device("cpu"))
    norms = torch.full((len(tensors),), _NONE, dtype=torch.float64, device="cpu")
    norms[there] = found.tensors.norms.to(torch.float64)
    norms[norms.isnan()] = math.nan  # Whatever the bits of this NaN were.
    sums = [0 if tensor is None else checksum(tensor) for tensor in tensors]
    whole = torch.where(norms.isfinite(), torch.tensor(sums, dtype=torch.int64, device="cpu"), 0)
    return torch.stack([norms.view(torch.int64), whole])


def _norm(bits: int) -> float | None:
    """The norm with these bits; None where there is no tensor."""
    (norm,) = struct.unpack("d", struct.pack("q", bits))
    return None if norm == _NONE else norm


def _compared(bits: Tensor, rank_group: RankGroup, *, changed: bool) -> tuple[bool, bool]:
    """Whether one of the ranks holds other tensors than it has told of, and whether two have sent
    different numbers for one tensor; waits for the device."""
    import torch.distributed as dist

    both = torch.stack([bits, torch.where(bits == _ABSENT, bits, -bits)]).flatten()
    both = moved(torch.cat([both, both.new_tensor([changed])]), rank_group.device)
    (group,) = rank_group.groups
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = both[:-1].view(2, -1).unbind()
    return bool(both[-1]), bool((highest != -lowest).any())


_NOTHING = (
    "check_replicas_every= has nothing to compare: no two ranks are known to hold the same "
    "elements of a parameter. Leave it out where every parameter is sharded over all ranks."
)


def _lacking(name: str, with_it: Sequence[int], without: Sequence[int], step: int) -> str:
    return (
        f"step {step}: the optimizer has {name} on ranks {shortened(with_it)} and not on ranks "
        f"{shortened(without)}, and ranks that train copies of one model should have the same "
        "parameters: they would find different norms. Parameters and optimizer state are as they "
        "were before this step. Add and remove parameters on all ranks before the same step."
    )


def _described(parted: Mapping[str, _ByBits], step: int, numbers: Sequence[str]) -> str:
    shown = []
    for name, by_bits in list(parted.items())[:_SHOWN]:
        verb = "is" if name in numbers else "has norm"
        each = [
            f"{'none' if norm is None else repr(norm)} on ranks {shortened(ranks)}"
            for (norm, _), ranks in list(by_bits.items())[:_SHOWN]
        ]
        if len(by_bits) > _SHOWN:
            each.append(f"{len(by_bits) - _SHOWN} others elsewhere")
        if len({norm for norm, _ in by_bits}) < len(by_bits):
            each.append("where elements differ and norms do not")
        shown.append(f"{name} {verb} {', '.join(each)}")
    more = f"; and {len(parted) - _SHOWN} more tensors" if len(parted) > _SHOWN else ""
    return (
        f"step {step}: ranks that hold the same elements should have the same bits, and have not: "
        f"{'; '.join(shown)}{more}. Parameters and optimizer state are as they were before this "
        "step. Where parameters differ, they were not broadcast at the start, or a rank stepped "
        "by itself; where only gradients do, they were not averaged over the ranks."
    )
