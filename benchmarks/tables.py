"""Writes the tables of docs/performance.md and README.md from the files in benchmarks/results.

    python benchmarks/tables.py            # rewrites the tables
    python benchmarks/tables.py --check    # exit status 1 if a table is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
CONTENDERS = ("control, optim", "control, torch fused", "drop-in", "drop-in, unfused", "control, optim, collective")
README_ROWS = (
    ("step_h200", "1.1B", "control, optim"),
    ("step_h200", "8M", "control, optim"),
    ("step_h200", "0.3M", "drop-in"),
    ("step_cpu_124M", "124M", "control, optim"),
)
"""File, workload and contender of the rows of the README, slower ones included."""


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return content


def chosen_rows(rows: list[dict[str, Any]], workload: str, mode: str) -> dict[str, dict[str, Any]]:
    """The rows of each contender; names without the version."""
    chosen = [row for row in rows if row["workload"] == workload and row["mode"] == mode and not row["error"]]
    return {row["contender"].removeprefix("0.3 "): row for row in chosen if not row["contender"].startswith("0.2")}


def milliseconds(row: dict[str, Any]) -> str:
    median = row["ms"]["wall"]["median"]
    return f"{median:,.0f}" if median >= 1000 else f"{median:.3g}"


def size_of(workload: str) -> str:
    key, _, size = workload.partition(": ")
    size = re.sub(r"^0\.00 M", "under 0.01 M", size)
    return f"FSDP2, {size}" if key.startswith("fsdp") else size


def step_table(name: str) -> str:
    """Every workload and mode of a file; in parentheses the speed relative to torch's sequence."""
    content = load(name)
    rows = content["rows"]
    found = {row["contender"].removeprefix("0.3 ") for row in rows}
    names = [contender for contender in CONTENDERS if contender in found]
    lines = [f"| workload | gradients | torch, ms | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for workload, mode in dict.fromkeys((row["workload"], row["mode"]) for row in rows):
        by_name = chosen_rows(rows, workload, mode)
        cells = [
            f"{milliseconds(by_name[contender])} ({by_name[contender]['faster']['wall']:.2f}×)"
            if contender in by_name
            else "–"
            for contender in names
        ]
        lines.append(f"| {size_of(workload)} | {mode} | {milliseconds(by_name['torch'])} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin_of(content)])


def plain_table(name: str) -> str:
    """One line for each row of a file; in parentheses the speed relative to the contender without Gradilocks."""
    content = load(name)
    lines = ["| workload | | contender | ms | |", "|---|---|---|---|---|"]
    for row in (row for row in content["rows"] if not row["contender"].startswith("0.2")):
        ratio = f" ({row['faster']['wall']:.2f}×)" if row["faster"] else ""
        contender = row["contender"].removeprefix("0.3 ")
        cells = (row["workload"], row["mode"], contender, milliseconds(row) + ratio, row["error"] or row["note"])
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join([*lines, "", origin_of(content)])


def origin_of(content: dict[str, Any]) -> str:
    """Hardware, versions and command of a file."""
    hardware = content["cpu"] if content["gpu"] == "none" else content["gpu"]
    return f"{hardware}; torch {content['torch']}; commit {content['commit']}; `{content['command']}`"


def readme_table() -> str:
    lines = ["| one step: scale, check, clip, AdamW | torch | Gradilocks | |", "|---|---|---|---|"]
    for name, key, contender in README_ROWS:
        content = load(name)
        workload = next(row["workload"] for row in content["rows"] if row["workload"].startswith(f"{key}: "))
        by_name = chosen_rows(content["rows"], workload, "standing")
        device = "CPU, 2 cores" if content["gpu"] == "none" else content["gpu"].partition(",")[0]
        how = "drop-in" if contender == "drop-in" else "control and `gradilocks.optim`"
        ratio = by_name[contender]["faster"]["wall"]
        word = f"{ratio:.1f}× as fast" if ratio >= 1 else f"slower: {ratio:.2f}×"
        size = size_of(workload).removesuffix(", float32").replace(" M in", " M parameters in")
        times = f"{milliseconds(by_name['torch'])} ms | {milliseconds(by_name[contender])} ms"
        lines.append(f"| {device}, {size} tensors, {how} | {times} | {word} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    def table(match: re.Match[str]) -> str:
        name = match[1]
        content = readme_table() if name == "readme" else step_table(name) if "step" in name else plain_table(name)
        return f"<!-- table: {name} -->\n{content}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.S)


def main() -> int:
    stale = [page for page in PAGES if updated(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    if "--check" not in sys.argv:
        for page in stale:
            page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    print("\n".join(f"{page.name} is out of date: run python benchmarks/tables.py" for page in stale))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
