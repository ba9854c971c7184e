"""Records → lines of a run file. Every line is one JSON object that ends in a newline.

Numbers that are not finite become ``null``. Per-tensor numbers keep six significant digits, which
is what a plot or a comparison can use; those of a step are written in full.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gradilocks.runfile.records import VERSION, Detail, End, Header, OptimizerInfo, Step, Trace

__all__ = [
    "MOST_CULPRITS",
    "audit_line",
    "end_line",
    "header_line",
    "optimizer_line",
    "step_line",
    "trace_line",
]

MOST_CULPRITS = 32


def header_line(header: Header) -> str:
    """The first line of a file, and of every session that goes on in it."""
    return _line(
        {
            "kind": "header",
            "gradilocks": VERSION,
            "started": header.started,
            "command": list(header.command),
            "versions": dict(header.versions),
            "hardware": dict(header.hardware),
            "settings": dict(header.settings),
            "rank": header.rank,
            "ranks": header.ranks,
        }
    )


def optimizer_line(optimizer: OptimizerInfo) -> str:
    """An optimizer, before its first step."""
    return _line(
        {
            "kind": "optimizer",
            "optimizer": optimizer.index,
            "class": optimizer.kind,
            "names": list(optimizer.names),
            "sizes": list(optimizer.sizes),
            "dtypes": list(optimizer.dtypes),
        }
    )


def step_line(step: Step) -> str:
    """One step."""
    fields: dict[str, Any] = {
        "kind": "step",
        "step": step.step,
        "time": round(step.time, 6),
        "optimizer": step.optimizer,
        "loss": _finite(step.loss),
        "scale": _finite(step.scale),
        "norm": _finite(step.norm),
        "limit": _finite(step.limit),
        "clipped": step.clipped,
        "skipped": step.skipped,
        "reason": step.reason,
        "culprits": [culprit._asdict() for culprit in step.culprits[:MOST_CULPRITS]],
        "lr": _finite(step.lr),
        "nan": step.nan,
        "inf": step.inf,
    }
    if fields["loss"] is None and step.loss_nonfinite is not None:
        fields["loss_nonfinite"] = step.loss_nonfinite
    for name in ("finite_gradients", "finite_after"):
        if step.culprits and getattr(step, name) is not None:
            fields[name] = getattr(step, name)
    if step.detail is not None:
        fields["detail"] = _detail(step.detail)
    return _line(fields)


def trace_line(trace: Trace) -> str:
    """Where a value first turned non-finite."""
    fields: dict[str, Any] = {
        "kind": "trace",
        "step": trace.step,
        "time": round(trace.time, 6),
        "phase": trace.phase,
        "module": trace.module,
        "class": trace.kind,
        "what": trace.what,
        "inputs": [dict(entered) for entered in trace.inputs],
        "text": trace.text,
    }
    if trace.damaged is not None:
        fields["damaged"] = list(trace.damaged)
    if trace.where != "module":
        fields["where"] = trace.where
    return _line(fields)


def audit_line(audit: Mapping[str, Any]) -> str:
    """What an audit found; its numbers are finite or null already."""
    return _line({**audit, "kind": "audit"})


def end_line(end: End) -> str:
    """The last line of a run that ended by itself."""
    return _line(
        {
            "kind": "end",
            "time": round(end.time, 6),
            "status": end.status,
            "exit": end.exit,
            "error": end.error,
        }
    )


def _detail(detail: Detail) -> dict[str, list[float | None]]:
    return {name: _short(values) for name, values in detail._asdict().items()}


def _short(values: Iterable[float | None]) -> list[float | None]:
    return [v if v is None or isinstance(v, int) else _six(v) for v in values]


def _six(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _line(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"
