"""Whole training steps: forward, backward, scale + check + clip + AdamW, zero_grad.

    python benchmarks/bench_training.py                # two small models, CPU, fp32 with a scaler
    python benchmarks/bench_training.py --device cuda  # the README's models, fp16; two minutes
    python benchmarks/bench_training.py --device cuda --models 48-layers --rounds 101

Each contender trains a model of its own from the same weights on the same batches:

    torch              GradScaler, clip_grad_norm_, fused AdamW
    drop-in            gradilocks.GradScaler and clip_grad_norm_, torch's fused AdamW
    GradientControl    over gradilocks.optim.AdamW
    the same, recording to a run file

First they take single steps in turn: on the wall from an idle device to an idle device, of the host
alone until the step returns, and on a GPU by events. Then they take blocks of ten steps in turn,
with the device waited for at the end of a block only, as in a real loop ("loop", per step). The
recorder looks at every tensor once in ten steps, as by default, and writes as often, five times as
often as by default: every block has all in it that recording does.

The scale is held and the limit is below every norm, so everybody steps and everybody clips. Before
and after all that, everybody goes once through the batches, and the run ends with status 1 if
somebody's loss lies elsewhere than torch's (as a part of the way that torch's has gone), if a norm
is not above the limit, if a scale has moved, or if a step is missing in the run file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compete import free
from environment import environment
from harness import WARM_UP, Contender, Ready, Times, alternate
from torch import Tensor, nn
from torch.nn import functional as F

import gradilocks
from gradilocks import optim
from report import Notes, Row, rows_of, save

LOOP = 10
"""Steps between two waits for the device."""
LR, LIMIT, SCALE = 1e-4, 0.01, 2.0**10
NEVER = 10**9
"""Steps until the scale grows."""
BATCHES = 4
TOLERANCE = 0.05
"""How far losses may lie apart at the end, as a part of the way they have gone."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


# --- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and a perceptron behind a LayerNorm each: 12 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        rows, length, width = stream.shape
        parts = self.queries_keys_values(self.attention_norm(stream))
        queries, keys, values = parts.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        stream = stream + self.mixed(seen.transpose(1, 2).reshape(rows, length, width))
        return stream + self.narrower(F.gelu(self.wider(self.perceptron_norm(stream))))


class Deep(nn.Module):
    """Blocks and a last LayerNorm, from vectors to vectors: 578 tensors with 48 layers."""

    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, stream: Tensor) -> Tensor:
        out: Tensor = self.norm(self.blocks(stream))
        return out


class GPT(nn.Module):
    """Deep between an embedding and a head that share their weights: 148 tensors with 12 layers."""

    def __init__(self, *, vocabulary: int, length: int, width: int, layers: int, heads: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.deep = Deep(width=width, layers=layers, heads=heads)
        for embedding in (self.tokens, self.places):  # As GPT-2 begins, or the logits are huge.
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return F.linear(self.deep(self.tokens(codes) + self.places(places)), self.tokens.weight)


@dataclass(frozen=True)
class Work:
    """A model, its batch, and how often it is timed unless somebody says otherwise."""

    width: int
    layers: int
    heads: int
    rows: int
    length: int
    vocabulary: int = 0
    """0: there is none, vectors come and vectors go."""
    rounds: int = 41
    loops: int = 8

    def model(self, device: torch.device) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(0)
        blocks = {"width": self.width, "layers": self.layers, "heads": self.heads}
        if not self.vocabulary:
            return Deep(**blocks).to(device)
        return GPT(vocabulary=self.vocabulary, length=self.length, **blocks).to(device)

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets, drawn at random: there is something to learn by heart."""
        generator = torch.Generator().manual_seed(1)

        def drawn() -> Tensor:
            shape = self.rows, self.length
            if self.vocabulary:
                return torch.randint(self.vocabulary, shape, generator=generator).to(device)
            return torch.randn(*shape, self.width, generator=generator).to(device)

        return [(drawn(), drawn()) for _ in range(BATCHES)]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        told = model(inputs)
        if self.vocabulary:
            return F.cross_entropy(told.flatten(0, 1), targets.flatten())
        return F.mse_loss(told, targets)


GPT2 = {"vocabulary": 50257, "width": 768, "layers": 12, "heads": 12}
SMALL = {"vocabulary": 96, "width": 128, "layers": 8, "heads": 4}
MODELS = {
    "124M-8x512": Work(**GPT2, rows=8, length=512),
    "124M-32x1024": Work(**GPT2, rows=32, length=1024, rounds=21, loops=5),
    "1.6M-8x128": Work(**SMALL, rows=8, length=128, rounds=101, loops=20),
    "48-layers": Work(width=256, layers=48, heads=4, rows=8, length=128),
    "1.6M-2x32": Work(**SMALL, rows=2, length=32, rounds=101, loops=20),
    "48-narrow": Work(width=32, layers=48, heads=2, rows=1, length=8),
    "tiny": Work(vocabulary=16, width=8, layers=2, heads=1, rows=1, length=4),
}
DEFAULT_MODELS = {
    "cuda": ["124M-8x512", "124M-32x1024", "1.6M-8x128", "48-layers"],
    "cpu": ["1.6M-2x32", "48-narrow"],
}


# --- contenders -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainee:
    """One contender's training."""

    step: Callable[[], tuple[Tensor, Any]]
    """Takes a step; returns the loss, and something with the norm in it that `norm` can read."""
    norm: Callable[[Any], float]
    scale: Callable[[], float]
    tensors: list[Tensor]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


class Forward:
    """A model of one's own and the batches, in turn; a call returns the next one's loss."""

    def __init__(self, work: Work, device: torch.device, precision: str) -> None:
        self._work, self._device, self._dtype = work, device, DTYPES[precision]
        self.model, self._batches = work.model(device), work.batches(device)
        self._number = -1
        # As large as a clipped gradient: a wrong multiplier then shows in the weights.
        self.eps = LIMIT / math.sqrt(sum(param.numel() for param in self.model.parameters()))

    def __call__(self) -> Tensor:
        self._number += 1
        inputs, targets = self._batches[self._number % len(self._batches)]
        mixed = self._dtype is not torch.float32
        with torch.autocast(self._device.type, self._dtype, enabled=mixed):
            return self._work.loss(self.model, inputs, targets)


def in_torchs_loop(work: Work, device: torch.device, precision: str, *, ours: bool) -> Trainee:
    """unscale_, clip_grad_norm_, step, update: with torch's names, or with ours in their place."""
    forward = Forward(work, device, precision)
    params = list(forward.model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, eps=forward.eps, fused=True)
    made: Any = gradilocks.GradScaler if ours else torch.amp.GradScaler
    scaler = made(device.type, init_scale=SCALE, growth_interval=NEVER)
    clip = gradilocks.clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_

    def step() -> tuple[Tensor, Tensor]:
        loss = forward()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(params, LIMIT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach(), norm

    return Trainee(step, float, scaler.get_scale, params)


def with_control(
    work: Work, device: torch.device, precision: str, *, record: Any = None
) -> Trainee:
    """GradientControl over our own AdamW."""
    forward = Forward(work, device, precision)
    params = list(forward.model.parameters())
    control = gradilocks.GradientControl(
        optim.AdamW(params, lr=LR, eps=forward.eps),
        model=forward.model,
        scale=gradilocks.DynamicScale(init_scale=SCALE, growth_interval=NEVER),
        clip=LIMIT,
        record=record,
    )

    def step() -> tuple[Tensor, Any]:
        loss = forward()
        control.backward(loss)
        outcome = control.step()
        control.zero_grad()
        return loss.detach(), outcome

    return Trainee(step, lambda outcome: outcome.norm, lambda: control.scale, params)


# --- the competition ------------------------------------------------------------------------------


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    print(environment(device), flush=True)
    notes = Notes()
    rows: list[Row] = []
    extra: dict[str, Any] = {"precision": options.precision, "ends": {}, "recording": {}}
    begun = time.perf_counter()
    for name in options.models:
        rows += competed(name, options, device, notes, extra)
        free()
        print(f"{name}: measured, {time.perf_counter() - begun:.0f} s", flush=True)
        if options.output:
            save(options.output, rows, device=device, notes=notes, extra=extra)
    print(table(rows))
    for name, added in extra["recording"].items():
        print("{}: recording adds {ms:+.3f} ms a step, {percent:+.2f} %".format(name, **added))
    if notes.failed:
        sys.exit("Not everything is as it should be; the notes above say what.")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", default="", help=f"of {','.join(MODELS)}; default: by device")
    parser.add_argument(
        "--rounds", type=int, default=0, help="of single steps, and a fifth as many blocks"
    )
    parser.add_argument(
        "--precision", choices=list(DTYPES), default=None, help="default: fp16 on a GPU, else fp32"
    )
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    options.models = options.models.split(",") if options.models else DEFAULT_MODELS[options.device]
    options.precision = options.precision or ("fp16" if options.device == "cuda" else "fp32")
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"--models takes {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    if options.rounds < 0:
        parser.error(f"--rounds takes a number from 1 on, got {options.rounds}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    return options


def competed(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    notes: Notes,
    extra: dict[str, Any],
) -> list[Row]:
    """The rows of one model."""
    work = MODELS[name]
    rounds = options.rounds or work.rounds
    loops = max(1, options.rounds // 5) if options.rounds else work.loops
    given = work, device, options.precision
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with gradilocks.Recorder(path, flush_every=LOOP, detail_every=LOOP, log=False) as recorder:
            contenders = [
                Contender("torch", partial(in_torchs_loop, *given, ours=False), baseline=True),
                Contender("drop-in", partial(in_torchs_loop, *given, ours=True)),
                Contender("GradientControl, gradilocks.optim", partial(with_control, *given)),
                Contender("the same, recording", partial(with_control, *given, record=recorder)),
            ]
            trainees = [contender.build() for contender in contenders]
            firsts = [one_pass(trainee) for trainee in trainees]
            times = timed(trainees, rounds=rounds, loops=loops, device=device)
            lasts = [one_pass(trainee) for trainee in trainees]
        recorded = len(gradilocks.read_run(path).steps)
    taken = BATCHES + WARM_UP + rounds + LOOP * loops + BATCHES
    if recorded != taken:
        notes.say(f"{name}: {taken} steps, but {recorded} in the run file", failure=True)
    names = [contender.name for contender in contenders]
    compare(name, names, firsts, lasts, notes)
    extra["ends"][name] = {
        who: {"loss_of_the_first_pass": first["loss"], **last}
        for who, first, last in zip(names, firsts, lasts, strict=True)
    }
    extra["recording"][name] = added(times[2]["loop"], times[3]["loop"])
    return rows_of(described(name, work, trainees[0].tensors), contenders, times)


def timed(
    trainees: Sequence[Trainee], *, rounds: int, loops: int, device: torch.device
) -> list[Times]:
    """Single steps in turn, then blocks in turn."""

    def all_ready(take: Callable[[Trainee], Any]) -> list[Ready]:
        return [Ready(partial(take, each), lambda: None, lambda: ()) for each in trainees]

    times = alternate(all_ready(lambda each: each.step()), rounds=rounds, device=device)
    blocks = all_ready(lambda each: each.steps(LOOP))
    in_blocks = alternate(blocks, rounds=loops, device=device, warm_up=0)
    for mine, block in zip(times, in_blocks, strict=True):
        mine["loop"] = [ms / LOOP for ms in block["wall"]]
    return times


def one_pass(trainee: Trainee) -> dict[str, float]:
    """The mean loss over all batches, and norm and scale at the end."""
    told = [trainee.step() for _ in range(BATCHES)]
    losses = [float(loss) for loss, _ in told]
    norm = trainee.norm(told[-1][1])
    return {"loss": statistics.fmean(losses), "norm": norm, "scale": trainee.scale()}


def compare(
    model: str,
    names: Sequence[str],
    firsts: Sequence[dict[str, float]],
    lasts: Sequence[dict[str, float]],
    notes: Notes,
) -> None:
    """Says who has not done the work that torch has done."""
    way = abs(lasts[0]["loss"] - firsts[0]["loss"])
    for name, first, last in zip(names, firsts, lasts, strict=True):
        apart = max(
            abs(mine["loss"] - torchs["loss"])
            for mine, torchs in ((first, firsts[0]), (last, lasts[0]))
        )
        if not apart <= TOLERANCE * way:  # A NaN is not.
            why = f"its loss is {apart:.3g} away from torch's, which has gone {way:.3g}"
        elif not last["norm"] > LIMIT:
            why = f"a norm of {last['norm']:.3g} is not above the limit of {LIMIT:g}"
        elif last["scale"] != SCALE:
            why = f"its scale has gone from {SCALE:g} to {last['scale']:g}"
        else:
            continue
        notes.say(f"{model}: {name}: {why}", failure=True)


def added(plain: Sequence[float], recording: Sequence[float]) -> dict[str, float]:
    """What recording adds to a step: the median of what it adds to a round's block."""
    more = [mine - before for before, mine in zip(plain, recording, strict=True)]
    parts = [mine / before - 1 for before, mine in zip(plain, recording, strict=True)]
    return {"ms": statistics.median(more), "percent": 100 * statistics.median(parts)}


def described(name: str, work: Work, tensors: Sequence[Tensor]) -> str:
    """A model in a few words: `124M-8x512: GPT, 124.4 M in 148 tensors, 8 x 512`."""
    kind = "GPT" if work.vocabulary else "blocks"
    count = sum(tensor.numel() for tensor in tensors) / 1e6
    what = f"{kind} of {work.layers} layers, width {work.width}, {count:.1f} M in {len(tensors)}"
    return f"{name}: {what} tensors, batch {work.rows} x {work.length}"


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; ratios above 1 are faster than torch.

    The last measure is the host's until a step returns, or on a CPU the processor's, which does not
    depend on what else the machine does.
    """
    last = "host" if any("host" in row.times for row in rows) else "cpu"
    heads = ["wall ms", "10 % to 90 %", "loop ms", f"{last} ms", "×, wall", "×, loop"]
    heads.append(f"×, {last}")
    lines = [
        "| " + " | ".join(["model", "contender", *heads]) + " |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for before, row in zip([None, *rows], rows, strict=False):
        again = before is not None and before.workload == row.workload
        medians = {measure: f"{spread.median_ms:.3f}" for measure, spread in row.times.items()}
        wall = row.times["wall"]
        cells = ["" if again else row.workload, row.contender, medians["wall"]]
        cells += [f"{wall.p10_ms:.3f} to {wall.p90_ms:.3f}", medians["loop"], medians[last]]
        cells += [f"{row.faster[measure]:.3f}" for measure in ("wall", "loop", last)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
