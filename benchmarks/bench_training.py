"""Whole training steps: forward, backward, scale + check + clip + AdamW, zero_grad.

    python benchmarks/bench_training.py                 # CPU, float32
    python benchmarks/bench_training.py --device cuda   # float16 autocast
    python benchmarks/bench_training.py --device cuda --rows 48-layers -o training.json

Each contender trains its own GPT from the same weights on the same batches. A timed call is ten steps with one
synchronization at the end, as in a training loop; times are per step. The limit is below every norm, so all contenders
clip at every step.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from contenders import Problem, control_step, scaler_step
from harness import Contender, Ready, Row, arguments, compete, environment, measure_rows
from torch import Tensor, nn
from versions import V2, V3

LOOP, LIMIT, SCALE = 10, 0.01, 2.0**10


@dataclass(frozen=True)
class Work:
    """A model and its batch."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    batch: tuple[int, int]
    """Rows and tokens."""
    rounds: int = 9


WORK = {
    "124M-8x512": Work(50257, 768, 12, 12, (8, 512)),
    "124M-32x1024": Work(50257, 768, 12, 12, (32, 1024), rounds=5),
    "1.6M-8x128": Work(96, 128, 8, 4, (8, 128), rounds=21),
    "48-layers": Work(96, 256, 48, 4, (8, 128)),
    "1.6M-2x32": Work(96, 128, 8, 4, (2, 32), rounds=21),
    "48-narrow": Work(96, 32, 48, 2, (1, 8)),
}
DEFAULT = {"cuda": ["124M-8x512", "124M-32x1024", "1.6M-8x128", "48-layers"], "cpu": ["1.6M-2x32", "48-narrow"]}
QUICK = Work(16, 8, 2, 1, (1, 4), rounds=3)


class GPT(nn.Module):
    """A GPT with tied embeddings: 12 tensors per layer and 4 more. The same weights at every construction."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(work.vocabulary, work.width), nn.Embedding(work.batch[1], work.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        options: Any = {"dropout": 0.0, "activation": F.gelu, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(work.width, work.heads, 4 * work.width, **options) for _ in range(work.layers)
        )
        self.norm = nn.LayerNorm(work.width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(work.batch[1]))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.tokens(inputs) + self.positions.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), targets.flatten())


def ready(
    work: Work,
    device: torch.device,
    make_step: Callable[[Problem, Any], Callable[[], None]],
    package: Any,
    *,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    seed: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Ready:
    """A contender with its own model, wrapped by `wrap`; its timed call is ten steps, on a GPU in `dtype`."""
    model, generator = wrap(GPT(work).to(device)), torch.Generator().manual_seed(seed)
    batches = itertools.cycle(torch.randint(work.vocabulary, (4, 2, *work.batch), generator=generator).to(device))

    def loss() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            return model(*next(batches))  # type: ignore[no-any-return]

    params = list(model.parameters())
    # eps is as large as a clipped gradient; see Workload.eps.
    eps = LIMIT / math.sqrt(sum(param.numel() for param in params))
    step = make_step(Problem(params, loss, LIMIT, SCALE, 1e-4, eps, Tensor.backward), package)

    def loop() -> None:
        for _ in range(LOOP):
            model.zero_grad()
            step()

    return Ready(loop, params, {"loop": lambda: None}, steps=LOOP)


def measure(name: str, options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Times all contenders on one model."""
    work = QUICK if options.quick else WORK[name]
    scaler, control = partial(ready, work, device, scaler_step), partial(ready, work, device, control_step)
    contenders = [
        Contender("torch", scaler),
        Contender("0.2 drop-in", scaler, V2),
        Contender("0.3 drop-in", scaler, V3),
        Contender("0.2 control, optim", control, V2),
        Contender("0.3 control, optim", control, V3),
    ]

    def start() -> Iterator[Tensor]:
        return GPT(work).to(device).parameters()

    sizes = [param.numel() for param in start()]
    return compete(
        f"{name}: {sum(sizes) / 1e6:.1f} M in {len(sizes)} tensors",
        contenders,
        device=device,
        rounds=options.rounds or work.rounds,
        modes=["loop"],
        start=start,
        # After 30 steps. Later, models that differ by rounding drift apart. Float16 training is not reproducible.
        tolerance=5e-2 if device.type == "cuda" else 2e-3,
        compare_after=False,
    )


def main() -> None:
    options = arguments("Whole training steps beside torch's.", list(WORK)).parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    names = options.rows or DEFAULT[options.device]
    facts = environment(options.commit)
    measure_rows(names, lambda name: measure(name, options, device), facts, options.output)


if __name__ == "__main__":
    main()
