"""A training step of a framework with its integration, beside the framework's own scaler and clip.

    python benchmarks/bench_frameworks.py [--device cuda] [--frameworks Accelerate,Lightning]
    python benchmarks/bench_frameworks.py --output benchmarks/results/frameworks_cpu.json

Everybody trains a model of their own, alike, on the same batches, with fused AdamW and a clip of
the norm at 1, as the framework's documentation has it:

    native        the framework alone: its scaler (fp16), its clip
    ours          the one line of gradilocks.integrations
    ours, optim   the same, and the optimizer is that of gradilocks.optim

Contenders take turns: a block of steps each, in another order each round; a block of a Trainer is a
`fit` or `train` of its own, whose first steps do not count. A block's time is the median of its
steps, from the end of one to the end of the next, with an idle device at both. What is told is the
median over the rounds, and of the ratio to the native block of the same round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn import functional as F

from gradilocks import optim
from gradilocks.demo.small_gpt import GPT

WAYS = ("native", "ours", "ours, optim")
PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("bf16", "fp16")}
VOCABULARY = 96
WARM_UP = 5
Block = Callable[[int], list[float]]
"""Takes so many steps and returns the seconds of each."""


class Work(nn.Module):
    """A model that returns its loss, and its batch: a few small layers, or a GPT."""

    def __init__(self, name: str, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        on_gpu = device == "cuda"
        if name == "small":
            hidden = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
            self.body: nn.Module = nn.Sequential(*hidden, nn.Linear(64, VOCABULARY))
            batch = torch.randn(16, 64)
            answers = torch.randint(VOCABULARY, (16,))
        else:
            width, layers, length, rows = (768, 12, 512, 8) if on_gpu else (128, 4, 32, 4)
            blocks = {"width": width, "layers": layers, "heads": width // 32}
            self.body = GPT(vocabulary=VOCABULARY, length=length, **blocks)
            batch = torch.randint(VOCABULARY, (rows, length))
            answers = torch.randint(VOCABULARY, (rows, length))
        self.to(device)
        self.batch, self.answers = batch.to(device), answers.to(device)

    def forward(self, batch: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        # The batch stays on the device: what a loader costs is the same for all.
        told = self.body(self.batch)
        return {"loss": F.cross_entropy(told.reshape(-1, VOCABULARY), self.answers.reshape(-1))}


class Clock:
    """When each step ended, with the device idle."""

    def __init__(self, device: str) -> None:
        self._on_gpu, self.ends = device == "cuda", list[float]()

    def tick(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def take(self) -> list[float]:
        ends, self.ends = self.ends, []
        return [later - sooner for sooner, later in itertools.pairwise(ends)]


def optimizer_of(model: nn.Module, way: str) -> Any:
    make = optim.AdamW if way == "ours, optim" else torch.optim.AdamW
    more = {} if way == "ours, optim" else {"fused": True}
    return make(model.parameters(), lr=1e-4, **more)


def with_accelerate(work: str, device: str, precision: str, way: str) -> Block:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision={"fp32": "no"}.get(precision, precision)
    )
    if way != "native":
        from gradilocks.integrations.accelerate import take_control

        take_control(accelerator, clip=1.0)
    model = Work(work, device)
    optimizer = optimizer_of(model, way)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    clock = Clock(device)

    def block(steps: int) -> list[float]:
        clock.tick()
        for _ in range(steps):
            with accelerator.accumulate(model):
                accelerator.backward(model()["loss"])
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            clock.tick()
        return clock.take()

    return block


def with_fabric(work: str, device: str, precision: str, way: str) -> Block:
    from lightning.fabric import Fabric

    named = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]
    fabric = Fabric(accelerator=device, devices=1, precision=named)
    model = Work(work, device)
    optimizer = optimizer_of(model, way)
    if way == "native" and precision == "fp16":  # Fabric cannot clip for a fused optimizer there.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = fabric.setup(model, optimizer)
    if way != "native":
        from gradilocks.integrations.fabric import control_for

        control_for(fabric, model, optimizer, clip=1.0)
    clock = Clock(device)

    def block(steps: int) -> list[float]:
        clock.tick()
        for _ in range(steps):
            optimizer.zero_grad()
            fabric.backward(model()["loss"])
            if way == "native":
                # Fabric's default raises at an overflow; with the control the clip is its own.
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            clock.tick()
        return clock.take()

    return block


def with_lightning(work: str, device: str, precision: str, way: str) -> Block:
    import lightning

    clock = Clock(device)
    named = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.work = Work(work, device)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.work()["loss"]

        def configure_optimizers(self) -> Any:
            # In mixed precision Lightning refuses to clip for a fused optimizer.
            if way == "native" and clips_by_itself:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)
            return optimizer_of(self, way)

    clips_by_itself = precision != "fp32"
    module = Module()

    class Ticks(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    def block(steps: int) -> list[float]:
        callbacks: list[Any] = [Ticks()]
        if way != "native":
            from gradilocks.integrations.lightning import GradientControlCallback

            callbacks.append(GradientControlCallback(clip=1.0))
        trainer = lightning.Trainer(
            accelerator=device,
            devices=1,
            precision=named,
            max_steps=steps,
            gradient_clip_val=1.0 if way == "native" else None,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows = torch.utils.data.DataLoader(torch.zeros(steps + 1, 1), batch_size=1)
        trainer.fit(module, rows)
        return clock.take()

    return block


def with_transformers(work: str, device: str, precision: str, way: str) -> Block:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(device)
    model = Work(work, device)

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    def block(steps: int) -> list[float]:
        callbacks: list[Any] = [Ticks()]
        if way != "native":
            from gradilocks.integrations.transformers import GradientControlCallback

            callbacks.append(GradientControlCallback(adopt=way == "ours, optim"))
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=1,
                use_cpu=device == "cpu",
                bf16=precision == "bf16",
                fp16=precision == "fp16",
                report_to=[],
                logging_steps=10,
                save_strategy="no",
                disable_tqdm=True,
            )
            rows = [{"batch": 0.0} for _ in range(steps)]
            trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
            trainer.train()
        return clock.take()

    return block


FRAMEWORKS = {
    "Accelerate": with_accelerate,
    "Transformers": with_transformers,
    "Lightning": with_lightning,
    "Fabric": with_fabric,
}


def measured(
    framework: str, work: str, device: str, precision: str, *, rounds: int, steps: int
) -> Iterator[dict[str, Any]]:
    """The rows of one competition."""
    blocks: dict[str, Block] = {}
    for way in WAYS:
        reset()
        blocks[way] = FRAMEWORKS[framework](work, device, precision, way)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(0)
    for number in range(rounds + 1):
        for way in order.sample(WAYS, len(WAYS)):
            taken = blocks[way](steps + WARM_UP)[WARM_UP:]
            if number:  # The first round compiles.
                seconds[way].append(statistics.median(taken))
    for way in WAYS:
        ratios = [
            native / mine for native, mine in zip(seconds["native"], seconds[way], strict=True)
        ]
        quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        yield {
            "framework": framework,
            "work": work,
            "precision": precision,
            "way": way,
            "ms": round(1e3 * statistics.median(seconds[way]), 4),
            "times_native": round(statistics.median(ratios), 4),
            "half_of_rounds": [round(quarters[0], 4), round(quarters[2], 4)],
        }


def reset() -> None:
    """Accelerate keeps the precision of the process's first Accelerator."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="default: all")
    parser.add_argument("--works", default="small,gpt", help="default: small,gpt")
    parser.add_argument("--precisions", help="default: fp32,bf16 on a CPU, bf16,fp16 on a GPU")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="of a block; default: 40")
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    precisions = (options.precisions or ",".join(PRECISIONS[options.device])).split(",")
    rows: list[dict[str, Any]] = []
    for work in options.works.split(","):
        for framework in options.frameworks.split(","):
            for precision in precisions:
                for row in measured(
                    framework,
                    work,
                    options.device,
                    precision,
                    rounds=options.rounds,
                    steps=options.steps,
                ):
                    rows.append(row)
                    low, high = row["half_of_rounds"]
                    print(
                        f"{work:6s} {framework:13s} {precision:5s} {row['way']:12s} "
                        f"{row['ms']:9.3f} ms  {row['times_native']:.3f}x  "
                        f"({low:.3f} to {high:.3f})",
                        flush=True,
                    )
    if options.output is not None:
        told = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment(torch.device(options.device)),
            "packages": versions(),
            "rounds": options.rounds,
            "steps": options.steps,
            "rows": rows,
        }
        options.output.write_text(json.dumps(told, indent=1) + "\n")


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("accelerate", "lightning", "transformers")}


if __name__ == "__main__":
    main()
