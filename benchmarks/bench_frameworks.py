"""Training steps in frameworks: the Gradilocks integration beside the framework's own scaler and clip.

    python benchmarks/bench_frameworks.py                 # CPU, float32: no contender scales there
    python benchmarks/bench_frameworks.py --device cuda   # float16 autocast with dynamic scaling

Every contender trains its own model from the same weights on the same batch, with AdamW and a limit below every norm. A
timed call is 20 steps; times are per step. For lightning-trainer and transformers it is a whole `fit()` or `train()` of
200 steps with its start, which takes longer with an integration: the first batch searches for a second control.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import Contender, Ready, Row, arguments, compete, environment, measure_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader
from versions import V3

STEPS, TRAINER_STEPS, LIMIT = 20, 200, 0.01
NATIVE, INTEGRATION, OWN = "framework", "integration, torch fused", "integration, optim"
Batch = dict[str, Tensor]


class Model(nn.Module):
    """A perceptron that returns its loss in the form that transformers expects."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(24)])

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def optimizer_of(model: nn.Module, contender: str) -> Any:
    # eps is as large as a clipped gradient, so that a wrong multiplier changes the result.
    options = {"lr": 1e-4, "eps": LIMIT / sum(param.numel() for param in model.parameters()) ** 0.5}
    if contender != OWN:
        return torch.optim.AdamW(model.parameters(), fused=True, **options)
    from gradilocks import optim

    return optim.AdamW(model.parameters(), **options)


def own_loop(contender: str, width: int, device: str, batch: Batch, *, is_fabric: bool) -> Ready:
    """A training loop over Fabric or Accelerate."""
    plain = Model(width).to(device)
    runner: Any
    if is_fabric:
        from lightning import Fabric

        runner = Fabric(accelerator=device, devices=1, precision="16-mixed" if device == "cuda" else "32-true")
        model, optimizer = runner.setup(plain, optimizer_of(plain, contender))
    else:
        from accelerate import Accelerator

        runner = Accelerator(cpu=device == "cpu", mixed_precision="fp16" if device == "cuda" else "no")
        model, optimizer = runner.prepare(plain, optimizer_of(plain, contender))
    if contender != NATIVE:
        from gradilocks.integrations import control_for

        control_for(runner, model, optimizer, clip=LIMIT)

    def loop() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            runner.backward(model(**batch)["loss"])
            if not is_fabric:
                runner.clip_grad_norm_(model.parameters(), LIMIT)
            elif contender == NATIVE:
                runner.clip_gradients(model, optimizer, max_norm=LIMIT, error_if_nonfinite=False)
            optimizer.step()

    return Ready(loop, list(plain.parameters()), {"loop": lambda: None}, steps=STEPS)


def lightning_trainer(contender: str, width: int, device: str, batch: Batch) -> Ready:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(width)

        def training_step(self, rows: Batch, index: int) -> Tensor:
            return self.model(**rows)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.model, contender)

    module, precision = Module().to(device), "16-mixed" if device == "cuda" else "32-true"
    quiet: Any = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)

    def fit() -> None:
        callbacks: list[Any] = []
        if contender != NATIVE:
            from gradilocks.integrations.lightning import GradientControlCallback

            callbacks.append(GradientControlCallback())
        options: Any = {"accelerator": device, "devices": 1, "precision": precision, "callbacks": callbacks, **quiet}
        trainer = Trainer(max_steps=TRAINER_STEPS, gradient_clip_val=LIMIT, **options)
        trainer.fit(module, DataLoader([batch] * TRAINER_STEPS, batch_size=None))  # type: ignore[arg-type]

    return Ready(fit, list(module.parameters()), {"loop": lambda: None}, steps=TRAINER_STEPS)


def transformers_trainer(contender: str, width: int, device: str, batch: Batch) -> Ready:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model = Model(width).to(device)
    pairs = zip(batch["x"].cpu(), batch["labels"].cpu(), strict=True)
    rows, folder = [{"x": x, "labels": y} for x, y in pairs], tempfile.mkdtemp()
    settings: Any = {"fp16": device == "cuda", "use_cpu": device == "cpu", "report_to": [], "disable_tqdm": True}
    settings |= {"save_strategy": "no", "logging_strategy": "no", "lr_scheduler_type": "constant"}

    def train() -> None:
        made: Any = Trainer
        if contender != NATIVE:
            from gradilocks.integrations import transformers

            made = transformers.GradientControlTrainer
        size = {"max_steps": TRAINER_STEPS, "max_grad_norm": LIMIT, "per_device_train_batch_size": len(rows)}
        optimizers = (optimizer_of(model, contender), None)
        trainer = made(model, TrainingArguments(folder, **settings, **size), train_dataset=rows, optimizers=optimizers)
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    return Ready(train, list(model.parameters()), {"loop": lambda: None}, steps=TRAINER_STEPS)


WORK: dict[str, Callable[..., Ready]] = {
    "fabric": partial(own_loop, is_fabric=True),
    "accelerate": partial(own_loop, is_fabric=False),
    "lightning-trainer": lightning_trainer,
    "transformers": transformers_trainer,
}


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    width = 8 if options.quick else 1024 if options.device == "cuda" else 64
    x, y = torch.randn(2, 16, width, generator=torch.Generator().manual_seed(1)).to(options.device)

    def build(contender: str, package: Any) -> Ready:
        return WORK[name](contender, width, options.device, {"x": x, "labels": y})

    def start() -> Iterator[Tensor]:
        return Model(width).to(options.device).parameters()

    return compete(
        f"{name}: {sum(p.numel() for p in start()) / 1e6:.2f} M in 48 tensors",
        [Contender(contender, partial(build, contender), V3, NATIVE) for contender in (NATIVE, INTEGRATION, OWN)],
        device=torch.device(options.device),
        rounds=2 if options.quick else options.rounds or 15,
        modes=["loop"],
        start=start,
        tolerance=5e-2 if options.device == "cuda" else 2e-3,
        compare_after=False,
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    given = arguments("Steps in frameworks, with and without Gradilocks.", list(WORK)).parse_args()
    measure_rows(given.rows or WORK, lambda name: measure(name, given), environment(given.commit), given.output)
