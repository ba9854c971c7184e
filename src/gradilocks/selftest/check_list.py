"""A number of ranks and a kind of device enter; what is checked, and what does not fit, leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradilocks.selftest.check_result import Found
from gradilocks.selftest.kernel_checks import KERNEL_CHECKS
from gradilocks.selftest.layout_checks import LAYOUT_CHECKS, Needs
from gradilocks.selftest.optimizer_checks import OPTIMIZER_CHECKS
from gradilocks.selftest.world import World

__all__ = ["Check", "checks_for"]

_COMPILING = 5.0


@dataclass(frozen=True)
class Check:
    """Something that is run on every rank."""

    name: str
    group: str
    run: Callable[[World], Found]
    unfit: str = ""
    """Why it is not tried; empty if it is."""
    patience: float = 1.0
    """How many times the usual limit it may take: a kernel may have to be compiled first."""


def checks_for(ranks: int, device: str) -> tuple[Check, ...]:
    """All checks in the order in which they are run; those that do not fit say why."""
    made = [
        Check(name, "kernels", run, unfit=unfit(device), patience=_COMPILING)
        for name, (run, unfit) in KERNEL_CHECKS.items()
    ]
    made += [
        Check(name, "one process", run, patience=_COMPILING)
        for name, run in OPTIMIZER_CHECKS.items()
    ]
    made += [
        Check(name, "ranks", run, unfit=_unfit(needs, ranks, device))
        for name, (needs, run) in LAYOUT_CHECKS.items()
    ]
    return tuple(made)


def _unfit(needs: Needs, ranks: int, device: str) -> str:
    if needs.cuda and device != "cuda":
        return "needs GPUs"
    if ranks < needs.ranks:
        return f"needs {needs.ranks} ranks or more"
    if needs.even and ranks % 2:
        return "needs an even number of ranks"
    return ""
