"""What a run file costs: writing one while a model trains, a script watched, and reading one back.

    python benchmarks/bench_record.py                    # all, some minutes on two CPU cores
    python benchmarks/bench_record.py --only watching    # `gradilocks run` beside Python
    python benchmarks/bench_record.py --only reading --steps 100000
    python benchmarks/bench_record.py -o benchmarks/results/record_cpu.json
    python benchmarks/bench_record.py --device cuda      # all but reading, two minutes

`record_cost.py`, `watch_cost.py` and `read_cost.py` say what is compared with what.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import read_cost
import record_cost
import torch
import watch_cost
from environment import environment

SECTIONS = {
    "recording": (record_cost.recording, record_cost.table),
    "many tensors": (record_cost.many_tensors, record_cost.tensors_table),
    "watching": (watch_cost.watching, watch_cost.table),
    "reading": (read_cost.reading, read_cost.table),
}


def _sections(device: str) -> list[str]:
    """Those that depend on the device; all on a CPU."""
    return [name for name in SECTIONS if device == "cpu" or name != "reading"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(SECTIONS), default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to train on")
    parser.add_argument("--blocks", type=int, default=21, help="of ten training steps each")
    parser.add_argument("--threads", type=int, default=2, help="that torch trains with")
    parser.add_argument("--watch-rounds", type=int, help="runs of each watched script")
    parser.add_argument("--watch-blocks", type=int, help="of steps in each such run")
    parser.add_argument("--rounds", type=int, default=5, help="of reading")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the file that is read")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(torch.device(options.device)),
    }
    for name, (measure, table) in SECTIONS.items():
        if options.only == name or (options.only is None and name in _sections(options.device)):
            found[name] = measure(options)
            print(f"{name}: {table(found[name])}\n")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
