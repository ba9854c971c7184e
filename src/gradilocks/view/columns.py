"""The steps of a run as numpy columns, and the main numbers of a run.

`DEFINITIONS` defines the main numbers and `summarize` computes them, for the terminal, the page, `watch` and `--json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradilocks.view.runfile import Record, Run
from gradilocks.view.text import duration, number, percent, scale_text

__all__ = ["DEFINITIONS", "Columns", "Summary", "columns", "duration_of", "facts", "summarize"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

DEFINITIONS = {
    "steps": "optimizer steps, skipped ones included",
    "loss": "first finite loss → last finite loss",
    "lowest loss": "smallest finite loss, and its step",
    "typical norm": "median of the finite gradient norms, before clipping",
    "skipped": "steps that left the parameters unchanged",
    "clipped": "share of the applied steps that were clipped",
    "scale": "loss scale at the first and at the last step",
    "learning rate": "at the first and at the last step, of the first param group",
    "steps/s": "(steps - 1) / (time of the last - time of the first), of the last session",
    "duration": "from the header to the end of the file, of the last session",
}


@dataclass(frozen=True)
class Columns:
    """The steps of one optimizer, by step number; a missing value is NaN."""

    optimizer: int
    label: str
    """The class of the optimizer, after its index if the run has several."""
    info: Record
    """The optimizer record; empty if the file has none."""
    step: NDArray[np.int64]
    time: Floats
    loss: Floats
    has_loss: Bools
    """True where a loss was recorded, finite or not."""
    scale: Floats
    norm: Floats
    limit: Floats
    lr: Floats
    clipped: Bools
    """False for steps that were not applied."""
    skipped: Bools
    rejected: Bools
    nonfinite: Bools
    """True where the gradients contained NaN or Inf."""
    leftover: Bools
    """True where backward added to gradients of the previous step."""
    rank: NDArray[np.int64]
    """The rank whose gradients were non-finite, if it is not rank 0; else -1."""
    detail: NDArray[np.int64]
    """Row indices of the steps with per-tensor numbers."""
    norms: Floats
    """Gradient norms: one row per detailed step, one column per tensor; NaN without a gradient."""
    zeros: Floats
    """Share of zero elements, in the same rows and columns."""
    updates: Floats
    """Norm of the change divided by the norm of the weights, in the same rows and columns."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        names = self.info.get("names")
        names = [str(name) for name in names] if isinstance(names, list) else []
        return [*names, *(f"tensor {i}" for i in range(len(names), self.norms.shape[1]))][: self.norms.shape[1]]

    @property
    def finite_loss(self) -> NDArray[np.int64]:
        """Row indices of the steps with a finite loss."""
        return np.flatnonzero(np.isfinite(self.loss))

    @property
    def has_nonfinite_loss(self) -> Bools:
        """True where the loss was NaN or Inf."""
        return self.has_loss & ~np.isfinite(self.loss)

    @property
    def applied(self) -> Bools:
        """True where the step was not skipped."""
        return ~self.skipped


def columns(run: Run) -> list[Columns]:
    """The steps of each optimizer that stepped, in the order of the optimizers' indices."""
    stepped = [optimizer for optimizer in sorted(run.steps) if run.steps[optimizer]]
    return [_columns(run, optimizer, is_one_of_several=len(stepped) > 1) for optimizer in stepped]


def _columns(run: Run, optimizer: int, *, is_one_of_several: bool) -> Columns:
    by_step = run.steps[optimizer]
    numbers = sorted(by_step)
    steps = [by_step[number] for number in numbers]
    info = run.optimizers.get(optimizer, {})
    kind = str(info.get("class") or "optimizer")
    skipped = _flags(steps, "skipped") | _flags(steps, "rejected")
    detail = [row for row, step in enumerate(steps) if any(name in step for name in ("norms", "zeros", "updates"))]
    detailed = [steps[row] for row in detail]
    width = max(
        (len(step[name]) for step in detailed for name in ("norms", "zeros", "updates") if name in step), default=0
    )
    norms, zeros = _table(detailed, "norms", width), _table(detailed, "zeros", width)
    # Norm 0 with a zero share of 0 means that there is no gradient; a gradient of zeros has a share of 1.
    is_missing = (norms == 0) & (zeros == 0)
    return Columns(
        optimizer=optimizer,
        label=f"optimizer {optimizer} ({kind})" if is_one_of_several else kind,
        info=info,
        step=np.array(numbers, dtype=np.int64),
        time=_floats(steps, "time"),
        loss=_floats(steps, "loss"),
        has_loss=np.array(["loss" in step and step["loss"] is not None for step in steps], dtype=bool),
        scale=_floats(steps, "scale"),
        norm=_floats(steps, "norm"),
        limit=_floats(steps, "limit"),
        lr=_floats(steps, "lr"),
        clipped=_flags(steps, "clipped") & ~skipped,
        skipped=skipped,
        rejected=_flags(steps, "rejected"),
        nonfinite=(np.nan_to_num(_floats(steps, "nan")) + np.nan_to_num(_floats(steps, "inf"))) > 0,
        leftover=_flags(steps, "leftover"),
        rank=np.nan_to_num(_floats(steps, "rank"), nan=-1, posinf=-1, neginf=-1).astype(np.int64),
        detail=np.array(detail, dtype=np.int64),
        norms=np.where(is_missing, np.nan, norms),
        zeros=np.where(is_missing, np.nan, zeros),
        updates=_table(detailed, "updates", width),
    )


def to_float(value: object) -> float:
    """A number from a run file, including the strings "nan", "inf" and "-inf"; NaN for anything else."""
    try:
        return math.nan if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _floats(steps: Sequence[Record], name: str) -> Floats:
    return np.array([to_float(step.get(name)) for step in steps], dtype=np.float64)


def _flags(steps: Sequence[Record], name: str) -> Bools:
    return np.array([step.get(name) is True for step in steps], dtype=bool)


def _table(steps: Sequence[Record], name: str, width: int) -> Floats:
    """Rows of per-tensor numbers; rows that are missing or too short are filled with NaN."""
    table = np.full((len(steps), width), np.nan)
    for row, step in enumerate(steps):
        values = step.get(name, ())
        table[row, : len(values)] = values
    return table


# --- main numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The main numbers of one optimizer's steps; NaN or None where a number does not exist."""

    optimizer: str
    steps: int
    last_step: int
    first_loss: float
    final_loss: float
    last_loss_is_finite: bool
    """False if the loss of the very last step was NaN or Inf."""
    lowest_loss: float
    lowest_step: int | None
    typical_norm: float
    skipped: int
    rejected: int
    """Number of skipped steps that a clip policy rejected."""
    applied_nonfinite: int
    """Number of steps that were applied with NaN or Inf in the gradients."""
    clipped_share: float
    """NaN if no step had a limit or was clipped."""
    first_scale: float
    last_scale: float
    first_lr: float
    last_lr: float
    steps_per_second: float

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; numbers that are not finite as strings, as in run files."""
        return {name: json_number(value) for name, value in vars(self).items()}


def json_number(value: Any) -> Any:
    """A value for JSON: NaN and Inf become strings, as in run files; numpy numbers become Python numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def summarize(run: Run, steps: Columns) -> Summary:
    """The main numbers of one optimizer."""
    finite = steps.finite_loss
    losses = steps.loss[finite]
    lowest = int(finite[np.argmin(losses)]) if len(finite) else None
    has_limit = bool((~np.isnan(steps.limit) | steps.clipped).any())
    with_loss = np.flatnonzero(steps.has_loss)
    return Summary(
        optimizer=steps.label,
        steps=len(steps),
        last_step=int(steps.step[-1]),
        first_loss=float(losses[0]) if len(finite) else math.nan,
        final_loss=float(losses[-1]) if len(finite) else math.nan,
        last_loss_is_finite=not len(with_loss) or bool(np.isfinite(steps.loss[with_loss[-1]])),
        lowest_loss=math.nan if lowest is None else float(steps.loss[lowest]),
        lowest_step=None if lowest is None else int(steps.step[lowest]),
        typical_norm=median(steps.norm),
        skipped=int(steps.skipped.sum()),
        rejected=int(steps.rejected.sum()),
        applied_nonfinite=int((steps.nonfinite & steps.applied).sum()),
        clipped_share=float(steps.clipped[steps.applied].mean()) if has_limit and steps.applied.any() else math.nan,
        first_scale=_end_of(steps.scale, 0),
        last_scale=_end_of(steps.scale, -1),
        first_lr=_end_of(steps.lr, 0),
        last_lr=_end_of(steps.lr, -1),
        steps_per_second=_speed(run, steps),
    )


def facts(run: Run, summary: Summary) -> dict[str, str]:
    """The main numbers as text, by the names of `DEFINITIONS`; numbers that do not exist are left out."""
    shown = {"steps": f"{summary.steps:,}"}
    if not math.isnan(summary.first_loss):
        ending = "" if summary.last_loss_is_finite else ", then NaN or Inf"
        shown["loss"] = f"{number(summary.first_loss)} → {number(summary.final_loss)}{ending}"
        shown["lowest loss"] = f"{number(summary.lowest_loss)} in step {summary.lowest_step:,}"
    elif not summary.last_loss_is_finite:
        shown["loss"] = "NaN or Inf in every step"
    if not math.isnan(summary.typical_norm):
        shown["typical norm"] = number(summary.typical_norm)
    shown["skipped"] = f"{summary.skipped:,} ({percent(summary.skipped / summary.steps)})" if summary.skipped else "0"
    if summary.skipped < summary.steps:
        shown["clipped"] = "no limit" if math.isnan(summary.clipped_share) else percent(summary.clipped_share)
    has_scale = not math.isnan(summary.first_scale) and (summary.first_scale, summary.last_scale) != (1.0, 1.0)
    shown["scale"] = _change(summary.first_scale, summary.last_scale, scale_text) if has_scale else "no scaling"
    if not math.isnan(summary.first_lr):
        shown["learning rate"] = _change(summary.first_lr, summary.last_lr, number)
    if not math.isnan(summary.steps_per_second):
        shown["steps/s"] = number(summary.steps_per_second)
    if not math.isnan(duration_of(run)):
        shown["duration"] = duration(duration_of(run))
    return shown


def _change(first: float, last: float, text_of: Callable[[float], str]) -> str:
    return text_of(first) if first == last else f"{text_of(first)} → {text_of(last)}"


def duration_of(run: Run) -> float:
    """Seconds from the last header to the end record, or to the last record of a run that is not closed."""
    begin, end = to_float(run.header.get("time")), to_float((run.end or {}).get("time", run.last_time))
    return max(0.0, end - begin) if math.isfinite(begin) and math.isfinite(end) else math.nan


def median(values: Floats) -> float:
    """Median of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _end_of(values: Floats, end: int) -> float:
    values = values[~np.isnan(values)]
    return float(values[end]) if len(values) else math.nan


def _speed(run: Run, steps: Columns) -> float:
    times = steps.time[np.isfinite(steps.time)]
    begin = to_float(run.header.get("time"))
    times = times[times >= begin] if math.isfinite(begin) else times
    if len(times) < 2 or times[-1] <= times[0]:
        return math.nan
    return float((len(times) - 1) / (times[-1] - times[0]))
