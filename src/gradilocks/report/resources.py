"""A run and its Tracks → what it took: time, memory, and what the script logged, along its steps.

A run has one clock and one memory, whatever optimizers it has. Its numbers stand along the steps of
the optimizer that stepped most often.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradilocks.report.formatting import duration, number, percent, size
from gradilocks.report.series import Places
from gradilocks.report.tracks import Track, nanmedian
from gradilocks.runfile import Run

NAN = math.nan


@dataclass(frozen=True)
class Measured:
    """Values at some steps."""

    places: Places
    values: Sequence[float]


@dataclass(frozen=True)
class Resources:
    """What a run took, along the steps of one of its optimizers."""

    track: Track
    """Of the optimizer that stepped most often; the first of several."""
    waited: Sequence[float]
    """For each of its steps: seconds since the one before it that lay between the end of some step
    and the next forward; NaN if that is not known."""
    memory: Measured
    """Bytes that the process had held at most, so far."""
    gpu_memory: Measured
    """Bytes that tensors had taken at most on its GPU, so far."""
    logged: Mapping[str, Measured]
    """What the script has logged itself, by name."""
    per_step: Mapping[str, float]
    """What a step works on, as in 'tokens', and how many of them: told by whoever started it."""
    rank: int | None
    """Whose process it was, of several ranks; None if there was one."""

    @property
    def share_waited(self) -> float:
        """Of the time of the run between its first and its last step; NaN if not known."""
        known = [
            (part, whole)
            for part, whole in zip(self.waited, self.track.seconds, strict=True)
            if not math.isnan(part + whole)
        ]
        whole = sum(each for _, each in known)
        return min(1.0, sum(part for part, _ in known) / whole) if whole else NAN

    def rate(self, name: str) -> Sequence[float]:
        """How many of `name` a second, at each step."""
        many = self.per_step[name]
        return [many / seconds if seconds > 0 else NAN for seconds in self.track.seconds]

    def numbers(self) -> list[tuple[str, str]]:
        """The few of them by which runs are compared; those that are not known are left out."""
        pairs = []
        usual = nanmedian(self.track.seconds)
        if not math.isnan(usual):
            pairs.append(("step time", _seconds(usual)))
            pairs += [(f"{name}/s", number(nanmedian(self.rate(name)))) for name in self.per_step]
        if not math.isnan(self.share_waited):
            pairs.append(("between steps", percent(self.share_waited)))
        for name, measured in (("peak memory", self.memory), ("peak GPU memory", self.gpu_memory)):
            if measured.values:
                whose = "" if self.rank is None else f" (rank {self.rank})"
                pairs.append((name, size(max(measured.values)) + whose))
        return pairs


def resources(run: Run, tracks: Sequence[Track]) -> Resources | None:
    """What a run took; None if it has no steps."""
    if not tracks:
        return None
    track = max(tracks, key=lambda each: len(each.steps))
    waited = array("d")
    gathered = NAN
    found: dict[str, list[tuple[float, float]]] = {"memory": [], "gpu_memory": []}
    for step in run.steps:
        if step.waited is not None:
            gathered = step.waited + (0.0 if math.isnan(gathered) else gathered)
        for name, points in found.items():
            value = getattr(step, name)
            if value is not None:
                points.append((step.time, float(value)))
        if step.optimizer == track.optimizer.index:
            waited.append(gathered)
            gathered = NAN
    memory, gpu_memory = (_by_time(track, points) for points in found.values())
    return Resources(
        track=track,
        waited=waited,
        memory=memory,
        gpu_memory=gpu_memory,
        logged=_logged(track, run.logs),
        per_step=_per_step(run),
        rank=run.header.rank if run.header.ranks > 1 else None,
    )


def _by_time(track: Track, points: Sequence[tuple[float, float]]) -> Measured:
    """Values that were found at some time, at the step that was going on."""
    last = len(track.time) - 1
    at = [track.at[min(last, bisect_left(track.time, time))] for time, _ in points]
    return Measured(Places(at, [time for time, _ in points]), [value for _, value in points])


def _logged(track: Track, logs: Iterable[Any]) -> dict[str, Measured]:
    """What was logged, by name; where step numbers go back, at the step that was going on.

    They may go back only here: one model is trained after another. Then the line begins anew.
    """
    found: dict[str, list[tuple[int, float, float]]] = {}
    for each in logs:
        for name, value in each.values.items():
            known = value is not None and math.isfinite(value)
            points = found.setdefault(name, [])
            if points and each.step < points[-1][0] and not track.renumbered:
                points.append((each.step, each.time, NAN))
            points.append((each.step, each.time, value if known else NAN))
    made = {}
    for name, points in found.items():
        made[name] = _by_time(track, [(time, value) for _, time, value in points])
        if not track.renumbered:
            steps = [step for step, _, _ in points]
            made[name] = replace(made[name], places=made[name].places._replace(at=steps))
    return made


def _per_step(run: Run) -> dict[str, float]:
    """What the header tells of it, as far as it is what it should be."""
    told = run.header.settings.get("per_step")
    if not isinstance(told, Mapping):
        return {}
    return {
        str(name): float(many)
        for name, many in told.items()
        if isinstance(many, (int, float)) and not isinstance(many, bool) and many > 0
    }


def _seconds(value: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return duration(value) if value >= 60 else f"{number(value / unit)} {name}"
    return f"{number(value / 1e-6)} µs"
