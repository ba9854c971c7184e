"""The environment of a process enters; which rank it is, and where the ranks meet, leave.

torchrun says it by environment variables, and so does every other launcher that
`torch.distributed` understands; without any there is one rank.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradilocks.errors import GradilocksError

__all__ = ["CannotRun", "Seat", "find_seat", "meeting_place", "part_of"]

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_START = "torchrun --nproc-per-node N -m gradilocks selftest"


class CannotRun(GradilocksError):
    """The checks cannot begin here; nothing is known to be wrong."""


@dataclass(frozen=True)
class Seat:
    """One rank among others, and where they meet."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Its number on its machine, by which it takes a GPU."""
    address: str = "127.0.0.1"
    port: int = 0
    """0 for any that is free, where there is one rank."""
    hosted: bool = False
    """Whether the launcher keeps the store where the ranks meet; else rank 0 does."""
    round: str = "0"
    """How often the launcher has started the ranks again."""


def find_seat(environment: Mapping[str, str] | None = None) -> Seat:
    """Which rank this process is.

    Args:
        environment: the variables; those of this process if None.

    Raises:
        CannotRun: if they are incomplete or make no sense, or this torch knows of no ranks.
    """
    if not importlib.import_module("torch.distributed").is_available():
        raise CannotRun("this torch was built without torch.distributed. Install one that has it.")
    told = os.environ if environment is None else environment
    missing = [name for name in _NAMES if not told.get(name)]
    if missing == list(_NAMES) or ("RANK" in missing and "WORLD_SIZE" in missing):
        return Seat()
    if missing:
        raise CannotRun(
            f"of the variables by which ranks find each other {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start the ranks with {_START}, or "
            f"unset {', '.join(name for name in _NAMES if name in told)} for one process."
        )
    try:
        rank, ranks, port = (int(told[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank = int(told.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise CannotRun(
            f"RANK, WORLD_SIZE, MASTER_PORT and LOCAL_RANK are whole numbers, and one is not "
            f"({error}). Start the ranks with {_START}."
        ) from error
    if not 0 <= rank < ranks:
        raise CannotRun(f"RANK is {rank} of WORLD_SIZE {ranks}; expected 0 to {ranks - 1}.")
    return Seat(
        rank,
        ranks,
        local_rank,
        told["MASTER_ADDR"],
        port,
        hosted=told.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        round=told.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def meeting_place(seat: Seat, *, hosts: bool, seconds: float) -> Any:
    """The store where the ranks meet: (the TCPStore itself, and ours in it).

    Args:
        seat: of this rank.
        hosts: whether this process may have to keep the store; a rank's worker never does.
        seconds: how long to wait for the others.
    """
    dist: Any = importlib.import_module("torch.distributed")
    keeps = hosts and seat.rank == 0 and not seat.hosted
    try:
        store = dist.TCPStore(
            seat.address,
            seat.port,
            is_master=keeps,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError.
        raise CannotRun(
            f"the ranks' meeting place, MASTER_ADDR and MASTER_PORT, cannot be "
            f"{'opened' if keeps else 'reached'}: {error}"
        ) from error
    return store, part_of(store, f"gradilocks selftest {seat.round}")


def part_of(store: Any, name: str) -> Any:
    """A store in a store, whose keys are its own."""
    dist: Any = importlib.import_module("torch.distributed")
    return dist.PrefixStore(name, store)
