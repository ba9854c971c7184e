"""What each rank carries into a step enters; an error leaves, on all of them, if they have parted.

Ranks that hold one model compare their settings, scales and step numbers at the first step, and
decide alike from then on. What only one of them does ends that: it loads a checkpoint, calls
`unscale_()`, catches the error of a step. Each would divide by a scale of its own. So the numbers
go out in the step's row; a step at which they differ is skipped on the device, and the error
follows as soon as the host may know: at once on a CPU, a fixed number of steps later elsewhere, so
that all ranks raise it at the same step and nobody waits. A step for which no rank has a gradient
is told in the same way, and so is a tensor that shows its first gradient after the first steps: the
ranks are to compare it, and go on.

Data-parallel ranks send each other nothing at a step. They compare again at the first step after
all of them have loaded a state; that all have, a number in torch's store tells (`LoadCount`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradilocks._torch import default_store
from gradilocks.errors import NoGradients, ScaleMisuse
from gradilocks.kernels.cuda_graph import capturing
from gradilocks.ranks.layout import shortened
from gradilocks.step.host_copy import LAG, HostCopy

__all__ = ["CARRIED", "LoadCount", "RankDrift"]

CARRIED = ("scale", "step", "gradients", "news")
"""What a rank carries into a step: the scale that its gradients have, the number of steps before
it, how many gradients there are, and how many of them the ranks have yet to compare."""


class RankDrift:
    """Notices ranks that no longer decide alike."""

    def __init__(self) -> None:
        self._seen: Tensor | None = None  # Whether it has happened, and the rows of the first time.
        self._news: Tensor | None = None  # The most since the host has read it.
        self._coming: HostCopy | None = None
        self._age = 0  # How many steps ago the host sent for it.
        self.has_news = False
        """Whether the host has learned at this step that ranks have tensors to compare."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_seen": None, "_news": None, "_coming": None, "_age": 0, "has_news": False}

    def notice(self, rows: Tensor, ranks: Sequence[int], *, heard: bool = False) -> Tensor:
        """0-d, above 0 if the step must be skipped; raises if the host knows why.

        Args:
            rows: for each rank, the numbers of CARRIED.
            ranks: in the order of `rows`.
            heard: whether the host knows the news of this step already.
        """
        alike = rows[:, :2].amax(dim=0) == rows[:, :2].amin(dim=0)
        parted = torch.logical_not(alike.all()) | (rows[:, 2].amax() == 0)
        flag = parted.to(rows.dtype)
        now = torch.cat([flag.reshape(1), rows.flatten()])
        if self._seen is None or self._seen.shape != now.shape or self._seen.device != now.device:
            self._seen, self._news, self._coming = now, None, None
        else:
            self._seen = torch.where(self._seen[0] > 0, self._seen, now)
        if heard:
            self._news = None
        else:
            news = rows[:, 3].amax().reshape(1)
            self._news = news if self._news is None else torch.maximum(news, self._news)
        self.has_news = False
        if not (now.is_cuda and capturing()):
            self._tell(ranks)
        return flag

    def _tell(self, ranks: Sequence[int]) -> None:
        """Raises what the device noticed, if it has and the numbers have come."""
        if self._coming is None:
            assert self._seen is not None
            news = torch.zeros_like(self._seen[:1]) if self._news is None else self._news
            self._coming, self._age = HostCopy(torch.cat([news, self._seen])), 0
            self._news = None
        if not self._coming.at_once:
            self._age += 1
            if self._age <= LAG:
                return
            self._coming.wait()
        told, happened, *numbers = self._coming.read()
        self._coming, self.has_news = None, told > 0
        if happened:
            self._seen = None
            width = len(CARRIED)
            _refuse([numbers[at : at + width] for at in range(0, len(numbers), width)], ranks)


def _refuse(rows: Sequence[Sequence[float]], ranks: Sequence[int]) -> NoReturn:
    """Raises the error that says what differs."""
    told = dict(zip(CARRIED, zip(*rows, strict=True), strict=True))
    absent = [rank for rank, scale in zip(ranks, told["scale"], strict=True) if not scale]
    if absent:
        raise ScaleMisuse(
            f"ranks {shortened(absent)} refused a step, and the error there says why. The ranks "
            "decide together, so it was skipped here."
        )
    for what, column in (
        ("scale that the gradients carry", "scale"),
        ("number of steps", "step"),
    ):
        values = told[column]
        for rank, value in zip(ranks, values, strict=True):
            if value != values[0]:
                raise ScaleMisuse(
                    f"the ranks no longer decide alike: the {what} is {values[0]:g} on rank "
                    f"{ranks[0]} and {value:g} on rank {rank}, so they were about to divide by "
                    "different scales. No step has been taken since. Load checkpoints, call "
                    "unscale_() and go on after an error on all ranks or on none."
                )
    raise NoGradients(
        "step() found no gradient on any rank, so nothing was stepped. Call backward() before "
        "step(), or look at whether the parameters require grad."
    )


class LoadCount:
    """Knows whether data-parallel ranks have all loaded a state since they compared, or some alone.

    A rank that asked the others after it has loaded alone would wait for them in vain. So each adds
    1 to a number in torch's store when it loads, and reads it at its next step. The gradients of
    that step are averages: once a rank has them, all have run backward, and have loaded before.

    Args:
        name: the same on all of these ranks, and of no others.
        ranks: how many there are.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self._name, self._ranks, self._compared = name, ranks, 0
        self.is_new = False
        """Whether this rank has loaded a state and the ranks have not compared since."""

    @property
    def _key(self) -> str:
        return f"gradilocks/loads/{self._name}/{self._compared}"

    def note(self) -> None:
        """This rank has loaded a state."""
        store = default_store()
        if store is not None and not self.is_new:
            self.is_new = True
            store.add(self._key, 1)

    def refuse_alone(self) -> None:
        """Raises if not all ranks have loaded a state; else all are here to compare.

        The gradients of the step must have arrived: the host has waited for the device.
        """
        store = default_store()
        loaded = 0 if store is None else store.add(self._key, 0)
        if loaded != self._ranks:
            raise ScaleMisuse(
                f"a state was loaded into this control on {loaded} of the {self._ranks} ranks that "
                "train the model, this one among them: their scales and settings may differ now. "
                "They average their gradients, so none may go on alone, and this one has taken no "
                "step since. Call load_state_dict() on all ranks before the same step, or on none."
            )

    def note_compared(self) -> None:
        """All ranks have compared what they have."""
        self.is_new, self._compared = False, self._compared + 1
