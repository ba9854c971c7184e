"""What each rank found of its part of a step enters, on the host; the step of all ranks leaves.

Norms are those of the whole gradients, by the one definition: every element counts once, squares
are added in float64, the norm is rounded once. DTensors say by mesh and placements who holds what,
FSDP1's modules by their process group. Whether ranks outside of those hold copies or other parts
nothing says; if what they found is alike they are taken for copies, else the step stays one rank's.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gradilocks.kernels.host_numbers import numbers_on
from gradilocks.kernels.reference import rounded, total_norm
from gradilocks.observe.gradient_reader import Reading
from gradilocks.ranks.all_parameters import on_ranks
from gradilocks.ranks.layout import (
    Layout,
    flattened_among,
    has_other_ranks,
    is_distributed,
    layout_of,
    ranks_in,
    ranks_on,
    replicas_of,
    world_size,
)
from gradilocks.record import RankPart
from gradilocks.record.batch import PendingStep, RecordedOptimizer
from gradilocks.runfile import Culprit, Detail, Step
from gradilocks.values import moved

__all__ = ["RankParts", "letter_of", "partners_of", "step_of_all"]

_ALIKE = 1e-5  # Copies of a gradient may differ in their last bits, by the order of their sums.
_MOST_DETAIL = 65_536
"""Tensors times ranks: beyond this a step of all ranks is told without its tensors."""


class RankParts:
    """Of whom an optimizer's gradients are, as far as torch's own objects say it; found once.

    Args:
        params: of the optimizer.
        models: that own them.
        number: the optimizer's among those of which ranks tell.
        names, kind: of its parameters, and its class: the same on ranks that train the same.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        models: Sequence[nn.Module],
        *,
        number: int,
        names: Sequence[str],
        kind: str,
    ) -> None:
        import torch.distributed as dist

        self._number, self._structure = number, _digest([kind, *names])
        self._ranks = _replicas(params, models)
        self.spread = self._ranks is None
        """Whether gradients are spread over ranks, and not only losses."""
        self.has_detail = False
        """Whether steps are told tensor by tensor."""
        if self._ranks is not None:
            return
        self._ranks = tuple(range(world_size()))
        flat_ranks = _flat_ranks(params, models)
        rank, by_ranks = dist.get_rank(), cast("dict[tuple[int, ...], list[int]]", {})
        for place, param in enumerate(params):
            ranks = flat_ranks.get(id(param), (rank,))
            if is_distributed(param):
                ranks = ranks_on(cast("Any", param).device_mesh)
            by_ranks.setdefault(ranks, []).append(place)
        self._holders = [(_digest(places), ranks) for ranks, places in by_ranks.items()]
        self._set_of = {p: at for at, each in enumerate(by_ranks.values()) for p in each}
        self.has_detail = len(params) * len(self._ranks) <= _MOST_DETAIL

    @staticmethod
    def known(params: Sequence[Tensor], models: Sequence[nn.Module]) -> bool:
        """Whether there are ranks that can tell of these parameters together.

        Plain tensors outside of DistributedDataParallel are copies or parts, which nothing says.
        """
        if not has_other_ranks():
            return False
        if flattened_among(params) or any(map(is_distributed, params)):
            return True
        return _replicas(params, models) is not None

    def counts(self, params: Sequence[Tensor], reading: Reading) -> list[bool] | None:
        """For each gradient that was read, whether this rank's elements count; None: unknown."""
        if not self.spread:
            return []
        return _counts([(params[place], params[place].grad) for place in reading.places])

    def of_step(self, reading: Reading, counts: Sequence[bool] | None, carried: object) -> RankPart:
        """What is to be told of a step, on its device; does not wait.

        Args:
            reading: of the gradients.
            counts: for each of them, whether this rank's elements count.
            carried: the scale that they carry.
        """
        assert self._ranks is not None
        if not self.spread:
            return RankPart(self._ranks, self._number, self._structure)
        return RankPart(
            self._ranks,
            self._number,
            self._structure,
            spread=True,
            holders=self._holders,
            norms=None if counts is None else self._norms(reading, counts, carried),
            counts=counts or (),
            sets=[self._set_of[place] for place in reading.places],
            double=reading.double,
        )

    def _norms(self, reading: Reading, counts: Sequence[bool], carried: object) -> Tensor:
        """For each set of parameters the norm of those of its elements that count here."""
        found = reading.statistics
        if found is None:
            return torch.zeros(len(self._holders), dtype=torch.float64, device="cpu")
        rows: list[list[int]] = [[] for _ in self._holders]
        for row, (place, mine) in enumerate(zip(reading.places, counts, strict=True)):
            if mine:
                rows[self._set_of[place]].append(row)
        home = found.norms.device
        chosen = [
            found.norms.index_select(0, numbers_on(home, tuple(each), torch.int64)) for each in rows
        ]
        norms = torch.stack([total_norm(each, 2.0) for each in chosen])
        return norms / moved(carried.detach(), home) if isinstance(carried, Tensor) else norms


def letter_of(pending: PendingStep, own: Step, number: int) -> dict[str, Any]:
    """What a rank tells of a step whose numbers have arrived, as JSON holds it.

    Args:
        pending: the step; it has a part.
        own: the same as this rank would write it down.
        number: the step's, counted from the first of this session.
    """
    part = pending.part
    assert part is not None
    told: dict[str, Any] = {
        "optimizer": part.optimizer,
        "step": number,
        "structure": part.structure,
        "loss": pending.scalars.get("loss"),
        "clipped": own.clipped,
        "double": part.double,
    }
    norms = pending.column("part_norms")
    if not norms:
        return told
    told["holders"] = [
        [name, ranks, norm] for (name, ranks), norm in zip(part.holders, norms, strict=True)
    ]
    measured = zip(
        pending.places or (), part.sets, part.counts, *pending.counts(),
        pending.elements or (), strict=True,
    )  # fmt: skip
    told["tensors"] = [
        [place, at, counts, nan, inf, elements, *_row_of(own.detail, place)]
        for place, at, counts, nan, inf, elements in measured
        if nan or inf or own.detail is not None
    ]
    told["detail"] = own.detail is not None
    return told


def step_of_all(
    own: Step, optimizer: RecordedOptimizer, letters: Mapping[int, Mapping[str, Any]]
) -> Step | None:
    """A step as all of its ranks have told it; None if it is not known how they belong together.

    Args:
        own: as the rank that writes it down found it.
        optimizer: its own.
        letters: of each rank, that one's too.
    """
    ranks = sorted(letters)
    if len({letters[rank]["structure"] for rank in ranks}) > 1:
        return None
    step = own._replace(**_losses(letters))
    if not own.of_rank:
        return step
    if not all("holders" in letters[rank] for rank in ranks):
        return None
    chosen = _counted_sets(letters)
    if chosen is None:
        return None
    norms, sets = [norm for _, norm in chosen.values()], {n: r for n, (r, _) in chosen.items()}
    double = any(letters[rank]["double"] for rank in ranks)
    norm = torch.tensor(_norm(norms), dtype=torch.float64, device="cpu")
    whole = rounded(norm, double=double).item()
    tensors: dict[int, list[_Tensor]] = {}
    for rank in ranks:
        holders = letters[rank]["holders"]
        for place, at, counts, *numbers in letters[rank]["tensors"]:
            name, theirs, _ = holders[at]
            counted = bool(counts) and tuple(theirs) == sets[name]
            tensors.setdefault(place, []).append(_Tensor(rank, counted, *numbers))
    names = optimizer.info.names
    bad = {p: [t for t in each if t.nan or t.inf] for p, each in tensors.items()}
    culprits = tuple(
        Culprit(
            f"{names[place]} {on_ranks([t.rank for t in bad[place]], len(ranks))}",
            int(sum(t.nan for t in bad[place] if t.counts)),
            int(sum(t.inf for t in bad[place] if t.counts)),
        )
        for place in optimizer.backward
        if bad.get(place)
    )
    has_detail = all(letters[rank]["detail"] for rank in ranks)
    return step._replace(
        norm=whole if math.isfinite(whole) else None,
        clipped=any(letters[rank]["clipped"] for rank in ranks),
        culprits=culprits,
        nan=sum(each.nan for each in culprits),
        inf=sum(each.inf for each in culprits),
        detail=_detail(tensors, len(names)) if has_detail else None,
        of_rank=None,
    )


class _Tensor(NamedTuple):
    """What one rank has found of a gradient."""

    rank: int
    counts: bool
    nan: float
    inf: float
    elements: int
    norm: float | None = None
    largest: float | None = None
    zeros: float | None = None
    weight: float | None = None
    update: float | None = None


def _row_of(detail: Detail | None, place: int) -> list[float | None]:
    """The numbers of one parameter, as `_Tensor` ends with them."""
    if detail is None:
        return []
    columns = (detail.norm, detail.largest, detail.zeros, detail.weight, detail.update)
    return [column[place] for column in columns]


def _losses(letters: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of a step that tell of the losses of all ranks."""
    told = {r: float(x["loss"]) for r, x in sorted(letters.items()) if x["loss"] is not None}
    if not told:
        return {}
    bad = tuple(rank for rank, loss in told.items() if not math.isfinite(loss))
    return {
        "loss": None if bad else math.fsum(told.values()) / len(told),
        "loss_nonfinite": bool(bad),
        "loss_ranks": len(told),
        "bad_loss_ranks": bad,
    }


def _counted_sets(
    letters: Mapping[int, Mapping[str, Any]],
) -> dict[str, tuple[tuple[int, ...], float]] | None:
    """For each set of parameters the ranks whose elements count, and the norm that they found.

    None if ranks are missing, or if several hold a set apart from each other and found different
    norms: then they hold different parts, and which ones nobody knows.
    """
    found: dict[str, dict[tuple[int, ...], dict[int, float]]] = {}
    for rank, letter in letters.items():
        for name, ranks, norm in letter["holders"]:
            found.setdefault(name, {}).setdefault(tuple(ranks), {})[rank] = float(norm)
    chosen = {}
    for name, sets in found.items():
        told = [rank for by_rank in sets.values() for rank in by_rank]
        complete = all(sorted(by_rank) == sorted(ranks) for ranks, by_rank in sets.items())
        if not complete or sorted(told) != sorted(letters):
            return None
        norms = {ranks: _norm(list(by_rank.values())) for ranks, by_rank in sorted(sets.items())}
        (first, norm), *others = norms.items()
        if not all(_alike(norm, other) for _, other in others):
            return None
        chosen[name] = first, norm
    return chosen


def _alike(one: float, other: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=_ALIKE)
    return not math.isfinite(one) and not math.isfinite(other)


def _norm(norms: Sequence[float]) -> float:
    """The norm of tensors as if they were one vector, never overflowing on the way."""
    if any(map(math.isnan, norms)):
        return math.nan
    unit = max(norms, default=0.0)
    if unit == 0.0 or unit == math.inf:
        return unit
    return unit * math.sqrt(math.fsum((norm / unit) ** 2 for norm in norms))


def _detail(tensors: Mapping[int, Sequence[_Tensor]], count: int) -> Detail:
    """Whole tensors, from what each rank has found of its elements."""
    columns: dict[str, list[Any]] = {name: [None] * count for name in Detail._fields}
    for place, every in tensors.items():
        counted = [each for each in every if each.counts]
        weight = _norm_if_known([each.weight for each in counted])
        changes = [
            None if t.update is None or t.weight is None else t.update * t.weight for t in counted
        ]
        change = _norm_if_known(changes)
        elements = sum(each.elements for each in counted)
        largest = [each.largest for each in counted]
        zeros = math.fsum((each.zeros or 0.0) * each.elements for each in counted)
        row = {
            "norm": _norm_if_known([each.norm for each in counted]),
            "largest": None if None in largest else max(cast("list[float]", largest), default=None),
            "zeros": zeros / elements if elements else None,
            "nan": int(sum(each.nan for each in counted)),
            "inf": int(sum(each.inf for each in counted)),
            "weight": weight,
            "update": 0.0 if change == 0.0 else change / weight if change and weight else None,
        }
        for name, number in row.items():
            columns[name][place] = number
    return Detail(**columns)


def _norm_if_known(norms: Sequence[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return _norm(known) if len(known) == len(norms) else None


def _counts(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> list[bool] | None:
    """For each gradient whether this rank's elements count; None if some are summands (Partial).

    Of a gradient on another mesh than its parameter it is not known either.
    """
    counts, known = [], cast("dict[tuple[int, Any], Layout]", {})
    for param, grad in gradients:
        if grad is None:  # Somebody else has taken it meanwhile.
            return None
        if not is_distributed(grad):
            counts.append(True)
            continue
        if any(placement.is_partial() for placement in cast("Any", grad).placements):
            return None
        try:
            counts.append(layout_of(param, grad, str, known).counts)
        except ValueError:
            return None
    return counts


def partners_of(params: Sequence[Tensor], models: Sequence[nn.Module]) -> set[int]:
    """The ranks that train these parameters together with this one, as far as it is known."""
    if not has_other_ranks():
        return set()
    found = {rank for ranks in _replicas_by_id(models).values() for rank in ranks}
    found |= {rank for ranks in _flat_ranks(params, models).values() for rank in ranks}
    for param in filter(is_distributed, params):
        found.update(ranks_on(cast("Any", param).device_mesh))
    return found


def _replicas(params: Sequence[Tensor], models: Sequence[nn.Module]) -> tuple[int, ...] | None:
    """The ranks of DistributedDataParallel that all of these parameters belong to; else None."""
    groups = _replicas_by_id(models)
    found = {groups.get(id(param)) for param in params}
    if len(found) != 1 or flattened_among(params) or any(map(is_distributed, params)):
        return None
    return found.pop()


def _replicas_by_id(models: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """By the id of a parameter of DistributedDataParallel: the ranks that hold it."""
    groups: dict[int, tuple[int, ...]] = {}
    for model in models:
        for part in model.modules():
            group = replicas_of(part)
            if group is not None:
                ranks = ranks_in(group)
                groups.update((id(param), ranks) for param in part.parameters())
    return groups


def _flat_ranks(
    params: Sequence[Tensor], models: Sequence[nn.Module]
) -> dict[int, tuple[int, ...]]:
    """By the id of a parameter that FSDP1 has cut: the ranks that hold its shards."""
    flat = {id(param) for param in flattened_among(params)}
    module = sys.modules.get("torch.distributed.fsdp")
    if not flat or module is None:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for model in models:
        for part in model.modules():  # The innermost one, which comes last, has cut it.
            if isinstance(part, module.FullyShardedDataParallel):
                wrapper: Any = part
                is_cut = wrapper.sharding_strategy.name != "NO_SHARD"
                ranks = ranks_in(wrapper.process_group)
                for param in part.parameters():
                    found.pop(id(param), None)
                    if is_cut and id(param) in flat:
                        found[id(param)] = ranks
    return found


def _digest(things: object) -> str:
    return hashlib.sha256(json.dumps(things).encode()).hexdigest()[:12]
