"""One way to time: contenders alternate in one process, medians and spread, ratios inside the run.

A contender is set up before each timed call, outside the clock. On a GPU the device is synchronised
before the clock starts and before it stops.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Contender:
    """Something to be timed: `run` is on the clock, `prepare` is not."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass
class Row:
    """One contender's result on one workload; times in milliseconds."""

    workload: str
    contender: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    rounds: int
    faster: float = field(default=1.0)
    """Median of the baseline over this median: above 1 is faster than the baseline."""


def alternate(
    workload: str, contenders: Sequence[Contender], *, rounds: int, warm_up: int = 3
) -> list[Row]:
    """Times every contender once a round; the first one is the baseline of the ratios."""
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    for number in range(warm_up + rounds):
        # Another one begins each round, so that nobody always follows the same neighbour.
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            contender.prepare()
            _synchronize()
            start = time.perf_counter()
            contender.run()
            _synchronize()
            if number >= warm_up:
                times[contender.name].append((time.perf_counter() - start) * 1e3)
    baseline = statistics.median(times[contenders[0].name])
    rows = []
    for name, taken in times.items():
        median = statistics.median(taken)
        tenths = statistics.quantiles(taken, n=10)
        rows.append(
            Row(workload, name, median, tenths[0], tenths[-1], rounds, faster=baseline / median)
        )
    return rows


def environment() -> dict[str, object]:
    """What the numbers depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| workload | contender | median ms | 10 % to 90 % | faster than the first |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.workload} | {r.contender} | {r.median_ms:.2f} | {r.p10_ms:.2f} to {r.p90_ms:.2f} "
        f"| {r.faster:.2f}× |"
        for r in rows
    ]
    return "\n".join(lines)


def save(
    path: Path, rows: Sequence[Row], *, note: str = "", extra: dict[str, object] | None = None
) -> None:
    """Writes results with hardware, versions and the command that made them."""
    # The command as it is typed in the repository, whatever the folder it was run from.
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    content = {
        "command": command,
        "environment": environment(),
        "note": note,
        "rows": [asdict(row) for row in rows],
        **(extra or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
