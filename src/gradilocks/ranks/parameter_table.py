"""The parameters of all ranks, agreed once; parts of tensors enter at each step, whole ones leave.

A policy that bounds tensors, or their rows, apart from each other must see each of them whole, and
all ranks must see the same. Ranks may hold different parameters, in different orders, or lack a
gradient that others have. So they tell each other once which parameters there are, by keys that two
ranks share for parts or copies of one tensor. From then on one collective a step carries a number
or two for each parameter, or for each of its units, at places that follow from this table alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradilocks._torch import sparse_indices
from gradilocks.errors import BadState
from gradilocks.kernels.host_numbers import numbers_on
from gradilocks.kernels.reference import any_double
from gradilocks.names import Placed
from gradilocks.ranks.all_parameters import place_of
from gradilocks.ranks.collective import mask_like, sum_of_all, whole_columns
from gradilocks.ranks.layout import (
    Layout,
    global_rows,
    is_distributed,
    layout_of,
    local_of,
    my_rank,
    ranks_in,
    ranks_on,
    shortened,
)
from gradilocks.ranks.model_ranks import ModelRanks, tell_all
from gradilocks.values import RankGroup, moved

__all__ = [
    "OwnPart",
    "ParameterTable",
    "TableOfRank",
    "Told",
    "counts_of",
    "table_of_meshes",
    "table_of_model",
    "told_by",
]


class Told(NamedTuple):
    """What is told once of a parameter."""

    rank: int
    """The first rank that holds some of it."""
    name: str
    group: tuple[int, str | None]
    """The number and the name of its group."""
    units: int
    """Into how many units the clip policy divides it; 0 if into none."""
    double: bool
    """Whether it is float64."""
    parts: tuple[int, ...]
    """The ranks whose elements of it count though they are plain: which rows they are of, nobody
    knows if there are several."""


class TableOfRank(NamedTuple):
    """What a rank tells of its parameters, by key; or several ranks, of those of all."""

    told: dict[Hashable, Told]
    problem: str | None
    """Why the table cannot be used, if so."""


class OwnPart(NamedTuple):
    """What this rank has measured of a step's gradients; one entry a gradient."""

    params: Sequence[Tensor]
    norms: Tensor
    counts: Sequence[bool]
    """Whether this rank's elements count."""
    largest: Tensor | None


class ParameterTable:
    """All parameters that this rank and those it meets hold, in an order that all of them keep.

    Args:
        every: what is told of each parameter.
        mine: of those, this rank's tensors.
        meets: the ranks that this one meets, and the keys of what they hold together.
        counting: by the id of a parameter, whether this rank's elements of its weights count.
        order: keys in the order to keep; others come after them.
    """

    def __init__(
        self,
        every: Mapping[Hashable, Told],
        mine: Mapping[Hashable, Tensor],
        meets: Sequence[tuple[RankGroup, Sequence[Hashable]]],
        counting: Mapping[int, bool],
        order: Sequence[Hashable] = (),
    ) -> None:
        first = {key: at for at, key in enumerate(order)}
        keys = sorted(every, key=lambda key: (first.get(key, len(first)), repr(key)))
        place = {key: at for at, key in enumerate(keys)}
        self.count = len(keys)
        self.names = [every[key].name for key in keys]
        self.groups = [every[key].group for key in keys]
        self.units = [every[key].units for key in keys]
        """Into how many units each is divided; 0 if into none."""
        self.double = any(each.double for each in every.values())
        """Whether one of them is float64."""
        self.params = [mine.get(key) for key in keys]
        """The parameters themselves; None for one that only other ranks hold."""
        self.places = {id(param): place[key] for key, param in mine.items()}
        """By the id of a parameter of this rank, its place."""
        self.placed: list[Placed] = [(every[key].name, place_of(key)) for key in keys]
        """What a checkpoint knows them by, on whatever ranks they will be then."""
        self._counting = counting
        me = my_rank()
        self._tells = {at for key, at in place.items() if every[key].rank == me}
        # A parameter without units still has one number: the square of its norm.
        ends = list(itertools.accumulate(max(1, units) for units in self.units))
        self._begins, self._slots = [0, *ends[:-1]], ends[-1] if ends else 0
        self._meets: list[tuple[RankGroup, Tensor | None, Tensor | None]] = []
        """For each group its ranks, and the places and the slots of what they hold; None is all."""
        for rank_group, theirs in meets:
            if len(theirs) == self.count:
                self._meets.append((rank_group, None, None))
            elif theirs:
                at = sorted(place[key] for key in theirs)
                slots = [torch.arange(self._begins[each], ends[each], device="cpu") for each in at]
                self._meets.append((rank_group, torch.tensor(at, device="cpu"), torch.cat(slots)))
        self._rows: dict[tuple[int, Any], Tensor] = {}

    def refuse_recalled(self, saved: frozenset[Placed]) -> None:
        """Raises if several parameters went by one name when a checkpoint was loaded."""
        often, known = Counter(self.names), {name for name, _ in saved}
        for each in self.placed:
            if often[each[0]] > 1 and each[0] in known and each not in saved:
                raise BadState(
                    f"the state_dict that was loaded has learned something of {each[0]}, and "
                    "several ranks hold a different parameter of that name now: whose it is cannot "
                    "be known. Give the parameters of all ranks different names, as those of the "
                    "whole model, or start without the state_dict."
                )

    def at(self, params: Sequence[Tensor], like: Tensor) -> Tensor:
        """The places of `params`, as an index on the device of `like`."""
        return _index([self.places[id(param)] for param in params], like)

    def whole_numbers(
        self, own: OwnPart, *, order: float, memory: Mapping[str, Tensor], known: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
        """The norm and the largest magnitude of each parameter, and what is remembered of it.

        Last, whether each has a gradient on any rank.

        Args:
            own: this rank's part.
            order: the p of the norm.
            memory: by name, a number for each of `known`.
            known: parameters of this rank.
        """
        norms, here = own.norms, self.at(own.params, own.norms)
        counted = torch.where(mask_like(own.counts, norms), norms, torch.zeros_like(norms))
        rows = [norms.new_zeros(self.count).index_copy(0, here, counted)]
        # Also where nobody asks: a rank that records may know it, and numbers must be as many. It
        # is below 0 where there is no gradient.
        largest = torch.zeros_like(norms) if own.largest is None else own.largest
        rows.append(torch.full_like(rows[0], -1.0).index_copy(0, here, largest))
        rows += self._remembered(memory, known, norms)
        columns = torch.stack(rows)
        for rank_group, places, _ in self._meets_on(norms.device):
            of_group = slice(None) if places is None else places
            part = whole_columns(columns[:, of_group], order=order, rank_group=rank_group)
            columns[:, of_group] = part
        whole, peaks, *told = columns.unbind()
        return whole, peaks.clamp(min=0.0), dict(zip(memory, told, strict=True)), peaks >= 0

    def whole_units(
        self,
        own: OwnPart,
        gradients: Sequence[Tensor],
        *,
        norms_of: Callable[[Tensor], Tensor],
        weights_of: Callable[[Tensor], Tensor],
        memory: Mapping[str, Tensor],
        known: Sequence[Tensor],
    ) -> tuple[list[tuple[Tensor, Tensor] | None], Tensor, dict[str, Tensor], Tensor]:
        """The norms of all units' gradients and weights, and the norm of each parameter.

        And what is remembered of it, and whether it has a gradient that is not 0. Squares are added
        in float64, in one collective whose size does not depend on the ranks.

        Args:
            own: this rank's part.
            gradients: the elements of this rank's gradients.
            norms_of: the norms of a tensor's units, 1-d: of its rows or, of a vector, of all of it.
            weights_of: the weights that belong to the elements of a parameter's gradient.
            memory, known: as in `whole_numbers`.
        """
        like = own.norms
        squares, weights = like.new_zeros(self._slots), like.new_zeros(self._slots)
        for at, (param, elements) in enumerate(zip(own.params, gradients, strict=True)):
            if own.counts[at]:
                divided = self.units[self.places[id(param)]]
                found = norms_of(elements) if divided else own.norms[at].reshape(1)
                self._add(squares, param, param.grad, found)
        for held, units in zip(self.params, self.units, strict=True):
            if held is None or not units or not self._counting[id(held)]:
                continue
            if held.requires_grad or held.grad is not None:
                lying = held if is_distributed(held) else held.grad
                own_weights = local_of(held) if is_distributed(held) else weights_of(held)
                self._add(weights, held, lying, norms_of(own_weights))
        told = self._remembered(memory, known, like)
        numbers = self._summed(torch.stack([squares, weights]), told)
        squares, weights = numbers[0].sqrt(), numbers[1].sqrt()
        lengths: list[tuple[Tensor, Tensor] | None] = []
        norms: list[Tensor] = []
        for begin, units in zip(self._begins, self.units, strict=True):
            end = begin + max(1, units)
            norms.append(torch.linalg.vector_norm(squares[begin:end]))
            lengths.append((squares[begin:end], weights[begin:end]) if units else None)
        whole = torch.stack(norms) if norms else like.new_zeros(0)
        return lengths, whole, dict(zip(memory, numbers[2], strict=True)), whole > 0

    def _meets_on(
        self, device: torch.device
    ) -> list[tuple[RankGroup, Tensor | None, Tensor | None]]:
        """The groups, with the indices where they are needed: sent once, as a graph's must be."""
        self._meets = [
            (
                rank_group,
                None if places is None else moved(places, device),
                None if slots is None else moved(slots, device),
            )
            for rank_group, places, slots in self._meets
        ]
        return self._meets

    def rows_here(self, param: Tensor, lying: Any, like: Tensor) -> Tensor | None:
        """The units, among all of a parameter's, that the rows of its elements belong to.

        Args:
            param: a parameter of this rank.
            lying: it or its gradient: how the elements in question lie.
            like: on whose device the answer is to be.

        Returns:
            None for all of them, in order.
        """
        if param.dim() <= 1:
            return None
        if lying is not None and lying.layout is torch.sparse_coo:
            return moved(sparse_indices(lying)[0], like.device)
        if not is_distributed(lying):
            return None
        key = id(param), lying.placements
        if key not in self._rows:
            self._rows[key] = global_rows(lying, self.names[self.places[id(param)]])
        self._rows[key] = moved(self._rows[key], like.device)
        return self._rows[key]

    def _add(self, to: Tensor, param: Tensor, lying: Any, norms: Tensor) -> None:
        place = self.places[id(param)]
        begin = self._begins[place]
        slots = to[begin : begin + max(1, self.units[place])]
        rows = self.rows_here(param, lying, to) if self.units[place] else None
        found = moved(norms, to.device).to(to.dtype).square()
        if rows is None:
            slots.add_(found)
        else:
            slots.index_add_(0, rows, found)

    def _remembered(
        self, memory: Mapping[str, Tensor], known: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """What this rank remembers of the parameters that it is to tell of; 0 for all others."""
        if not memory:
            return []
        places = self.at(known, like)
        mine = mask_like([self.places[id(param)] in self._tells for param in known], like)
        nothing = like.new_zeros(self.count)
        rows = [moved(each, like.device).to(like.dtype) for each in memory.values()]
        return [nothing.index_copy(0, places, torch.where(mine, row, 0.0)) for row in rows]

    def _summed(self, units: Tensor, told: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Two rows of numbers of units, and rows of numbers of parameters, over all ranks."""
        every = torch.stack(list(told)) if told else units.new_zeros(0, self.count)
        for rank_group, places, slots in self._meets_on(units.device):
            of_units = slice(None) if slots is None else slots
            of_params = slice(None) if places is None else places
            part = units[:, of_units], every[:, of_params]
            numbers = sum_of_all(torch.cat([each.flatten() for each in part]), rank_group)
            split = part[0].numel()
            units[:, of_units] = numbers[:split].view_as(part[0])
            every[:, of_params] = numbers[split:].view_as(part[1])
        return units[0], units[1], every


def told_by(
    params: Sequence[Tensor],
    keys: Sequence[Hashable],
    *,
    names: Sequence[str],
    groups: Sequence[tuple[int, str | None]],
    counts: Sequence[bool],
    unit_count: Callable[[str, Sequence[int]], int] | None,
) -> TableOfRank:
    """What this rank tells of its parameters; one entry of each list a parameter.

    Args:
        params: this rank's.
        keys: what tells each from all others on all ranks.
        names, groups: of the parameters.
        counts: whether this rank's elements of it count.
        unit_count: into how many units a policy divides a parameter, by its name and shape; None if
            the policy does not look at units.
    """
    me, problem = my_rank(), None
    told: dict[Hashable, Told] = {}
    for param, key, name, group, count in zip(params, keys, names, groups, counts, strict=True):
        units = 0 if unit_count is None else unit_count(name, param.shape)
        plain = count and not is_distributed(param)
        double = any_double([param])
        told[key] = Told(me, name, group, units, double, (me,) if plain and units else ())
        if units and is_distributed(param) and param.dim() > 1:
            try:
                global_rows(param, name)
            except ValueError as error:
                problem = str(error)
    return TableOfRank(told, problem)


def table_of_model(
    ranks: ModelRanks, told: Sequence[TableOfRank], order: Sequence[Hashable]
) -> ParameterTable:
    """The table of the ranks that hold one model together, from what each of them has told.

    In the order that one process would have, as far as there is one: a checkpoint keeps it.

    Raises:
        ValueError: on every rank, if it cannot be used.
    """
    every = _together(told)
    mine = dict(zip(cast("tuple[Hashable, ...]", ranks.keys), ranks.params, strict=True))
    counting = dict(zip(map(id, ranks.params), counts_of(ranks.params, ranks), strict=True))
    return ParameterTable(every, mine, [(ranks.rank_group, list(every))], counting, order)


def table_of_meshes(
    params: Sequence[Tensor], rank_groups: Sequence[RankGroup], told: TableOfRank
) -> ParameterTable:
    """The table of a rank and of those that it shares meshes with; plain tensors are its own.

    The ranks of each mesh tell each other, by all groups that it is reached by.

    Args:
        params: this rank's, in the order of `told`.
        rank_groups: the ranks of the meshes.
        told: what this rank tells, by any keys.

    Raises:
        ValueError: on every rank of a mesh, if the table cannot be used.
    """
    # By mesh and name: two meshes may each have a tensor of one name.
    own: dict[Hashable, Told] = {}
    mine: dict[Hashable, Tensor] = {}
    homes: dict[tuple[int, ...], dict[Hashable, Told]] = {}
    for param, each in zip(params, told.told.values(), strict=True):
        home = ranks_on(cast("Any", param).device_mesh) if is_distributed(param) else ()
        mine[each.name, home] = param
        homes.setdefault(home, {})[each.name, home] = own[each.name, home] = each
    every = [TableOfRank(own, told.problem)]
    meets: list[tuple[RankGroup, Sequence[Hashable]]] = []
    for rank_group in rank_groups:
        shared = TableOfRank(homes.get(rank_group.ranks, {}), told.problem)
        for group in rank_group.groups:
            shared = _merged(tell_all(shared, ranks_in(group), group))
        every.append(shared)
        meets.append((rank_group, list(shared.told)))
    # Not before all meshes have been told: else ranks of another would wait in vain.
    counting = dict(zip(map(id, params), counts_of(params), strict=True))
    return ParameterTable(_together(every), mine, meets, counting)


def counts_of(params: Sequence[Tensor], ranks: ModelRanks | None = None) -> Sequence[bool]:
    """Whether this rank's elements of each parameter count in what is added up of it by itself."""
    known: dict[tuple[int, Any], Layout] = {}
    layouts = [layout_of(p, p, str, known) if is_distributed(p) else None for p in params]
    if ranks is not None:
        return ranks.counts_each(params, layouts)
    return [layout is None or layout.counts for layout in layouts]


def _together(told: Sequence[TableOfRank]) -> dict[Hashable, Told]:
    """What all ranks have told; raises on all of them alike if it cannot be used."""
    every, problem = _merged(told)
    if problem is not None:
        raise ValueError(problem)
    return every


def _merged(told: Sequence[TableOfRank]) -> TableOfRank:
    every: dict[Hashable, Told] = {}
    problems = [each.problem for each in told if each.problem is not None]
    for each in told:
        for key, new in each.told.items():
            old = every.setdefault(key, new)
            parts = tuple(sorted({*old.parts, *new.parts}))
            every[key] = min(old, new)._replace(parts=parts)
            if old.units != new.units or len(parts) > 1:
                problems.append(
                    f"{new.name} is bounded unit by unit, and ranks {shortened(parts)} hold parts "
                    "of it as plain tensors: which rows they have is not known. Make it a DTensor "
                    "with Shard(), say by mesh= and distinct= that they are different tensors, or "
                    "leave it out by exclude=."
                )
    return TableOfRank(every, problems[0] if problems else None)


def _index(places: Sequence[int], like: Tensor) -> Tensor:
    return numbers_on(like.device, tuple(places), torch.int64)
