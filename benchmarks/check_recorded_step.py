"""Times the recorded step alone, beside torch's sequence and the time that its bytes take at copy bandwidth.

    PYTHONPATH=src python benchmarks/check_recorded_step.py [--only 124M,22M] [--out results.json]

Needs a GPU. wall: from an idle device until the device is idle again. host: until the call returns, with reading
`.grad` of each parameter. Medians in ms. "new": gradients allocated anew before each step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gradilocks import optim
from gradilocks.kernels.recorded_step import RecordedStep
from gradilocks.kernels.triton_kernels import StepTensors
from gradilocks.optim.fused_step import FusedStep

LR, LIMIT, SCALE = 1e-3, 1.0, 2.0**16
DEVICE = torch.device("cuda", 0)
BYTES = {torch.float32: 32, torch.bfloat16: 16}
"""Bytes per parameter that a step must move."""
Shapes = list[tuple[int, ...]]


def gpt(vocabulary: int, width: int, layers: int, context: int) -> Shapes:
    attention = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    mlp = [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(attention + mlp) * layers, (width,), (width,)]


def llama(vocabulary: int, width: int, inner: int, kv_width: int, layers: int, *, head: int) -> Shapes:
    layer = [(width, width), (kv_width, width), (kv_width, width), (width, width)]
    layer += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(vocabulary, width), *layer * layers, (width,), (head, width)]


def vit(width: int, layers: int, classes: int) -> Shapes:
    stem: Shapes = [(1, 1, width), (1, 1, width), (1, 4, width), (1, 197, width), (width, 3, 16, 16), (width,)]
    head: Shapes = [(width, width), (width,), (classes, width), (classes,), (classes // 10, width), (classes // 10,)]
    return [*stem, (width,), (width,), *gpt(1, width, layers, 1)[2:-2], (width,), (width,), *head]


def experts(vocabulary: int, width: int, inner: int, layers: int, count: int) -> Shapes:
    attention: Shapes = [(width, width)] * 4 + [(width,), (width,), (count, width)]
    expert = [(inner, width), (inner, width), (width, inner)]
    return [(vocabulary, width), *(attention + expert * count) * layers, (width,)]


WORK: dict[str, tuple[Shapes, torch.dtype]] = {
    "1.1B": (llama(32000, 2048, 5632, 256, 22, head=32000), torch.float32),
    # The embedding has 2^31 + 86,016 elements.
    "7.3B": (llama(524_309, 4096, 14_080, 1024, 24, head=1000), torch.bfloat16),
    "124M": (gpt(50257, 768, 12, 1024), torch.float32),
    "22M": (vit(384, 12, 1000), torch.float32),
    "0.3M": ([(96, 96), (96,), (96, 96), (96,)] * 16, torch.float32),
    "8M": ([(4000 - i % 3,) for i in range(2000)], torch.float32),
    "5000": (experts(32003, 1031, 501, 24, 64), torch.bfloat16),
}


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written bytes counted."""
    source = torch.ones(2**29, device=DEVICE)
    target = torch.empty_like(source)
    seconds = measure(lambda: target.copy_(source), lambda: None, 25)[0] / 1e3
    return 2 * source.numel() * source.element_size() / seconds


def recorded_step(params: list[Any], eps: float) -> Callable[[], None]:
    """Measure, decide and update by a RecordedStep, with the checks that a control makes each step."""
    optimizer = optim.AdamW(params, lr=LR, eps=eps)

    def number(value: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device=DEVICE)

    largest = torch.finfo(params[0].dtype).max
    step = StepTensors(
        rules=number([LIMIT, largest, 2.0, 0.5, 2000.0, 2.0**-24, 2.0**24, 1.0], torch.float64),
        scale=number(SCALE),
        growth_tracker=number(0, torch.int32),
        hysteresis=number(1, torch.int32),
        streak=number(0, torch.int32),
        steps=number(0, torch.int64),
        skip=number(0.0),
        divisor=number(1.0),
        multiplier=number(1.0, torch.float64),
    )
    fused = FusedStep.make([optimizer])
    assert fused is not None
    recorded = RecordedStep(params, step, order=2.0, fused=fused, layout=None)

    def run() -> None:
        assert fused.is_current()
        addresses = recorded.addresses_of([param.grad for param in params])
        assert addresses is not None
        recorded.run(addresses, is_unscaled=False, moves=True, overflow=None, loss=None)

    run.optimizer = optimizer  # type: ignore[attr-defined]  # A FusedStep does not keep it alive.
    return run


def torch_step(params: list[Any], eps: float) -> Callable[[], None]:
    """torch's sequence: unscale_, clip_grad_norm_, fused AdamW, update."""
    optimizer = torch.optim.AdamW(params, lr=LR, eps=eps, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE)
    scaler.scale(torch.zeros((), device=DEVICE))

    def run() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, LIMIT)
        scaler.step(optimizer)
        scaler.update()

    return run


def measure(run: Callable[[], None], prepare: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median wall and host time in ms."""
    walls, hosts = [], []
    for i in range(rounds + 4):
        prepare()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        if i >= 4:
            walls.append((time.perf_counter() - begin) * 1e3)
            hosts.append(host * 1e3)
    return statistics.median(walls), statistics.median(hosts)


def time_contender(name: str, contender: str, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Times one contender on one row, with standing and with new gradients."""
    shapes, dtype = WORK[name]
    count = sum(map(math.prod, shapes))
    params = [torch.nn.Parameter((torch.randn(shape, device=DEVICE) * 0.02).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param).mul_(10.0 / math.sqrt(count) * SCALE)
    saved = None if name == "7.3B" else [param.grad.clone() for param in params]
    run = (torch_step if contender == "torch" else recorded_step)(params, 1.0 / math.sqrt(count))
    floor = count * BYTES[dtype] / bandwidth * 1e3

    def refill() -> None:
        if saved is not None:
            torch._foreach_copy_([param.grad for param in params], saved)

    def allocate() -> None:
        assert saved is not None
        order = random.sample(range(len(params)), len(params))
        new = {i: saved[i].clone() for i in order}
        for i, param in enumerate(params):
            param.grad = new[i]

    for mode, prepare in (("standing", refill), ("new", allocate)):
        if mode == "standing" or saved is not None:
            wall, host = measure(run, prepare, 15 if count > 10**9 else 31)
            yield {"work": name, "contender": contender, "mode": mode, "wall": wall, "host": host, "floor": floor}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="1.1B,7.3B,124M,22M,0.3M,8M,5000")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for name in arguments.only.split(","):
        for contender in ("torch", "recorded"):
            if WORK[name][1] is torch.bfloat16 and contender == "torch":
                continue  # torch's unscale_ does not take bfloat16 gradients.
            for row in time_contender(name, contender, bandwidth):
                rows.append(row)
                numbers = [f"{key} {row[key]:8.4f}" for key in ("wall", "host", "floor")]
                ratio = row["wall"] / row["floor"]
                print(f"{name:6s} {contender:9s} {row['mode']:9s}", *numbers, f"of the floor {ratio:6.3f}", flush=True)
            torch.cuda.empty_cache()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
