"""Scale + check + clip + AdamW: what one step costs after backward, against torch's own ways.

    python benchmarks/bench_step.py                # 124 M and 1 M parameters, CPU
    python benchmarks/bench_step.py --size 1M --rounds 200

Every contender starts each round from the same scaled gradients, copied in outside the clock, and
ends with the same parameters; the run stops if they are not the same. The norm is above the limit,
so every contender has to clip; `--limit inf` makes it so that nobody has to.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness import Contender, Row, alternate, environment, save, table
from torch import Tensor

import gradilocks

SCALE = 2.0**16


def gpt_shapes(vocabulary: int, width: int, layers: int, context: int) -> Iterator[tuple[int, ...]]:
    """A GPT-2-like model: 148 tensors with 12 layers."""
    yield from ((vocabulary, width), (context, width))
    for _ in range(layers):
        yield from ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width))
        yield (width,)
    yield from ((width,), (width,))


SIZES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "124M": lambda: list(gpt_shapes(50257, 768, 12, 1024)),
    "1M": lambda: list(gpt_shapes(2048, 80, 12, 256)),
}


class Workload:
    """Parameters, and the scaled gradients that every round starts from."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.start = [torch.randn(s, generator=generator) * 0.02 for s in shapes]
        self.scaled = [torch.randn(s, generator=generator) * 1e-3 * SCALE for s in shapes]
        self.loss = torch.ones((), requires_grad=True)

    def parameters(self) -> list[Tensor]:
        """A fresh copy of the parameters, with room for gradients."""
        made = [tensor.clone().requires_grad_() for tensor in self.start]
        for param in made:
            param.grad = torch.zeros_like(param)
        return made

    def put_gradients(self, params: list[Tensor]) -> None:
        """Scaled gradients, as backward would leave them."""
        for param, grad in zip(params, self.scaled, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)


def with_scaler(
    name: str,
    load: Workload,
    limit: float,
    scaler: torch.amp.GradScaler,
    clip: Callable[..., Tensor],
    *,
    fused: bool,
) -> tuple[Contender, list[Tensor]]:
    """The loop that people have: unscale_, clip_grad_norm_, step, update."""
    params = load.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=fused)

    def run() -> None:
        scaler.scale(load.loss)
        scaler.unscale_(optimizer)
        clip(params, limit)
        scaler.step(optimizer)
        scaler.update()

    return Contender(name, run, lambda: load.put_gradients(params)), params


def with_control(name: str, load: Workload, limit: float) -> tuple[Contender, list[Tensor]]:
    """GradientControl over torch's fused AdamW."""
    params = load.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    control = gradilocks.GradientControl(optimizer, clip=limit)

    def run() -> None:
        control.scale_loss(load.loss)
        control.step()

    return Contender(name, run, lambda: load.put_gradients(params)), params


def step_rows(size: str, *, limit: float, rounds: int) -> list[Row]:
    """Times one workload and checks that all contenders did the same work."""
    load = Workload(SIZES[size]())
    torch_clip = torch.nn.utils.clip_grad_norm_
    made = [
        with_scaler(
            "torch, fused AdamW", load, limit, torch.amp.GradScaler("cpu"), torch_clip, fused=True
        ),
        with_scaler(
            "torch, default AdamW",
            load,
            limit,
            torch.amp.GradScaler("cpu"),
            torch_clip,
            fused=False,
        ),
        with_scaler(
            "drop-in, torch fused AdamW",
            load,
            limit,
            gradilocks.GradScaler("cpu"),
            gradilocks.clip_grad_norm_,
            fused=True,
        ),
        with_control("GradientControl, torch fused AdamW", load, limit),
    ]
    count = sum(t.numel() for t in load.start)
    clipped = "no clipping needed" if limit == math.inf else "clipping"
    workload = f"{count / 1e6:.1f} M in {len(load.start)} tensors, {clipped}"
    rows = alternate(workload, [contender for contender, _ in made], rounds=rounds)
    for contender, params in made[1:]:
        for expected, actual in zip(made[0][1], params, strict=True):
            # torch's norm over 124 M elements is off by 1e-3, ours by 1e-7: AdamW sees nearly none
            # of it, because it divides by the gradients' own size.
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5, msg=contender.name)
    return rows


def clip_rows(size: str, *, limit: float, rounds: int) -> list[Row]:
    """clip_grad_norm_ alone."""
    load = Workload(SIZES[size]())
    mine, theirs = load.parameters(), load.parameters()
    what = "nothing to clip" if limit == math.inf else "clipping"
    count = sum(t.numel() for t in load.start)
    return alternate(
        f"clip_grad_norm_ alone, {count / 1e6:.1f} M, {what}",
        [
            Contender(
                "torch",
                lambda: torch.nn.utils.clip_grad_norm_(theirs, limit),
                lambda: load.put_gradients(theirs),
            ),
            Contender(
                "gradilocks",
                lambda: gradilocks.clip_grad_norm_(mine, limit),
                lambda: load.put_gradients(mine),
            ),
        ],
        rounds=rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=0, help="default: 31, or 300 if small")
    parser.add_argument("--limit", type=float, default=None, help="the norm's limit; default both")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    rows: list[Row] = []
    print(environment(), flush=True)
    for size in SIZES if options.size == "all" else [options.size]:
        rounds = options.rounds or (31 if size == "124M" else 300)
        for limit in [1.0, math.inf] if options.limit is None else [options.limit]:
            for measured in (step_rows, clip_rows):
                rows += measured(size, limit=limit, rounds=rounds)
                print(f"{rows[-1].workload}: measured", flush=True)
    print(table(rows))
    if options.output:
        save(options.output, rows)


if __name__ == "__main__":
    main()
