"""Timing of contenders that alternate in one process, comparison of their results, and the tables.

Times are medians over rounds. wall: from an idle device until the device is idle again. host: until the call returns;
on a CPU, processor time of all threads. A ratio is the baseline's median divided by the contender's: above 1 is faster
than torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from versions import ROOT, VERSIONS, Version
from workloads import local

WARM_UP = 3
_BEGIN = time.monotonic()

Times = dict[str, list[float]]
"""Milliseconds of each round, by measure: wall, host."""


@dataclass(frozen=True)
class Ready:
    """A contender with its own parameters."""

    run: Callable[[], object]
    """The timed call."""
    params: Sequence[Tensor]
    """Parameters that it updates."""
    prepare: Mapping[str, Callable[[], object]]
    """By mode, such as "new gradients": called before each timed call."""
    steps: int = 1
    """Number of steps in one timed call. Times are per step."""


@dataclass(frozen=True)
class Contender:
    """A way to do the work."""

    name: str
    build: Callable[[Any], Ready]
    """Takes the gradilocks package; None for torch."""
    version: Version | None = None
    baseline: str = "torch"
    """Name of the contender that ratios refer to."""


@dataclass
class Row:
    """The result of one contender in one mode of one workload."""

    workload: str
    mode: str
    contender: str
    ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """By measure: median, p10, p90, rounds."""
    faster: dict[str, float] = field(default_factory=dict)
    """By measure: median of the baseline / median."""
    of_floor: float | None = None
    """Wall time / time of the necessary bytes at copy bandwidth."""
    error: str = ""
    note: str = ""
    """Other numbers, such as bytes."""


def compete(
    workload: str,
    contenders: Sequence[Contender],
    *,
    device: torch.device,
    rounds: int,
    modes: Sequence[str],
    start: Callable[[], Iterable[Tensor]],
    tolerance: float,
    compare_after: bool = True,
    floor_ms: float | None = None,
    at_most: int = 100,
) -> list[Row]:
    """Builds contenders, compares their parameters after three steps, and times them.

    Args:
        workload: name in the rows.
        contenders: torch first.
        device: on which they run.
        rounds: number of timed calls in each mode.
        modes: keys of `Ready.prepare`.
        start: returns the parameters before the first step.
        tolerance: largest distance of a contender's parameters from torch's, relative to the change of torch's.
        compare_after: also compare parameters after the timed steps.
        floor_ms: time of the necessary bytes.
        at_most: number of contenders that fit into memory. Each further batch contains its baselines again.
    """
    rows: dict[tuple[str, str], Row] = {}
    contenders = [member for member in contenders if member.version is None or member.version in VERSIONS]
    for members in _batches(contenders, at_most):
        batch = _Batch(members, device)
        batch.compare(start, tolerance)
        times = {mode: batch.time(mode, rounds) for mode in modes}
        if compare_after:
            batch.compare(start, tolerance)
        for mode in modes:
            spreads = {name: {m: spread(ms) for m, ms in taken.items()} for name, taken in times[mode].items()}
            for member in members:
                row = Row(workload, mode, member.name, ms=spreads[member.name], error=batch.errors[member.name])
                for measure, torch_ms in spreads[member.baseline].items() if row.ms else ():
                    row.faster[measure] = torch_ms["median"] / row.ms[measure]["median"]
                if floor_ms is not None and row.ms:
                    row.of_floor = row.ms["wall"]["median"] / floor_ms
                rows.setdefault((mode, member.name), row)
        del batch
        free()
    print(f"[{time.monotonic() - _BEGIN:.0f} s] {workload}", flush=True)
    return [rows[mode, contender.name] for mode in modes for contender in contenders]


def _batches(contenders: Sequence[Contender], at_most: int) -> Iterator[list[Contender]]:
    """Splits contenders into batches that contain torch and the baselines of their members."""
    names: dict[str, None] = {}
    by_name = {contender.name: contender for contender in contenders}
    for contender in contenders:
        needed = dict.fromkeys([contenders[0].name, contender.baseline, contender.name])
        if names and len(names | needed) > at_most:
            yield [by_name[name] for name in names]
            names = {}
        names |= needed
    yield [by_name[name] for name in names]


class _Batch:
    """Contenders that are in memory together, after three steps each.

    Attributes:
        errors: by name; empty if the contender works. One that raises is left out from then on.
    """

    def __init__(self, contenders: Sequence[Contender], device: torch.device) -> None:
        self._contenders, self._device = contenders, device
        self.errors = {contender.name: "" for contender in contenders}
        self._ready: dict[str, Ready] = {}
        for contender in contenders:
            self._attempt(contender, self._build)

    def time(self, mode: str, rounds: int) -> dict[str, Times]:
        """Times by contender."""
        times: dict[str, Times] = {contender.name: {} for contender in self._contenders}
        for i in range(WARM_UP + rounds):
            # Each round begins with another contender, so that none always follows the same one.
            first = i % len(self._contenders)
            for contender in [*self._contenders[first:], *self._contenders[:first]]:
                if contender.name in self._ready:
                    target = times[contender.name] if i >= WARM_UP else {}
                    self._attempt(contender, partial(self._time, mode, target))
        return times

    def compare(self, start: Callable[[], Iterable[Tensor]], tolerance: float) -> None:
        """Compares the parameters with torch's after the same number of steps."""
        baseline = self._ready.get(self._contenders[0].name)
        if baseline is None:
            return
        change = distance(start(), baseline.params)
        for name, ready in self._ready.items():
            relative = distance(ready.params, baseline.params) / change
            if not relative <= tolerance and not self.errors[name]:  # NaN is an error, too.
                self.errors[name] = f"parameters differ from torch's by {relative:.2g} of the change"

    def _attempt(self, contender: Contender, action: Callable[[Contender, Any], None]) -> None:
        try:
            with nullcontext() if contender.version is None else contender.version.active() as package:
                action(contender, package)
        except Exception as error:
            traceback.print_exc()
            self.errors[contender.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self._ready.pop(contender.name, None)

    def _build(self, contender: Contender, package: Any) -> None:
        ready = contender.build(package)
        for _ in range(3):
            next(iter(ready.prepare.values()))()
            ready.run()
        synchronize(self._device)
        self._ready[contender.name] = ready

    def _time(self, mode: str, times: Times, contender: Contender, package: Any) -> None:
        ready = self._ready[contender.name]
        ready.prepare[mode]()
        synchronize(self._device)
        processor, begin = time.process_time(), time.perf_counter()
        ready.run()
        returned, processor = time.perf_counter(), time.process_time() - processor
        synchronize(self._device)
        wall = time.perf_counter() - begin
        host = processor if self._device.type == "cpu" else returned - begin
        for measure, seconds in (("wall", wall), ("host", host)):
            times.setdefault(measure, []).append(seconds * 1e3 / ready.steps)


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Returns unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def distance(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """Euclidean distance. In chunks, because the difference of large tensors does not fit into memory."""
    norms = []
    for tensor, other in zip(tensors, others, strict=True):
        flat, flat_other = local(tensor).flatten(), local(other).flatten()
        for i in range(0, flat.numel(), 2**26):
            difference = flat[i : i + 2**26].float() - flat_other[i : i + 2**26].float()
            norms.append(torch.linalg.vector_norm(difference))
    return float(torch.linalg.vector_norm(torch.stack(norms).double()))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.ones(2**28, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(25 if device.type == "cuda" else 5):
        synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * source.numel() * source.element_size() / statistics.median(seconds[2:])


def spread(values: Sequence[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1], "rounds": len(values)}


def arguments(description: str, works: Sequence[str]) -> argparse.ArgumentParser:
    """The options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", nargs="+", choices=works, metavar="ROW", help=", ".join(works))
    parser.add_argument("--rounds", type=int, default=0, help="number of timed calls; default: by size")
    parser.add_argument("--quick", action="store_true", help="small tensors and 3 rounds, to test the script")
    parser.add_argument("--commit", help="commit to write into the results; default: that of the git checkout")
    parser.add_argument("-o", "--output", type=Path, help="JSON file; the table goes beside it as .md")
    return parser


def measure_rows(names: Iterable[str], measure: Callable[[str], list[Row]], facts: dict[str, Any], output: Any) -> None:
    """Measures one row of the table after the other; writes and prints the results."""
    print(facts, flush=True)
    rows: list[Row] = []
    for name in names:
        try:
            rows += measure(name)
        except Exception as error:  # The other rows are still worth having.
            traceback.print_exc()
            rows.append(Row(name, "", "all", error=f"{type(error).__name__}: {error}"))
        free()
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
            output.with_suffix(".md").write_text(table(rows, facts))
    print(table(rows, facts))


def environment(commit: str | None) -> dict[str, Any]:
    """Command, commit, hardware and versions."""
    if commit is None and shutil.which("git"):
        command = ["git", "--no-optional-locks", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "commit": commit or "unknown",
        "cpu": f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} threads",
        "gpu": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if has_triton else "none",
        **{f"gradilocks {version.name}": version.describe() for version in VERSIONS},
    }


def table(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """Facts and rows in Markdown."""
    heads = ["workload", "mode", "contender", "wall ms", "p10 to p90", "host ms", "× torch, wall", "× torch, host"]
    heads += ["of the floor", "note"]
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    previous = ["", ""]
    for row in rows:
        titles = [row.workload, row.mode]
        error = f" (**{row.error.replace('|', '/')}**)" if row.error else ""
        cells = [*(["", ""] if titles == previous else titles), row.contender + error, *[""] * 6, row.note]
        if row.ms:
            wall = row.ms["wall"]
            cells[3:6] = (
                f"{wall['median']:.3f}",
                f"{wall['p10']:.3f} to {wall['p90']:.3f}",
                _cell(row.ms.get("host", {}).get("median")),
            )
            cells[6:9] = map(_cell, (row.faster.get("wall"), row.faster.get("host"), row.of_floor))
        lines.append(f"| {' | '.join(cells)} |")
        previous = titles
    return "\n".join(lines) + "\n"


def _cell(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"
