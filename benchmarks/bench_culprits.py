"""Who names the true culprit? Faulty trainings of tests/culprits, each with a planted truth.

    python benchmarks/bench_culprits.py                       # minutes on two CPU cores
    python benchmarks/bench_culprits.py -k gpt                # some of them
    python benchmarks/bench_culprits.py --device cuda         # and --trace, to be certain there
    python benchmarks/bench_culprits.py -o benchmarks/results/culprits_cpu.json --docs
    python benchmarks/bench_culprits.py --cost -o benchmarks/results/culprits_cost_cpu.json --docs

Every training is run by `gradilocks run`, under torch's anomaly mode and, where Transformers is
installed, under its DebugUnderflowOverflow (`culprit_rivals.py` says how they are judged). `--docs`
writes the table into docs/finding-the-culprit.md. `--cost` measures instead what each of them adds
to a training step while nothing is wrong, and how long a replay takes (`culprit_cost.py`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # The zoo lies among the tests.
DOCUMENT = ROOT / "docs/finding-the-culprit.md"
BEGIN, END = "<!-- made by benchmarks/bench_culprits.py{} -->", "<!-- until here -->"
TOLD = {
    "gradilocks": "gradilocks run",
    "anomaly": "anomaly mode",
    "underflow_overflow": "DebugUnderflowOverflow",
}
WHERE = {
    "input": "in the input data",
    "after": "in the loss",
    "gradients": "in gradients, after backward",
    "grown": "in the learning rate",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trace", action="store_true", help="with `gradilocks run --trace`")
    parser.add_argument("-k", dest="only", default="", help="trainings whose name has this in it")
    parser.add_argument("--cost", action="store_true", help="measure what it costs instead")
    parser.add_argument("--seconds", type=float, default=100.0, help="that --cost takes, about")
    parser.add_argument("--docs", action="store_true", help="write the table into the document")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    os.environ["DEVICE"] = options.device
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.cost:
        import culprit_cost

        found = culprit_cost.costs(options.device, seconds=options.seconds)
        shown = culprit_cost.table(found)
    else:
        found = zoo(options)
        shown = f"{summary(found)}\n\n{table(found)}"
    save(found, options)
    print(shown)
    if options.docs:
        insert(shown, BEGIN.format(" --cost" if options.cost else ""))


def zoo(options: argparse.Namespace) -> dict[str, Any]:
    """Runs all trainings under everybody."""
    import culprit_rivals as rivals
    from tests.culprits.zoo import ZOO

    own = ("--trace",) if options.trace else ()
    everybody = {
        "gradilocks": lambda case, at: rivals.by_gradilocks(case, at, options=own),
        "anomaly": rivals.by_anomaly_mode,
    }
    versions = {}
    if rivals.has_underflow_overflow():
        everybody["underflow_overflow"] = rivals.by_underflow_overflow
        versions["transformers"] = importlib.metadata.version("transformers")
    else:
        print("Transformers is not installed: DebugUnderflowOverflow is left out", file=sys.stderr)
    cases = [case for case in ZOO if options.only in case.name]

    def judged(case: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"planted": case._asdict()}
        for name, judge in everybody.items():
            with tempfile.TemporaryDirectory() as folder:
                row[name] = judge(case, Path(folder))._asdict()
        return row

    if options.device == "cpu":
        rivals.warm_up()
    at_once = 1 if options.device == "cpu" else 8  # Forks want one thread.
    rows = []
    with ThreadPoolExecutor(at_once) as pool:
        made = pool.map(judged, cases) if at_once > 1 else map(judged, cases)
        for number, (case, row) in enumerate(zip(cases, made, strict=True), 1):
            rows.append(row)
            told = ", ".join(f"{TOLD[name]} {row[name]['verdict']}" for name in everybody)
            print(f"{number}/{len(cases)} {case.name}: {told}", file=sys.stderr, flush=True)
    return {"device": options.device, "trace": options.trace, "versions": versions, "rows": rows}


def save(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes what was found, with hardware, versions and the command."""
    import torch
    from environment import environment  # Now: it may begin to use the GPU.

    found["environment"] = environment(torch.device(options.device))
    given = [
        f"benchmarks/results/{options.output.name}" if arg == str(options.output) else arg
        for arg in sys.argv[1:]
    ]
    found["command"] = " ".join(["python", "benchmarks/bench_culprits.py", *given])
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def summary(found: dict[str, Any]) -> str:
    """How often each of them was right, as a table."""
    rows = found["rows"]
    names = [name for name in TOLD if name in rows[0]]
    lines = [
        f"| of {len(rows)} trainings | right | points elsewhere | says nothing |",
        "|---|---|---|---|",
    ]
    for name in names:
        many = Counter(row[name]["verdict"] for row in rows)
        lines.append(
            f"| {TOLD[name]} | {many['right']} | {many['wrong'] + many['elsewhere']} "
            f"| {many['nothing']} |"
        )
    return "\n".join(lines)


def table(found: dict[str, Any]) -> str:
    """What was planted and what each of them said, one training a line."""
    names = [name for name in TOLD if name in found["rows"][0]]
    lines = [
        "| training | planted | " + " | ".join(TOLD[name] for name in names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in found["rows"]:
        case = row["planted"]
        words = [case["model"], case["precision"], case["stepping"]]
        place = WHERE.get(case["where"], case["module"])
        planted = f"{case['fault']}, {case['how_often']}: {place}, step {case['step']}"
        cells = [", ".join(words), planted]
        cells += [_cell(row[name]) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(judged: dict[str, str]) -> str:
    if judged["verdict"] == "nothing":
        return "nothing"
    sure = f" ({judged['certainty']})" if judged["certainty"] else ""
    return f"{'**right**' if judged['verdict'] == 'right' else 'no'}: {judged['said']}{sure}"


def insert(shown: str, mark: str) -> None:
    """Writes what is shown into the document, between a mark and the next end."""
    before, rest = DOCUMENT.read_text().split(f"{mark}\n")
    after = rest[rest.index(END) :]
    DOCUMENT.write_text(f"{before}{mark}\n{shown}\n{after}")


if __name__ == "__main__":
    main()
