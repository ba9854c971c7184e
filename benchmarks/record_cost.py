"""What recording costs: training steps of a GPT of 10 M parameters, with it and without it.

Contenders train the same model on the same batches, one step each in turn, in one process. A block
is ten steps in a row: it holds exactly one step with detail and one write to the file, so every
block has all that recording does in it. What counts is the median, over the blocks, of a
contender's time over that of the run without recording in the same block. The run ends with status
1 if recording has changed a single bit of the weights.

`many_tensors` does the same with steps alone, of parameters that are small and many: there the host
is all that counts, and what recording adds to a step is told in milliseconds.

`histograms` does what `wandb.watch(model, log_freq=1)` does in a hook of every gradient: looks
whether all is finite, finds the range, and makes 64 bins with `torch.histc`. What wandb then does
with them is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Ready, alternate
from torch import Tensor, nn
from torch.nn import functional as F

from gradilocks import GradientControl, Recorder, read_run
from gradilocks.demo.small_gpt import GPT, Batches, python_documentation

BLOCK, BINS = 10, 64
TENSORS = (4, 64, 578, 2000)
ROWS, LENGTH, WIDTH, LAYERS = 4, 64, 384, 6


def recording(options: argparse.Namespace) -> dict[str, Any]:
    """Trains with recording and without; what each step took."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        recorder = Recorder(path, flush_every=BLOCK, detail_every=10, log=False)
        contenders: dict[str, Callable[[], Ready]] = {
            "no recording": build,
            "recording, detail every 10": lambda: build(record=recorder),
            "no recording, again": build,
            "histograms at every step": lambda: build(hook=histogram),
        }
        ready = [make() for make in contenders.values()]
        times = alternate(ready, rounds=options.blocks * BLOCK, device=torch.device("cpu"))
        recorder.close()
        size, steps = path.stat().st_size, len(read_run(path).steps)
    blocks = [
        [sum(each["wall"][k : k + BLOCK]) / BLOCK for k in range(0, len(each["wall"]), BLOCK)]
        for each in times
    ]
    rows = [row(name, mine, blocks[0]) for name, mine in zip(contenders, blocks, strict=True)]
    if not all(map(torch.equal, ready[0].result(), ready[1].result())):
        sys.exit("recording has changed the weights")
    return {
        "parameters": sum(tensor.numel() for tensor in ready[0].result()),
        "tensors": len(ready[0].result()),
        "tokens_a_step": ROWS * LENGTH,
        "threads": options.threads,
        "blocks": options.blocks,
        "bytes_a_step": round(size / steps),
        "rows": rows,
    }


def many_tensors(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of small tensors, more and more of them, recorded and not; processor's time."""
    torch.set_num_threads(1)
    rows = []
    for count in TENSORS:
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(Path(folder) / "a.jsonl", detail_every=10, log=False)
            ready = [small_steps(count), small_steps(count, record=recorder)]
            rounds = options.blocks * BLOCK
            plain, mine = alternate(ready, rounds=rounds, device=torch.device("cpu"))
            recorder.close()
            if not all(map(torch.equal, ready[0].result(), ready[1].result())):
                sys.exit("recording has changed the weights")
        blocks = [
            [sum(times[k : k + BLOCK]) / BLOCK for k in range(0, rounds, BLOCK)]
            for times in (plain["cpu"], mine["cpu"])
        ]
        added = [b - a for a, b in zip(*blocks, strict=True)]
        rows.append(
            {
                "tensors": count,
                "plain_ms": statistics.median(blocks[0]),
                "added_ms": statistics.median(added),
                "added_ms_p10": quantile(added, 0),
                "added_ms_p90": quantile(added, -1),
            }
        )
    return {"blocks": options.blocks, "rows": rows}


def small_steps(count: int, record: Recorder | None = None) -> Ready:
    """A control over `count` tensors; `run` is one step on gradients that stay."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(32, 8)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.SGD(params, lr=1e-4, foreach=True)
    control = GradientControl(optimizer, scale=None, clip=1.0, record=record)
    return Ready(
        run=control.step,
        prepare=lambda: None,
        result=lambda: [param.detach() for param in params],
    )


def tensors_table(found: dict[str, Any]) -> str:
    lines = ["| tensors | ms a step, of the processor | added by recording |", "|---|---|---|"]
    for each in found["rows"]:
        lines.append(
            f"| {each['tensors']} | {each['plain_ms']:.3f} | {each['added_ms']:+.3f} ms "
            f"({each['added_ms_p10']:+.3f} to {each['added_ms_p90']:+.3f}) |"
        )
    return "\n".join(lines)


def build(*, record: Recorder | None = None, hook: Callable[[Tensor], None] | None = None) -> Ready:
    """A model, its control and its batches; `run` is one training step."""
    text = python_documentation()
    torch.manual_seed(0)
    model = GPT(vocabulary=len(text.vocabulary), length=LENGTH, width=WIDTH, layers=LAYERS, heads=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    control = GradientControl(optimizer, model=model, scale=None, clip=1.0, record=record)
    batches = Batches(text, rows=ROWS, length=LENGTH, seed=0)
    if hook is not None:
        for param in model.parameters():
            param.register_hook(hook)

    def step() -> None:
        inputs, targets = batches.draw()
        control.backward(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        control.step()
        control.zero_grad()

    return Ready(run=step, prepare=lambda: None, result=lambda: weights(model))


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach() for param in model.parameters()]


def histogram(gradient: Tensor) -> None:
    """As wandb's hook has it, without what becomes of the histogram."""
    flat = gradient.detach().clone().reshape(-1)
    if not flat.numel() or (~torch.isfinite(flat)).all().item():
        return
    if not torch.isfinite(flat).all().item():
        flat = flat[torch.isfinite(flat)]
    low, high = flat.min().item(), flat.max().item()
    if low == high:
        return
    counts = flat.histc(bins=BINS, min=low, max=high).cpu().detach().clone()
    bins = torch.linspace(low, high, steps=BINS + 1)
    counts.tolist(), bins.tolist()


def row(name: str, mine: list[float], plain: list[float]) -> dict[str, Any]:
    """Milliseconds a step, and what is added to that of the first contender."""
    added = [(a / b - 1) * 100 for a, b in zip(mine, plain, strict=True)]
    return {
        "contender": name,
        "median_ms": statistics.median(mine),
        "p10_ms": quantile(mine, 0),
        "p90_ms": quantile(mine, -1),
        "added_percent": statistics.median(added),
        "added_percent_p10": quantile(added, 0),
        "added_percent_p90": quantile(added, -1),
    }


def quantile(values: list[float], place: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=10, method="inclusive")[place]


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['parameters'] / 1e6:.1f} M parameters in {found['tensors']} tensors, "
        f"{found['tokens_a_step']} tokens a step, {found['bytes_a_step']} bytes a step recorded",
        "| | ms a step (10 % to 90 %) | added (10 % to 90 % of blocks) |",
        "|---|---|---|",
    ]
    for each in found["rows"]:
        lines.append(
            f"| {each['contender']} | {each['median_ms']:.1f} ({each['p10_ms']:.1f} to "
            f"{each['p90_ms']:.1f}) | {each['added_percent']:+.2f} % "
            f"({each['added_percent_p10']:+.2f} to {each['added_percent_p90']:+.2f}) |"
        )
    return "\n".join(lines)
