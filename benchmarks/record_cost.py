"""What recording costs: training steps of a GPT of 10 M parameters, with it and without it.

Contenders train the same model on the same batches, one step each in turn, in one process. A block
is ten steps in a row: it holds exactly one step with detail and one write to the file, so every
block has all that recording does in it. What counts is the median, over the blocks, of a
contender's time over that of the run without recording in the same block. The run ends with status
1 if recording has changed a single bit of the weights.

What a step takes is told twice: on the wall, and by the processor's time of the thread that trains,
until the step has returned. On a GPU it is the second that counts: the wall of a busy host is too
noisy to show 1 %.

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
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import WARM_UP, Ready, alternate
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
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        recorder = Recorder(path, flush_every=BLOCK, detail_every=10, log=False)
        contenders: dict[str, Callable[[], Ready]] = {
            "no recording": lambda: build(device),
            "recording, detail every 10": lambda: build(device, record=recorder),
            "no recording, again": lambda: build(device),
            "histograms at every step": lambda: build(device, hook=histogram),
        }
        timed = [ThreadTimed(make()) for make in contenders.values()]
        ready = [each.ready for each in timed]
        times = alternate(ready, rounds=options.blocks * BLOCK, device=device)
        recorder.close()
        size, steps = path.stat().st_size, len(read_run(path).steps)
    wall = [in_blocks(each["wall"]) for each in times]
    thread = [in_blocks(each.times()) for each in timed]
    rows = [
        row(name, mine, wall[0])
        | {f"thread_{what}": number for what, number in numbers(its, thread[0]).items()}
        for name, mine, its in zip(contenders, wall, thread, strict=True)
    ]
    recorded, again = (
        all(map(torch.equal, ready[0].result(), ready[place].result())) for place in (1, 2)
    )
    # On a GPU two runs of one program may differ: then nothing is said of recording.
    if again and not recorded:
        sys.exit("recording has changed the weights")
    return {
        "parameters": sum(tensor.numel() for tensor in ready[0].result()),
        "tensors": len(ready[0].result()),
        "tokens_a_step": ROWS * LENGTH,
        "device": options.device,
        "same_weights": recorded,
        "threads": options.threads,
        "blocks": options.blocks,
        "bytes_a_step": round(size / steps),
        "rows": rows,
    }


def many_tensors(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of small tensors, more and more of them, recorded and not; processor's time, on a GPU
    that of the thread that steps."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = []
    for count in TENSORS:
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(Path(folder) / "a.jsonl", detail_every=10, log=False)
            timed = [
                ThreadTimed(small_steps(count, device)),
                ThreadTimed(small_steps(count, device, record=recorder)),
            ]
            ready = [each.ready for each in timed]
            times = alternate(ready, rounds=options.blocks * BLOCK, device=device)
            recorder.close()
            if not all(map(torch.equal, ready[0].result(), ready[1].result())):
                sys.exit("recording has changed the weights")
        blocks = [
            in_blocks(each.times() if device.type == "cuda" else its["cpu"])
            for each, its in zip(timed, times, strict=True)
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
    return {"device": options.device, "blocks": options.blocks, "rows": rows}


class ThreadTimed:
    """A contender that keeps what its runs take of the processor's time of this thread."""

    def __init__(self, ready: Ready) -> None:
        self._run, self._times = ready.run, []
        self.ready = replace(ready, run=self._timed)

    def _timed(self) -> None:
        begin = time.thread_time()
        self._run()
        self._times.append((time.thread_time() - begin) * 1e3)

    def times(self) -> list[float]:
        """Milliseconds, of the rounds that count."""
        return self._times[WARM_UP:]


def in_blocks(times: list[float]) -> list[float]:
    """Of a step, block by block."""
    return [sum(times[k : k + BLOCK]) / BLOCK for k in range(0, len(times), BLOCK)]


def small_steps(count: int, device: torch.device, record: Recorder | None = None) -> Ready:
    """A control over `count` tensors; `run` is one step on gradients that stay."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(32, 8).to(device)) for _ in range(count)]
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
    whose = "training thread" if found["device"] == "cuda" else "processor"
    lines = [f"| tensors | ms a step, of the {whose} | added by recording |", "|---|---|---|"]
    for each in found["rows"]:
        lines.append(
            f"| {each['tensors']} | {each['plain_ms']:.3f} | {each['added_ms']:+.3f} ms "
            f"({each['added_ms_p10']:+.3f} to {each['added_ms_p90']:+.3f}) |"
        )
    return "\n".join(lines)


def build(
    device: torch.device,
    *,
    record: Recorder | None = None,
    hook: Callable[[Tensor], None] | None = None,
) -> Ready:
    """A model, its control and its batches; `run` is one training step."""
    text = python_documentation()
    torch.manual_seed(0)
    model = GPT(vocabulary=len(text.vocabulary), length=LENGTH, width=WIDTH, layers=LAYERS, heads=6)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    control = GradientControl(optimizer, model=model, scale=None, clip=1.0, record=record)
    batches = Batches(text, rows=ROWS, length=LENGTH, seed=0)
    if hook is not None:
        for param in model.parameters():
            param.register_hook(hook)

    def step() -> None:
        inputs, targets = (each.to(device) for each in batches.draw())
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
    return {"contender": name, **numbers(mine, plain)}


def numbers(mine: list[float], plain: list[float]) -> dict[str, float]:
    """The same of one measure."""
    added = [(a / b - 1) * 100 for a, b in zip(mine, plain, strict=True)]
    return {
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
        "| | ms a step (10 % to 90 %) | added (10 % to 90 % of blocks) | of the training thread | "
        "added |",
        "|---|---|---|---|---|",
    ]
    for each in found["rows"]:
        lines.append(
            f"| {each['contender']} | {each['median_ms']:.1f} ({each['p10_ms']:.1f} to "
            f"{each['p90_ms']:.1f}) | {each['added_percent']:+.2f} % "
            f"({each['added_percent_p10']:+.2f} to {each['added_percent_p90']:+.2f}) | "
            f"{each['thread_median_ms']:.2f} | {each['thread_added_percent']:+.2f} % "
            f"({each['thread_added_percent_p10']:+.2f} to "
            f"{each['thread_added_percent_p90']:+.2f}) |"
        )
    return "\n".join(lines)
