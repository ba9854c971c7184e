"""The losses of data-parallel ranks enter, step by step; those of all leave, some steps later.

Ranks that average their gradients decide alike without a word, but of each other's losses they know
nothing. If one of them records, they tell each other at fixed step numbers: one all_gather of two
numbers a step, in the order of every other collective of the training, and no wait. What came after
the last of these is told to nobody: the end of a run is no place to wait for others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradilocks._torch import is_joining
from gradilocks.ranks.all_parameters import on_ranks
from gradilocks.ranks.layout import device_for, ranks_in
from gradilocks.step.host_copy import HostCopy
from gradilocks.values import RecordingPlan, moved, wide

__all__ = ["LossExchange", "RankedLosses", "exchange_for"]

_logger = logging.getLogger("gradilocks")
_IN_FULL = 5  # Lines of the log; later ones say what is known already.


@dataclass(frozen=True)
class RankedLosses:
    """The losses of data-parallel ranks at consecutive steps."""

    ranks: tuple[int, ...]
    steps: int
    """How many steps."""
    numbers: Tensor
    """1-d: rank by rank, for each step the loss and whether there was one, each a number."""

    def by_step(self, numbers: Sequence[float]) -> list[tuple[float | None, tuple[int, ...]]]:
        """For each step the mean of the ranks' losses, and whose losses were not finite.

        Args:
            numbers: on the host. The mean is None if no rank knew a loss, or one was not finite.
        """
        found: list[tuple[float | None, tuple[int, ...]]] = []
        for step in range(self.steps):
            told = {}
            for at, rank in enumerate(self.ranks):
                begin = 2 * (at * self.steps + step)
                loss, known = numbers[begin : begin + 2]
                if known:
                    told[rank] = loss
            bad = tuple(rank for rank, loss in told.items() if not math.isfinite(loss))
            mean = sum(told.values()) / len(told) if told and not bad else None
            found.append((mean, bad))
        return found


class LossExchange:
    """Holds this rank's losses on the device, and tells them to all ranks at fixed steps.

    Args:
        group: the ranks, by their process group.
        every: after so many steps.
        log: whether this rank tells of losses that are NaN or Inf through `logging`.
        model: finds what they train. Where `DistributedDataParallel.join()` is at work, some ranks
            may have stopped before the others, and nothing is told any more.
    """

    def __init__(self, group: Any, *, every: int, log: bool, model: Callable[[], object]) -> None:
        self._group, self._ranks, self._every, self._log = group, ranks_in(group), every, log
        self._model = model
        self._held: list[Tensor] = []
        self._coming: tuple[HostCopy, RankedLosses, int] | None = None
        self._lines = 0

    def take(self, loss: Tensor | None, step: int, home: torch.device) -> RankedLosses | None:
        """A step is over; what all ranks told, if this step is one at which they do.

        Args:
            loss: this rank's, 0-d; None if it is not known.
            step: its number, for the log.
            home: the device on which numbers are held.
        """
        import torch.distributed as dist

        self._tell_log()
        dtype = wide(home)
        known = torch.full((), float(loss is not None), dtype=dtype, device=home)
        value = torch.zeros_like(known) if loss is None else moved(loss, home).to(dtype)
        self._held.append(torch.stack([value, known]))
        if len(self._held) < self._every:
            return None
        held, self._held = torch.cat(self._held), []
        if is_joining(self._model()):
            return None
        there = moved(held, device_for(self._group, home.type, home))
        rows = there.new_zeros(len(self._ranks), there.numel())
        dist.all_gather(list(rows.unbind(0)), there, group=self._group)
        told = RankedLosses(self._ranks, self._every, rows.flatten())
        if self._log:
            self._coming = HostCopy(told.numbers), told, step
            self._tell_log()
        return told

    def forget(self) -> None:
        """The run goes on from a checkpoint, on all ranks: what is held is of other steps."""
        self._held = []

    def _tell_log(self) -> None:
        """Tells of losses that were NaN or Inf, once the numbers have arrived."""
        if self._coming is None or not self._coming[0].arrived():
            return
        (copy, told, last), self._coming = self._coming, None
        found = told.by_step(copy.read())
        for at, (_, bad) in enumerate(found):
            if bad and self._lines < _IN_FULL:
                self._lines += 1
                where = on_ranks(bad, len(self._ranks))
                step = last - len(found) + 1 + at
                _logger.warning("the loss of step %d was NaN or Inf %s", step, where)


def exchange_for(
    plans: Collection[RecordingPlan], group: Any, model: Callable[[], object]
) -> LossExchange | None:
    """How the ranks of `group` tell each other their losses; None if none of them records.

    Args:
        plans: of the recorders of all ranks.
        group: the ranks.
        model: finds what they train.
    """
    if not plans:
        return None
    import torch.distributed as dist

    every, where = min(plan.flush_every for plan in plans), {plan.log_on for plan in plans}
    log = "all" in where or ("first" in where and dist.get_rank(group) == 0)
    return LossExchange(group, every=every, log=log, model=model)
