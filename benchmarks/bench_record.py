"""`gradilocks run` beside the plain script, recording beside not recording, and the cost of `report` and `ls`.

    python benchmarks/bench_record.py                     # CPU
    python benchmarks/bench_record.py --device cuda --rows run-400 run-mlp run-gpt record
    python benchmarks/bench_record.py --rows files -o record_files.json

run-*: plain_script.py in processes that alternate. "step" is a step after warm-up, timed by the script; its host time
is processor time. "process" is the time from start to exit. Every process must train bit for bit the same parameters
(on a GPU the digests are not compared) and record every step.
record: steps of a GPT of 578 tensors in one process, alternating with and without `record=`; a timed call is 50 steps,
one batch of lines. Parameters must be bit for bit equal (on a GPU up to rounding).
files: `report` and `ls` in new processes, on run files that a real training has written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Contender, Ready, Row, arguments, compete, environment, measure_rows, spread
from torch import Tensor, nn
from versions import V3

STEPS = {"400": 300, "mlp": 3000, "gpt": 300}
ROWS = [*(f"run-{name}" for name in STEPS), "record", "files"]
BATCH = 50
GRADILOCKS = [sys.executable, "-m", "gradilocks"]
TRAINING = """
import sys, torch, gradilocks
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
control = gradilocks.GradientControl(optimizer, model=model, clip=1.0, record=sys.argv[1])
for _ in range(int(sys.argv[2])):
    control.backward((model(torch.randn(16, 8)) - torch.randn(16, 8)).square().mean())
    control.step()
    control.zero_grad()
"""


# Linux counts the memory of the process that forks in the peak of its child. This process has loaded torch (230 MB),
# so a small one starts the commands and measures them.
LAUNCHER = """
import os, subprocess, sys, time
begin = time.perf_counter()
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
print("\\n", 1e3 * (time.perf_counter() - begin), usage.ru_maxrss / 1024, os.waitstatus_to_exitcode(status))
"""


def process(command: Sequence[str]) -> tuple[float, float, str]:
    """Runs a command; returns wall milliseconds, peak memory in MB and what it printed."""
    variables = {**os.environ, "PYTHONPATH": str(V3.source), "PYTHONDONTWRITEBYTECODE": ""}
    launcher = [sys.executable, "-S", "-c", LAUNCHER, *command]
    done = subprocess.run(
        launcher, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    printed, _, numbers = done.stdout.rstrip().rpartition("\n")
    wall, memory, status = map(float, numbers.split())
    # `report` and `ls` exit with 1 if a run is not healthy.
    if status not in (0, 1) or "Traceback" in printed:
        raise RuntimeError(f"{' '.join(command[1:4])} exited with {status:g}: {printed[-300:]}")
    return wall, memory, printed


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- gradilocks run ---------------------------------------------------------------------------------------------------


def measure_run(name: str, options: argparse.Namespace) -> list[Row]:
    """Processes of the plain script, of `gradilocks run` and of `gradilocks run --no-trace`, in turn."""
    steps = 30 if options.quick else STEPS[name]
    script = [str(Path(__file__).with_name("plain_script.py")), name, options.device, str(steps)]
    commands = {"plain script": [], "gradilocks run": ["run"], "gradilocks run --no-trace": ["run", "--no-trace"]}
    times: dict[tuple[str, str, str], list[float]] = {}
    errors = dict.fromkeys(commands, "")
    digest = None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.jsonl")
        for i in range(1 + (1 if options.quick else options.rounds or 11)):  # The first round fills the file cache.
            for contender, run in list(commands.items())[i % 3 :] + list(commands.items())[: i % 3]:
                prefix = [*GRADILOCKS, *run, "--overwrite", "-o", str(file)] if run else [sys.executable]
                wall, _, printed = process([*prefix, *script])
                result = json.loads(next(line for line in printed.splitlines() if line.startswith('{"wall"')))
                digest = digest or result["digest"]
                if result["digest"] != digest and options.device == "cpu":
                    errors[contender] = "trains other parameters"
                recorded = lines_of(file)[-1].get("steps") if run else None
                if run and recorded != steps + 20:
                    errors[contender] = f"{recorded} steps recorded instead of {steps + 20}"
                for mode, measure, number in (
                    ("step", "wall", result["wall"]),
                    ("step", "host", result["host"]),
                    ("process", "wall", wall),
                ):
                    times.setdefault((mode, contender, measure), []).extend([number] if i else [])
    rows = []
    for mode, contender in itertools.product(("step", "process"), commands):
        measures = ("wall", "host") if mode == "step" else ("wall",)
        ms = {measure: spread(times[mode, contender, measure]) for measure in measures}
        plain = {measure: spread(times[mode, "plain script", measure])["median"] for measure in measures}
        faster = {measure: plain[measure] / ms[measure]["median"] for measure in measures}
        title = f"run-{name}: {steps} steps, {options.device}"
        rows.append(Row(title, mode, contender, ms=ms, faster=faster, error=errors[contender]))
    return rows


# --- record= ----------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """48 transformer layers of 12 tensors, and a head of 2: 578 tensors."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": device}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 4 * width, **options) for _ in range(48))
        self.head = nn.Linear(width, 8, device=device)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return F.cross_entropy(self.head(inputs).flatten(0, 1), targets.flatten())


def ready(width: int, device: torch.device, folder: str, records: bool, package: Any) -> Ready:
    """A contender with its own model; its timed call is one batch of recorded steps."""
    model = Blocks(width, device)
    batch = torch.randn(4, 16, width, device=device), torch.randint(8, (4, 16), device=device)
    optimizer = package.optim.AdamW(model.parameters(), lr=1e-4)
    record = Path(folder, "record.jsonl") if records else None
    control = package.GradientControl(optimizer, model=model, clip=1.0, record=record)

    def loop() -> None:
        for _ in range(BATCH):
            control.backward(model(*batch))
            control.step()
            control.zero_grad()

    return Ready(loop, list(model.parameters()), {"loop": lambda: None}, steps=BATCH)


def measure_record(options: argparse.Namespace) -> list[Row]:
    """Training steps with and without `record=`."""
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    width = 8 if options.quick else 256 if options.device == "cuda" else 64

    def start() -> Iterator[Tensor]:
        return Blocks(width, device).parameters()

    with tempfile.TemporaryDirectory() as folder:
        make: Callable[[bool], Any] = lambda records: partial(ready, width, device, folder, records)  # noqa: E731
        rows = compete(
            f"record: {sum(p.numel() for p in start()) / 1e6:.1f} M in {len(list(start()))} tensors",
            [
                Contender("no recording", make(False), V3, baseline="no recording"),
                Contender("record=", make(True), V3, baseline="no recording"),
            ],
            device=device,
            rounds=2 if options.quick else options.rounds or 15,
            modes=["loop"],
            start=start,
            tolerance=1e-3 if options.device == "cuda" else 0.0,
            compare_after=options.device == "cpu",
        )
        steps = [line for line in lines_of(Path(folder, "record.jsonl")) if line["kind"] == "step"]
        rows[1].note = f"{Path(folder, 'record.jsonl').stat().st_size / max(1, len(steps)):.0f} bytes per step"
    return rows


# --- report and ls ----------------------------------------------------------------------------------------------------


def measure_files(options: argparse.Namespace) -> list[Row]:
    """Time, peak memory and page size of `report` and `ls`."""
    long, short = (1000, 100) if options.quick else (100_000, 1000)
    rounds = 1 if options.quick else options.rounds or 5
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder, runs = Path(name), Path(name, "runs")
        runs.mkdir()
        files = {steps: folder / str(steps) / "run.jsonl" for steps in (long, short)}
        for steps, file in files.items():
            process([sys.executable, "-c", TRAINING, str(file), str(steps)])
            assert lines_of(file)[-1]["steps"] == steps
        for i in range(50):
            shutil.copy(files[short], runs / f"{i}.jsonl")
        page = folder / "page" / "index.html"
        works = {
            f"report, {short:,} steps": ["report", str(files[short])],
            f"report, {long:,} steps": ["report", str(files[long])],
            f"report -o, {long:,} steps": ["report", str(files[long]), "-o", str(page)],
            f"report, 50 runs of {short:,}": ["report", *map(str, sorted(runs.iterdir()))],
            f"report -o, 50 runs of {short:,}": ["report", *map(str, sorted(runs.iterdir())), "-o", str(page)],
            f"ls, 50 runs of {short:,}": ["ls", str(runs)],
            f"ls, 1 run of {long:,}": ["ls", str(files[long].parent)],
        }
        results: dict[str, list[tuple[float, float, str]]] = {work: [] for work in works}
        sizes: dict[str, str] = {}
        for i in range(1 + rounds):  # The first round fills the file cache.
            for work, command in works.items():
                shutil.rmtree(page.parent, ignore_errors=True)
                page.parent.mkdir()
                result = process([*GRADILOCKS, *command])
                results[work] += [result] if i else []
                if page.exists():
                    parts = [f"{file.name} {file.stat().st_size / 1e6:.2f} MB" for file in page.parent.iterdir()]
                    sizes[work] = "; " + ", ".join(parts)
        for work, found in results.items():
            ms = {"wall": spread([wall for wall, _, _ in found])}
            note = f"peak {max(memory for _, memory, _ in found):.0f} MB" + sizes.get(work, "")
            rows.append(Row("files", "process", work, ms=ms, note=note))
    return rows


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    """Measures one row of the table."""
    if name.startswith("run-"):
        return measure_run(name.removeprefix("run-"), options)
    return measure_record(options) if name == "record" else measure_files(options)


def main() -> None:
    options = arguments("Recording, `gradilocks run`, `report` and `ls`.", ROWS).parse_args()
    facts = environment(options.commit)
    measure_rows(options.rows or ROWS, lambda name: measure(name, options), facts, options.output)


if __name__ == "__main__":
    main()
