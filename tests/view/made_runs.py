"""Run files written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gradilocks.view import runfile

Fields = dict[str, Any]

SKIPPED: Fields = {"skipped": True, "norm": "inf", "inf": 3, "clipped": False}
NAN_LOSS: Fields = {"loss": "nan", "norm": "nan", "nan": 5}


def header(**fields: Any) -> Fields:
    base = {"kind": "header", "format": 3, "version": "0.3.0", "source": "run", "label": "train.py", "rank": 0}
    return {**base, "world_size": 1, "time": 1000.0, **fields}


def optimizer(
    number: int = 0, kind: str = "AdamW", names: Iterable[str] = ("a.weight", "b.weight"), **fields: Any
) -> Fields:
    return {"kind": "optimizer", "optimizer": number, "class": kind, "names": list(names), **fields}


def steps(
    count: int = 300,
    *,
    number: int = 0,
    always: Callable[[int], Fields] = lambda step: {},
    plant: Mapping[int, Fields] | None = None,
    first: int = 1,
) -> list[Fields]:
    """Steps of a training whose loss falls from 4 to 1, with changes to all or to some of them."""
    made = []
    for step in range(first, first + count):
        share = (step - 1) / max(1, count - 1)
        made.append(
            {
                "kind": "step",
                "step": step,
                "optimizer": number,
                "time": 1000.0 + 0.1 * step,
                "loss": 4.0 - 3.0 * share + 0.01 * (step % 3),
                "norm": 0.5 + 0.05 * (step % 4),
                "lr": 0.001,
                "skipped": False,
                "nan": 0,
                "inf": 0,
                **always(step),
                **(plant or {}).get(step, {}),
            }
        )
    return made


def end(**fields: Any) -> Fields:
    return {"kind": "end", "time": 1100.0, "status": "finished", "exit_code": 0, **fields}


def culprit(step: int, text: str = "first NaN: output of log in head (forward)", **fields: Any) -> Fields:
    return {"kind": "culprit", "step": step, "optimizer": 0, "rank": 0, "known": True, "text": text, **fields}


def write(path: Path, records: Iterable[Fields]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run_of(*records: Fields, **header_fields: Any) -> runfile.Run:
    """A closed run of these records."""
    run = runfile.Run(Path("run.jsonl"))
    lines = [header(**header_fields), optimizer(), *records, end()]
    run.add(json.loads(json.dumps(lines)))
    return run


def made_run(count: int = 300, **options: Any) -> runfile.Run:
    """A closed run of one optimizer."""
    return run_of(*steps(count, **options))
