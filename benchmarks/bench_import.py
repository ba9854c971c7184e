"""Import time of gradilocks beside torch's, in new processes.

    python benchmarks/bench_import.py [-o import.json]

"first use" is that of GradientControl, GradScaler and optim.AdamW.
"""

from __future__ import annotations

import os
import subprocess
import sys

from harness import Row, arguments, environment, measure_rows, spread
from versions import VERSIONS

STAGES = ("import torch", "import gradilocks", "first use")
SCRIPT = """
import time
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
import gradilocks
times.append(time.perf_counter())
gradilocks.GradientControl, gradilocks.GradScaler, gradilocks.optim.AdamW
times.append(time.perf_counter())
print(*(1e3 * (b - a) for a, b in zip(times, times[1:])))
"""


def measure(rounds: int) -> list[Row]:
    """Imports the versions in turn."""
    runs: dict[str, list[list[float]]] = {version.name: [] for version in VERSIONS}
    for i in range(1 + rounds):  # The first round fills the file cache.
        for version in VERSIONS:
            # Bytecode is cached, as after an installation.
            variables = {**os.environ, "PYTHONPATH": str(version.source), "PYTHONDONTWRITEBYTECODE": ""}
            command = [sys.executable, "-c", SCRIPT]
            printed = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
            if i:
                runs[version.name].append([float(word) for word in printed.split()])
    return [
        Row("import", stage, name, ms={"wall": spread([run[i] for run in times])})
        for i, stage in enumerate(STAGES)
        for name, times in runs.items()
    ]


def main() -> None:
    options = arguments("Import time of gradilocks beside torch's.", ["import"]).parse_args()
    rounds = 3 if options.quick else options.rounds or 11
    measure_rows(["import"], lambda name: measure(rounds), environment(options.commit), options.output)


if __name__ == "__main__":
    main()
