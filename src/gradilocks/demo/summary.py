"""Results and Verdicts enter, the whole experiment leaves as plain data: ``summary.json``."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

import gradilocks
from gradilocks.demo.arms import MADE_BY, Arm, Setup, computed
from gradilocks.demo.values import Result
from gradilocks.demo.verdicts import Verdict

__all__ = ["VERSION", "summarize"]

VERSION = 1


def summarize(
    *,
    arms: Sequence[Arm],
    setup: Setup,
    seeds: Sequence[int],
    results: Sequence[Result],
    verdicts: Sequence[Verdict],
    command: Sequence[str],
    started: float,
    seconds: float,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Returns what ``json.dumps(..., allow_nan=False)`` takes; docs/demo.md says what is in it."""
    order = [arm.name for arm in arms]
    ran = sorted(results, key=lambda result: (order.index(result.arm), result.seed))
    return {
        "made_by": MADE_BY,
        "version": VERSION,
        "command": list(command),
        "started": started,
        "seconds": round(seconds, 1),
        "versions": {
            "gradilocks": gradilocks.__version__,
            "python": platform.python_version(),
            **versions,
        },
        "setup": {
            **asdict(setup),
            "text": "pydoc_data.topics",
            "micro_batch": setup.micro_batch,
            "global_batch": setup.global_batch,
            "computed": computed(setup),
        },
        "seeds": list(seeds),
        "arms": [{**asdict(arm), "final_loss": _spread(arm, ran)} for arm in arms],
        "runs": [result.to_plain() for result in ran],
        "verdicts": [verdict.to_plain() for verdict in verdicts],
    }


def _spread(arm: Arm, results: Sequence[Result]) -> dict[str, float | int | None]:
    """Mean and standard deviation over the seeds; None where a loss was not finite."""
    finals = [result.final_loss for result in results if result.arm == arm.name]
    whole = bool(finals) and all(map(math.isfinite, finals))
    return {
        "mean": fmean(finals) if whole else None,
        "deviation": stdev(finals) if whole and len(finals) > 1 else None,
        "seeds": len(finals),
        "finite": sum(map(math.isfinite, finals)),
    }
