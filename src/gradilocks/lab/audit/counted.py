"""What each rank has counted of its modules enters; what all of them have counted leaves, judged.

Ranks that train one model together have modules of the same names: their counts add up, as the
batches of data parallel ranks and the shards of one tensor do. Modules of ranks of which nothing
tells that they do may be different ones of the same name, as in the stages of a pipeline: they stay
apart, each with its rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradilocks.lab.audit.result import Audit
from gradilocks.lab.audit_record import Histogram, ModuleGradients, Outputs
from gradilocks.lab.formats import Format
from gradilocks.ranks.all_parameters import on_ranks

__all__ = ["Counted", "counted_together"]

_COUNTS = ("passes", "lost_passes")  # What ranks add up.
_LARGEST = float.fromhex("0x1.fffffep+127")


@dataclass(frozen=True)
class Counted:
    """The gradients of a process's modules, or of those of several."""

    modules: tuple[ModuleGradients, ...]
    precision: str
    """What the gradients were computed in."""
    loss_scale: float
    """What was divided out of them; 1 without."""
    passes: int = 0
    """How many backward passes made them."""
    lost_passes: int = 0
    """How many of these began from a loss that was NaN or Inf itself."""

    def judged(self, *, steps: int, formats: Sequence[Format]) -> Audit:
        """An audit of them, after so many steps.

        Of the modules that have no gradients it has those that return what one of the formats
        cannot hold.
        """
        narrowest = min((format.largest for format in formats), default=_LARGEST)
        return Audit.of(
            [
                module
                for module in self.modules
                if module.parameters is not None
                or module.activations is not None
                or (module.outputs is not None and module.outputs.largest > narrowest)
            ],
            steps=steps,
            formats=formats,
            precision=self.precision,
            loss_scale=self.loss_scale,
            lost_passes=(self.lost_passes, self.passes),
        )

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        modules = [module.to_plain() for module in self.modules]
        return {
            "modules": modules,
            "precision": self.precision,
            "loss_scale": self.loss_scale,
            **counts,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Counted:
        """The inverse of `to_plain`."""
        modules = tuple(map(ModuleGradients.from_plain, plain["modules"]))
        counts = {name: plain[name] for name in _COUNTS}
        return cls(modules, plain["precision"], plain["loss_scale"], **counts)


def counted_together(
    counted: Mapping[int, Counted], partners: Mapping[int, Iterable[int]], *, ranks: int
) -> Counted:
    """What several ranks have counted.

    Args:
        counted: by rank.
        partners: by rank, those that it trains a model together with, as far as it is known.
        ranks: how many there are.
    """
    teams = _teams(counted, partners)
    modules: list[ModuleGradients] = []
    for team in teams:
        found = _added_up([counted[rank].modules for rank in team])
        modules += found if len(teams) == 1 else _named(found, on_ranks(team, ranks))
    precisions = dict.fromkeys(each.precision for _, each in sorted(counted.items()))
    first = counted[min(counted)]
    counts = {name: sum(getattr(each, name) for each in counted.values()) for name in _COUNTS}
    return Counted(tuple(modules), " and ".join(precisions), first.loss_scale, **counts)


def _teams(ranks: Iterable[int], partners: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """The ranks in sets: two are in one if a chain of partners leads from one to the other."""
    team = {rank: {rank} for rank in sorted(ranks)}
    for rank in team:
        for partner in partners.get(rank, ()):
            if partner in team and team[partner] is not team[rank]:
                team[rank] |= team[partner]
                for member in team[partner]:
                    team[member] = team[rank]
    return [sorted(members) for rank, members in team.items() if rank == min(members)]


def _added_up(told: Iterable[Iterable[ModuleGradients]]) -> list[ModuleGradients]:
    """The modules of several ranks, one for each name."""
    found: dict[str, list[ModuleGradients]] = {}
    for modules in told:
        for module in modules:
            found.setdefault(module.name, []).append(module)
    return [
        ModuleGradients(
            name,
            same[0].kind,
            _sum([each.parameters for each in same]),
            _sum([each.activations for each in same]),
            _all_outputs([each.outputs for each in same if each.outputs is not None]),
        )
        for name, same in found.items()
    ]


def _sum(histograms: Sequence[Histogram | None]) -> Histogram | None:
    return Histogram.total(histograms) if any(histograms) else None


def _all_outputs(outputs: Sequence[Outputs]) -> Outputs | None:
    if not outputs:
        return None
    return Outputs(
        max(each.largest for each in outputs),
        sum(each.nonfinite for each in outputs),
        tuple(dict.fromkeys(taker for each in outputs for taker in each.takers)),
    )


def _named(modules: Iterable[ModuleGradients], where: str) -> list[ModuleGradients]:
    """The same modules, told from those of other ranks."""
    return [
        replace(
            module,
            name=f"{module.name} {where}".lstrip(),
            outputs=module.outputs
            and replace(
                module.outputs,
                takers=tuple(f"{taker} {where}".lstrip() for taker in module.outputs.takers),
            ),
        )
        for module in modules
    ]
