"""Run files for the tests: records with no field at its default, and files made of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from gradilocks.runfile import (
    Culprit,
    Detail,
    End,
    Header,
    OptimizerInfo,
    Step,
    Trace,
    end_line,
    header_line,
    optimizer_line,
    step_line,
    trace_line,
)

HEADER = Header(
    version=1,
    started=1_700_000_000.25,
    command=("train.py", "--lr", "3e-4"),
    versions={"python": "3.11.2", "torch": "2.13.0", "gradilocks": "0.1.0", "cuda": "12.8"},
    hardware={"machine": "box", "cpu": "Xeon", "cores": 2, "memory": 2**34, "gpus": ["H200"]},
    settings={"scale": "DynamicScale()", "clip": "ClipByNorm(1.0)", "detail_every": 10},
    rank=1,
    ranks=2,
)
LATER = Header(1, 1_700_000_900.0, ("train.py", "--resume"), {}, {}, {}, 0, 1)
NAMES = ("embed.weight", "head.bias")
FIRST = OptimizerInfo(0, "AdamW", NAMES, (4096, 64), ("float16", "float32"))
SECOND = OptimizerInfo(1, "SGD", ("scale",), (1,), ("float32",))
DETAIL = Detail([0.5, None], [0.25, 3.0], [0.125, 0.0], [0, 7], [0, 2], [12.5, 1.5], [1e-3, 0.5])
STEP = Step(
    step=7,
    time=1.5,
    optimizer=1,
    loss=2.25,
    scale=65536.0,
    norm=3.5,
    limit=1.0,
    clipped=True,
    skipped=True,
    reason="nonfinite",
    culprits=(Culprit("scale", 3, 4),),
    lr=3e-4,
    nan=3,
    inf=4,
    detail=Detail([3.5], [3.0], [0.5], [3], [4], [1.25], [0.0625]),
)
TRACE = Trace(
    step=8,
    time=1.625,
    phase="backward",
    module="blocks.1.norm",
    kind="LayerNorm",
    what="Inf",
    inputs=({"name": "input", "shape": [2, 3], "dtype": "float16", "largest": None, "nan": 1},),
    text="Inf left blocks.1.norm",
)
END = End(time=9.5, status="error", exit=3, error="ValueError: no")


def plain_step(number: int, **changes: object) -> Step:
    """A step that went well, with what is to be different."""
    step = Step(
        number, number * 0.5, 0, 4.0 / number, 1024.0, 0.5, 1.0, False, False, None, (), 1e-3, 0, 0,
        None,
    )  # fmt: skip
    return step._replace(**changes)  # type: ignore[arg-type]


def skipped_step(number: int, *names: str, **changes: object) -> Step:
    """A step that overflowed in these parameters."""
    culprits = tuple(Culprit(name, 0, 2) for name in names)
    return plain_step(
        number, norm=None, skipped=True, reason="nonfinite", culprits=culprits, inf=2 * len(names),
        **changes,
    )  # fmt: skip


def lines_of(
    steps: Iterable[Step] = (),
    *,
    header: Header | None = HEADER,
    optimizers: Iterable[OptimizerInfo] = (FIRST, SECOND),
    traces: Iterable[Trace] = (),
    end: End | None = None,
) -> str:
    """The text of a run file."""
    lines = [] if header is None else [header_line(header)]
    lines += map(optimizer_line, optimizers)
    lines += map(step_line, steps)
    lines += map(trace_line, traces)
    lines += [] if end is None else [end_line(end)]
    return "".join(lines)


def write_run(path: Path, steps: Iterable[Step] = (), **more: object) -> Path:
    """A run file on disk."""
    path.write_text(lines_of(steps, **more))  # type: ignore[arg-type]
    return path


def training(count: int, *, seed: int = 0, detail_every: int = 10) -> list[Step]:
    """A run that learns, clips now and then, and overflows at every hundredth step."""
    draw = random.Random(seed)
    scale, steps = 65536.0, []
    for number in range(1, count + 1):
        norm = 0.5 + draw.random()
        step = plain_step(
            number, time=number / 64, loss=5.0 / number**0.3 + 0.1 * draw.random(), scale=scale,
            norm=norm, clipped=norm > 1.0,
        )  # fmt: skip
        if number % 100 == 0:
            step = skipped_step(number, *NAMES, time=number / 64, scale=scale, loss=step.loss)
            scale /= 2
        elif detail_every and number % detail_every == 0:
            step = step._replace(detail=DETAIL)
        steps.append(step)
    return steps
