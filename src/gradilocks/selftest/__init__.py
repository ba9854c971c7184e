"""The selftest: does Gradilocks do on this machine, over these ranks, what it promises?

A number of ranks and a kind of device enter, a CheckResult a check leaves, and nothing here prints:
the command line does. Its files read in order: ``seat`` (which rank this process is) and
``ensemble`` (all ranks go through the checks together, and none waits for ever) -> ``rank_worker``
(the process that runs a rank's checks, so that one that hangs or dies takes nothing else with it)
-> ``check_list`` (what is checked, and what fits so many ranks) -> ``kernel_checks``,
``optimizer_checks``, ``layout_checks`` with ``training_twin`` (the checks) -> ``check_result``
(what all ranks found, in words). Torch is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Loaded on first use: `gradilocks --help` must not wait for torch.
_HOME = {
    "CannotRun": "seat",
    "CheckResult": "check_result",
    "CollectiveCounter": "collective_counter",
    "Ensemble": "ensemble",
    "Seat": "seat",
    "as_json": "check_result",
    "find_seat": "seat",
    "verdict_of": "check_result",
}

__all__ = [
    "CannotRun",
    "CheckResult",
    "CollectiveCounter",
    "Ensemble",
    "Seat",
    "as_json",
    "find_seat",
    "verdict_of",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradilocks.selftest' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gradilocks.selftest.{_HOME[name]}"), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from gradilocks.selftest.check_result import CheckResult, as_json, verdict_of
    from gradilocks.selftest.collective_counter import CollectiveCounter
    from gradilocks.selftest.ensemble import Ensemble
    from gradilocks.selftest.seat import CannotRun, Seat, find_seat
