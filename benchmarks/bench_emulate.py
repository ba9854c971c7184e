"""What emulation costs: training steps of a GPT of 10 M parameters in fp32, emulated, and real.

    python benchmarks/bench_emulate.py                     # two CPU cores, some minutes
    python benchmarks/bench_emulate.py --device cuda
    python benchmarks/bench_emulate.py -o benchmarks/results/emulate_cpu.json

All contenders train a model of the same seed on the same batches, one step each in turn, in one
process; a step is forward, backward, clip, AdamW. What counts is the median, over the rounds, of a
contender's time over that of fp32 in the same round. `fp32 again` says how much of that is noise.
On the CPU also real fp16 autocast takes part in the smaller of the two, with fewer rounds: it is
what emulation stands for, and takes too long for more.
The run ends with status 1 if two runs in fp32 differ by a bit, or if fp16 emulated does not follow
real fp16's loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from environment import environment
from harness import Ready, alternate
from torch.nn import functional as F

import gradilocks
from gradilocks.demo.small_gpt import GPT, Batches, python_documentation

WIDTH, LAYERS, HEADS = 384, 6, 6
SHAPES = {"4 x 64": (4, 64), "8 x 256": (8, 256)}
REAL = "real fp16 autocast"
Context = Callable[[], AbstractContextManager[Any]]


def contenders(device: str) -> dict[str, Context]:
    """Name to the context of a forward pass."""
    return {
        "fp32": nullcontext,
        "fp32 again": nullcontext,
        "emulated fp16": lambda: gradilocks.emulate("fp16"),
        "emulated bf16": lambda: gradilocks.emulate("bf16"),
        "emulated fp8 (e4m3, e5m2)": lambda: gradilocks.emulate("e4m3", backward="e5m2"),
        "emulated tf32": lambda: gradilocks.emulate("tf32"),
        REAL: lambda: torch.autocast(device, torch.float16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="that torch trains with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--real-rounds", type=int, default=3, help="with real fp16 too")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(torch.device(options.device)),
    }
    for name, (rows, length) in SHAPES.items():
        real = options.device == "cuda" or name == next(iter(SHAPES))
        found[name] = measured(options, rows, length, real=real)
        print(f"\n{name} tokens a step, {found[name]['parameters'] / 1e6:.1f} M parameters")
        print(table(found[name]["rows"]))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def measured(options: argparse.Namespace, rows: int, length: int, *, real: bool) -> dict[str, Any]:
    """Times everybody but the real one, then the real one beside fp32 and emulated fp16."""
    everybody = contenders(options.device)
    first = [name for name in everybody if name != REAL or options.device == "cuda"]
    times, losses = race(options, first, everybody, rows, length, options.rounds)
    if losses["fp32"] != losses["fp32 again"]:
        sys.exit("two runs in fp32 differ: nothing here can be compared")
    lines = [row(name, times[name], times["fp32"]) for name in first]
    found = {"parameters": parameters(length), "rows": lines, "losses": losses}
    if not real:
        return found
    if REAL not in first:
        some = ["fp32", "emulated fp16", REAL]
        times, losses = race(options, some, everybody, rows, length, options.real_rounds)
        lines.append(row(REAL, times[REAL], times["fp32"]))
    apart = [abs(a / b - 1) for a, b in zip(losses["emulated fp16"], losses[REAL], strict=True)]
    if max(apart) > 1e-3:
        sys.exit(f"emulated fp16 does not follow real fp16: losses differ by {max(apart):.2%}")
    return {**found, "losses": losses, "largest_difference_of_loss_from_real_fp16": max(apart)}


def race(
    options: argparse.Namespace,
    names: list[str],
    everybody: dict[str, Context],
    rows: int,
    length: int,
    rounds: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds a step, and the losses of all steps, by contender."""
    losses: dict[str, list[float]] = {name: [] for name in names}
    ready = [build(everybody[n], options.device, rows, length, losses[n]) for n in names]
    times = alternate(ready, rounds=rounds, device=torch.device(options.device))
    return {name: each["wall"] for name, each in zip(names, times, strict=True)}, losses


def build(context: Context, device: str, rows: int, length: int, losses: list[float]) -> Ready:
    """A model, its control and its batches; `run` is one training step."""
    text = python_documentation()
    model = gpt(length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    control = gradilocks.GradientControl(optimizer, model=model, scale=2.0**10, clip=1.0)
    batches = Batches(text, rows=rows, length=length, seed=0)

    def step() -> None:
        inputs, targets = (each.to(device) for each in batches.draw())
        with context():
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        control.backward(loss)
        control.step()
        control.zero_grad()
        losses.append(loss.item())

    return Ready(run=step, prepare=lambda: None, result=lambda: list(model.parameters()))


def gpt(length: int) -> GPT:
    torch.manual_seed(0)
    characters = len(python_documentation().vocabulary)
    return GPT(vocabulary=characters, length=length, width=WIDTH, layers=LAYERS, heads=HEADS)


def parameters(length: int) -> int:
    return sum(parameter.numel() for parameter in gpt(length).parameters())


def row(name: str, mine: list[float], plain: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(mine, plain, strict=True)]
    return {
        "contender": name,
        "rounds": len(mine),
        "median_ms": statistics.median(mine),
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | ms a step | times fp32 (least to most) |", "|---|---|---|"]
    for each in rows:
        lines.append(
            f"| {each['contender']} | {each['median_ms']:.0f} | {each['ratio']:.2f} "
            f"({each['ratio_least']:.2f} to {each['ratio_most']:.2f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
