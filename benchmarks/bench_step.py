"""Scale + check + clip + AdamW: what one step costs after backward, against torch's own ways.

    python benchmarks/bench_step.py                # 124 M and 1 M parameters, CPU
    python benchmarks/bench_step.py --size 1M --rounds 200
    python benchmarks/bench_step.py --device cuda  # everything on a GPU of 139 GiB
    python benchmarks/bench_step.py --device cuda --rows step,clip --size 1.1B,124M
    python benchmarks/bench_step.py --device cuda --rows step,moe --compile none  # two minutes

Every contender starts each round from the same scaled gradients, copied in outside the clock, and
ends with the same parameters; the run says so and ends with status 1 if they are not the same. The
norm is above the limit, so every contender has to clip; with `--limit 1e9` nobody has to. A step is
measured on gradients that lie where they lay, and on new ones every round, as a loop with
`zero_grad(set_to_none=True)` has them. Since the gradients were just written, small ones may still
be in the cache, for everybody alike.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from pathlib import Path

import torch
from compete import Settings, free
from environment import environment
from floor import Floor
from harness import WARM_UP
from row_sets import ROW_SETS, Job
from workloads import EXPERTS, SIZES

from report import Row, save, table

CPU_SIZES = ["124M", "1M"]
GPU_SIZES = ["1.1B", "124M", "22M", "0.3M", "8M"]
FEW = ["12 tensors", "2 tensors"]
COMPILED = ["124M", "22M", "0.3M", "tiny"]
"""Where torch.compile needs seconds, not minutes."""
CPU_ROUNDS = {"124M": 31}
GPU_ROUNDS = {"1.1B": 15, "2.5B": 15, "124M": 51, "22M": 101, "0.3M": 151, "8M": 31}
NEVER = 1e9
"""A limit that no gradient reaches, and that no code can tell from one that is reached."""
GROWTH_INTERVAL = 2000


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    settings = Settings(device, queued=options.queued)
    print(environment(device), flush=True)
    floor = Floor(device) if device.type == "cuda" else None
    extra: dict[str, object] = {}
    if floor is not None:
        extra["copy_bytes_per_second"] = floor.bytes_per_second
        print(f"copy bandwidth: {floor.bytes_per_second / 1e12:.3f} TB/s", flush=True)
        free()
    rows: list[Row] = []
    begun = time.perf_counter()
    for row_set, job in jobs(options, settings, floor):
        try:
            found = ROW_SETS[row_set](job)
        except Exception as error:  # The other rows are still worth having.
            traceback.print_exc()
            name = f"{row_set}, {job.size}, limit {job.limit:g}"
            settings.notes.say(f"{name}: {type(error).__name__}: {error}", failure=True)
            found = []
        rows += found
        free()
        for workload in dict.fromkeys(row.workload for row in found):
            print(f"{workload}: measured, {time.perf_counter() - begun:.0f} s", flush=True)
        if options.output:
            save(options.output, rows, device=device, notes=settings.notes, extra=extra)
    print(table(rows) if rows else "Nothing was measured: no such rows of that size.")
    if settings.notes.failed:
        print("Not everything is as it should be; the notes above say what.", file=sys.stderr)
        sys.exit(1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(dict.fromkeys([*SIZES, *EXPERTS]))
    parser.add_argument("--size", default="all", help=f"of {','.join(known)}; default: all")
    parser.add_argument("--rounds", type=int, default=0, help="default: more for small sizes")
    parser.add_argument("--limit", type=float, default=None, help="the norm's limit; default both")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--rows",
        default="",
        help=f"of {','.join(ROW_SETS)}; default: step,clip,dropin on a CPU, or all",
    )
    parser.add_argument(
        "--compile",
        choices=["some", "all", "none"],
        default="some",
        help="where torch.compile takes part on a GPU; some: where compiling is quick",
    )
    parser.add_argument(
        "--queued", action="store_true", help="time the GPU also with its queue full, host hidden"
    )
    options = parser.parse_args()
    everything = list(ROW_SETS) if options.device == "cuda" else ["step", "clip", "dropin"]
    options.rows = options.rows.split(",") if options.rows else everything
    options.size = options.size.split(",")
    if unknown := set(options.rows) - set(ROW_SETS):
        parser.error(f"--rows takes {', '.join(ROW_SETS)}, got {', '.join(sorted(unknown))}")
    if unknown := set(options.size) - {*known, "all"}:
        parser.error(f"--size takes {', '.join(known)} or all, got {', '.join(sorted(unknown))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    steps = (options.rounds + WARM_UP + 4) * (2 if options.queued else 1)
    if steps >= GROWTH_INTERVAL:
        parser.error(f"--rounds: the scale grows after {GROWTH_INTERVAL} steps; take fewer rounds")
    return options


def jobs(
    options: argparse.Namespace, settings: Settings, floor: Floor | None
) -> list[tuple[str, Job]]:
    """What is to be measured, in order."""
    on_gpu = settings.device.type == "cuda"
    planned = []
    for row_set in options.rows:
        for size in sizes_of(row_set, options.size, on_gpu=on_gpu):
            some = options.compile == "some" and size in COMPILED
            compiles = on_gpu or size == "tiny"
            for limit in limits_of(row_set, size, options.limit, on_gpu=on_gpu):
                job = Job(
                    size,
                    limit,
                    rounds=options.rounds or rounds_of(size, on_gpu=on_gpu),
                    settings=settings,
                    floor=floor,
                    compiled=compiles and (some or options.compile == "all"),
                )
                planned.append((row_set, job))
    return planned


def sizes_of(row_set: str, asked: list[str], *, on_gpu: bool) -> list[str]:
    """The sizes of a set of rows; an asked size that it does not have is left out."""
    if "all" not in asked:
        there = EXPERTS if row_set == "moe" else SIZES
        return [size for size in asked if size in there]
    if row_set == "moe":
        return ["2.5B"]
    if row_set == "dropin":
        return FEW
    if not on_gpu:
        return CPU_SIZES
    return GPU_SIZES if row_set == "step" else ["1.1B"]


def limits_of(row_set: str, size: str, asked: float | None, *, on_gpu: bool) -> list[float]:
    """Both kinds of limit for the rows whose work depends on it."""
    if asked is not None:
        return [asked]
    if not on_gpu:
        return [1.0, math.inf]
    both = row_set == "clip" or (row_set == "step" and size == "1.1B")
    return [1.0, NEVER] if both else [1.0]


def rounds_of(size: str, *, on_gpu: bool) -> int:
    return GPU_ROUNDS.get(size, 200) if on_gpu else CPU_ROUNDS.get(size, 300)


if __name__ == "__main__":
    main()
