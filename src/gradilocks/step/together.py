"""What ranks that hold one model tell each other at a step, and whose fault a skip was, by that.

A row of numbers a rank enters, from the step's one collective; culprits and losses with their ranks
leave, alike on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradilocks.ranks.all_parameters import NOBODY, AllParameters, on_ranks
from gradilocks.step.host_copy import fetch
from gradilocks.step.rank_drift import CARRIED
from gradilocks.values import LocalDetail

__all__ = ["BLAMED", "TOLD", "NonFiniteCount", "Together"]


class NonFiniteCount(NamedTuple):
    """How many elements of one gradient are NaN, and how many are Inf."""

    nan: int
    inf: int

    def __str__(self) -> str:
        if self.nan and self.inf:
            return "NaN and Inf"
        return "NaN" if self.nan else "Inf"


TOLD = (
    *("peak", "loss", "nan", "inf", "bad", "place", "place counts", "place nan", "place inf"),
    *("loss value", "losses"),
    *CARRIED,
)
"""What a rank tells at every step beside its norm: the largest magnitude, whether its loss was not
finite, the NaN and Inf in what it counts, how many of its gradients have some; of the first of
those in backward order its place in that order, whether it counts, its NaN and its Inf; its loss,
and whether it has one: of a pipeline's stages only the last does; and what it carries into the
step."""

BLAMED = ("loss", "bad", "place", "place counts", "place nan", "place inf")
"""Those of TOLD by which `blamed` says whose gradients and whose losses were not finite."""


class Together(NamedTuple):
    """What all ranks have told each other of a step: a row a rank, with the numbers of TOLD."""

    ranks: tuple[int, ...]
    rows: Tensor
    names: Sequence[Sequence[str]]
    """For each rank, the parameters that it has told of, in backward order."""
    owners: Sequence[Sequence[int]] = ()
    """For each rank and each of those, the number of its optimizer."""
    parameters: AllParameters = NOBODY
    """The parameters of all ranks."""
    local: LocalDetail | None = None
    """What this rank has found tensor by tensor, if the ranks share that of this step."""

    def largest(self, what: str) -> Tensor:
        """The largest of all ranks' numbers of that kind."""
        return self.rows[:, TOLD.index(what)].amax()

    def total(self, what: str) -> Tensor:
        """The sum of all ranks' numbers of that kind."""
        return self.rows[:, TOLD.index(what)].sum()

    def elements(self, what: str) -> Tensor:
        """How many elements of all ranks are "nan" or "inf"; of copies, those of one.

        A copy that differs from the one that counts is told of by its first culprit.
        """
        counted = self.total("nan") + self.total("inf")
        return torch.where(counted > 0, self.total(what), self.largest(f"place {what}"))

    def mean_loss(self) -> Tensor:
        """The mean of the losses of the ranks that have one; 0 if none has, see `total`."""
        return self.total("loss value") / self.total("losses").clamp(min=1.0)

    def blamed_rows(self) -> Tensor:
        """The numbers that BLAMED names, rank after rank, in one row."""
        columns = [TOLD.index(name) for name in BLAMED]
        return torch.stack([self.rows[:, column] for column in columns], dim=1).flatten()

    def blamed_now(self) -> tuple[dict[str, NonFiniteCount], str]:
        """The first culprit of each rank, and where losses were bad. Waits for the device."""
        culprits, losses = self.blamed(fetch(self.blamed_rows()))
        return culprits, f" {on_ranks(losses, len(self.ranks))}" if losses else ""

    def blamed(
        self, numbers: Sequence[float], *, optimizer: int | None = None
    ) -> tuple[dict[str, NonFiniteCount], tuple[int, ...]]:
        """The first culprit of each rank, with the ranks that have it; whose losses were bad.

        Args:
            numbers: as `blamed_rows` has them, on the host.
            optimizer: only parameters of the one with this number; None for all.
        """
        found: dict[str, list[tuple[int, dict[str, float]]]] = {}
        losses = []
        for at, (rank, names) in enumerate(zip(self.ranks, self.names, strict=True)):
            row = numbers[at * len(BLAMED) : (at + 1) * len(BLAMED)]
            told = dict(zip(BLAMED, row, strict=True))
            if told["loss"]:
                losses.append(rank)
            place = int(told["place"])
            if told["bad"] and optimizer in (None, *self.owners[at][place : place + 1]):
                name = names[place] if place < len(names) else "a parameter added since"
                found.setdefault(name, []).append((rank, told))
        culprits = {
            f"{name} {on_ranks([rank for rank, _ in each], len(self.ranks))}": _of_one(
                [told for _, told in each]
            )
            for name, each in found.items()
        }
        return culprits, tuple(losses)


def _of_one(told: Sequence[dict[str, float]]) -> NonFiniteCount:
    """The NaN and Inf of one tensor, from ranks that hold parts or copies of it."""
    counted = [each for each in told if each["place counts"]]
    if counted:
        nan, inf = (sum(each[f"place {what}"] for each in counted) for what in ("nan", "inf"))
    else:
        nan, inf = (max(each[f"place {what}"] for each in told) for what in ("nan", "inf"))
    return NonFiniteCount(int(nan), int(inf))
