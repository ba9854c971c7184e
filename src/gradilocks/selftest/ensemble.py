"""All ranks go through the checks together: a seat enters, a CheckResult a check leaves on rank 0.

What a rank's worker found is put where all ranks meet, in the launcher's own store and not by a
collective: a group that hangs cannot say so. Rank 0 reads it, makes one result of it, and says how
to go on: with the same workers, with new ones where a check was not finished, or not at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gradilocks.selftest.check_list import Check, checks_for
from gradilocks.selftest.check_result import CheckResult, Found, combined, published
from gradilocks.selftest.rank_worker import GRACE, START_LIMIT, RankWorker, joining
from gradilocks.selftest.seat import CannotRun, Seat, meeting_place

__all__ = ["Ensemble"]

MOST_HUNG = 3
"""So many checks may hang or die; after that each of the others would cost its time limit too."""
_SLACK = 60.0
_LOOK = 0.01


def _nothing() -> None:
    """For who does not want to know that somebody waits."""


class Ensemble:
    """All ranks, seen from one of them.

    Args:
        seat: of this rank.
        device: "cpu", "cuda", or "auto".
        limit: seconds for one check.
    """

    def __init__(self, seat: Seat, *, device: str = "auto", limit: float = 30.0) -> None:
        self.seat, self._limit = seat, limit
        # Not this rank's own time: ranks on two cores import torch one after another.
        store, self._store = meeting_place(seat, hosts=True, seconds=START_LIMIT + _SLACK)
        here = Seat(**{**asdict(seat), "port": store.port})
        self._worker = RankWorker(here, device=device, limit=limit)
        self._kept = store  # It may be this process that keeps it for all.
        self._hung = 0
        self._stopped = ""  # Why nothing more is tried.
        self._turn = 0
        self.about: dict[str, Any] = {}
        """What ran, and on what: known after `start`."""
        self.checks: tuple[Check, ...] = ()
        """What is to be run: known after `start`."""

    def __enter__(self) -> Ensemble:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.remove()

    def start(self, waiting: Callable[[], None] = _nothing) -> None:
        """Lets all ranks begin.

        Raises:
            CannotRun: on all ranks alike, if one cannot.
        """
        told = self._begin(waiting)
        if "refused" in told:
            raise CannotRun(told["refused"])
        self.about = {"ranks": self.seat.ranks, **told["about"]}
        self.checks = checks_for(self.seat.ranks, self.about["device"])

    def run(self, check: Check, waiting: Callable[[], None] = _nothing) -> CheckResult | None:
        """Runs one check on all ranks; the result on rank 0, None elsewhere."""
        if why := check.unfit or self._stopped:
            return CheckResult(check.name, check.group, "not tried", 0.0, why=why)
        wait = self._limit * check.patience + GRACE + _SLACK
        self._put(asdict(self._worker.run(check.name, check.patience, waiting)))
        result = None
        if self.seat.rank == 0:
            found = [self._of_rank(each) for each in self._everybody(wait, waiting)]
            result = combined(check.name, check.group, found)
            lost = any(each.state in ("hung", "died") for each in found)
            # A rank that raised may have left a collective that others wait in, or will.
            again = lost or any(each.state == "raised" for each in found)
            self._tell({"hung": lost, "again": again})
        told = self._told(wait + _SLACK)
        self._hung += told["hung"]
        if self._hung >= MOST_HUNG:
            self._stopped = f"{MOST_HUNG} checks before it have hung or died"
        elif told["again"] and "refused" in self._begin(waiting):
            self._stopped = "the ranks could not begin again"  # What is known is worth having.
        return result

    def agree(self, status: int) -> int:
        """The exit status of rank 0, on all ranks, once rank 0 has said everything."""
        self._turn += 1
        if self.seat.rank == 0:
            self._store.set("status", str(status))
            for rank in range(1, self.seat.ranks):  # The store goes with this process.
                self._wait_for(f"left {rank}", _SLACK)
            return status
        # Rank 0 still has its file to write.
        if not self._wait_for("status", _SLACK + START_LIMIT):
            raise CannotRun("rank 0 does not answer any more.")
        found = int(self._store.get("status"))
        self._store.set(f"left {self.seat.rank}", "")
        return found

    def _begin(self, waiting: Callable[[], None]) -> dict[str, Any]:
        """New workers on all ranks, in a process group; what they say, or why they cannot."""
        self._put(self._worker.start(waiting))
        if self.seat.rank == 0:
            self._tell(self._first_words(self._everybody(START_LIMIT + _SLACK, waiting)))
        told = self._told(START_LIMIT + 2 * _SLACK)
        if "refused" in told:
            return told
        joins = joining(lambda world: Found(), self._limit)
        self._put(asdict(self._worker.run(joins.name, joins.patience, waiting)))
        if self.seat.rank == 0:
            found = map(self._of_rank, self._everybody(START_LIMIT + _SLACK, waiting))
            problems = combined(joins.name, joins.group, list(found)).problems
            self._tell({"refused": f"the ranks do not meet: {problems[0]}"} if problems else {})
        return told | self._told(START_LIMIT + 2 * _SLACK)

    def _first_words(self, told: list[dict[str, Any] | None]) -> dict[str, Any]:
        """How to go on after all ranks have begun, or have not."""
        refused = {
            rank: "it does not answer" if each is None else each["refused"]
            for rank, each in enumerate(told)
            if each is None or "refused" in each
        }
        if refused:
            rank, why = next(iter(refused.items()))
            return {"refused": f"rank {rank} cannot begin: {why}"}
        known = [each for each in told if each is not None]
        for key in ("device", "backend", "versions"):
            for rank, each in enumerate(known):
                if each[key] != known[0][key]:
                    return {
                        "refused": f"the ranks have not the same {key}: {known[0][key]} on rank 0, "
                        f"{each[key]} on rank {rank}. Name one by --device, and install the same "
                        "versions everywhere."
                    }
        return {"about": known[0]}

    def _of_rank(self, told: dict[str, Any] | None) -> Found:
        if told is None:
            return Found(["its process does not answer any more"], state="died")
        return Found(**told)

    # What the ranks tell each other: a turn, everybody's words, and then rank 0's.

    def _put(self, mine: dict[str, Any]) -> None:
        self._turn += 1
        self._store.set(f"{self._turn} of {self.seat.rank}", json.dumps(mine))

    def _everybody(
        self, seconds: float, waiting: Callable[[], None]
    ) -> list[dict[str, Any] | None]:
        until = time.monotonic() + seconds
        told: list[dict[str, Any] | None] = []
        for rank in range(self.seat.ranks):
            key = f"{self._turn} of {rank}"
            there = self._wait_for(key, until - time.monotonic(), waiting)
            told.append(json.loads(self._store.get(key)) if there else None)
        return told

    def _tell(self, words: dict[str, Any]) -> None:
        self._store.set(f"{self._turn} of all", json.dumps(words))

    def _told(self, seconds: float) -> dict[str, Any]:
        key = f"{self._turn} of all"
        if not self._wait_for(key, seconds):
            raise CannotRun("rank 0 does not answer any more.")
        told: dict[str, Any] = json.loads(self._store.get(key))
        return told

    def _wait_for(self, key: str, seconds: float, waiting: Callable[[], None] = _nothing) -> bool:
        """Whether a key is there in time. Looks again and again: Ctrl-C must get through."""
        until = time.monotonic() + seconds
        try:
            while not self._store.check([key]):
                if time.monotonic() > until:
                    return False
                waiting()
                time.sleep(_LOOK)
        except RuntimeError as error:
            raise CannotRun(f"the ranks' meeting place is gone: {published(str(error))}") from error
        return True
