"""Runs made up step by step, so that a fault is one line: `made_run(plant={70: {"norm": 9.0}})`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradilocks.runfile import (
    Detail,
    End,
    Header,
    OptimizerInfo,
    Run,
    Step,
    end_line,
    header_line,
    optimizer_line,
    step_line,
    trace_line,
)

NAMES = tuple(f"blocks.{i}.{part}.weight" for i in range(5) for part in ("attention", "mlp"))
FINISHED = End(60.0, "finished", 0, None)
SKIPPED = {"skipped": True, "reason": "nonfinite", "norm": None, "inf": 3}


def header(**changes: Any) -> Header:
    fields: dict[str, Any] = {
        "version": 1,
        "started": 1_790_000_000.0,
        "command": ("train.py", "--lr", "1e-3"),
        "versions": {"python": "3.11", "torch": "2.13", "gradilocks": "0.1"},
        "hardware": {"cpu": "a processor", "cores": 2, "memory": 2**33, "gpus": []},
        "settings": {"scale": "DynamicScale(min_scale=1.0, max_scale=4294967296.0)"},
        "rank": 0,
        "ranks": 1,
    }
    return Header(**{**fields, **changes})


def detail(names: Sequence[str], draw: random.Random, **changes: Mapping[str, Any]) -> Detail:
    """Healthy numbers; `norm={"a": 0.0}` changes the field of one tensor."""
    fields: dict[str, list[Any]] = {
        "norm": [draw.uniform(0.1, 0.3) for _ in names],
        "largest": [0.01 for _ in names],
        "zeros": [draw.uniform(0.0, 0.01) for _ in names],
        "nan": [0 for _ in names],
        "inf": [0 for _ in names],
        "weight": [10.0 for _ in names],
        "update": [draw.uniform(5e-4, 2e-3) for _ in names],
    }
    for field, values in changes.items():
        for name, value in values.items():
            fields[field][list(names).index(name)] = value
    return Detail(**fields)


def made_steps(
    count: int = 300,
    *,
    plant: Mapping[int, Mapping[str, Any]] | None = None,
    always: Callable[[int], Mapping[str, Any]] | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    names: Sequence[str] = NAMES,
    detail_every: int = 10,
    optimizer: int = 0,
) -> list[Step]:
    """Steps of a run that is well, but for what is planted.

    Args:
        count: how many.
        plant: fields to change, by step number.
        always: fields to change, worked out from the step number.
        details: as for `detail`, at every step that has one.
        names: of the tensors.
        detail_every: how often there is detail.
        optimizer: whose steps they are.
    """
    draw = random.Random(7)
    steps = []
    for number in range(1, count + 1):
        norm = draw.uniform(0.4, 0.8)
        fields: dict[str, Any] = {
            "step": number,
            "time": number * 0.1,
            "optimizer": optimizer,
            "loss": 1.0 + 3.0 * 0.99**number + draw.gauss(0, 0.02),
            "scale": 65536.0,
            "norm": norm,
            "limit": 0.75,
            "clipped": norm > 0.75,
            "skipped": False,
            "reason": None,
            "culprits": (),
            "lr": 1e-3,
            "nan": 0,
            "inf": 0,
            "detail": detail(names, draw, **(details or {}))
            if detail_every and number % detail_every == 0
            else None,
        }
        fields.update((always(number) if always else {}), **(plant or {}).get(number, {}))
        steps.append(Step(**fields))
    return steps


def info(index: int = 0, kind: str = "AdamW", names: Sequence[str] = NAMES) -> OptimizerInfo:
    return OptimizerInfo(index, kind, tuple(names), (1000,) * len(names), ("float32",) * len(names))


def made_run(count: int = 300, *, names: Sequence[str] = NAMES, **planted: Any) -> Run:
    of_run = {
        key: planted.pop(key) for key in ("end", "traces", "torn", "resumed") if key in planted
    }
    head = planted.pop("header", None) or header()
    return Run(
        path=Path("made.jsonl"),
        header=head,
        optimizers=(info(names=names),),
        steps=made_steps(count, names=names, **planted),
        **{"end": FINISHED, **of_run},
    )


def write(run: Run, path: Path) -> Path:
    """Writes a run as the run file that it would have been read from."""
    lines = [header_line(run.header), *map(optimizer_line, run.optimizers)]
    lines += [*map(step_line, run.steps), *map(trace_line, run.traces)]
    if run.end is not None:
        lines.append(end_line(run.end))
    path.write_text("".join(lines), encoding="utf-8")
    return path
