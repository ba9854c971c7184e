"""The small training of `planted_overflow` for Lightning's Trainer and Fabric, and as a loop with GradientControl."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import gradilocks.optim
from gradilocks import GradientControl
from integrations.planted_overflow import BAD_STEP as BAD
from integrations.planted_overflow import ROWS as BATCH
from integrations.planted_overflow import STEPS, Network, batches, weights

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: gradilocks.optim.AdamW(params, lr=0.01),
}
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


WARNINGS = (
    ".*does not have many workers",
    "The number of training batches",
    ".*is not supported by the model summary",
    "`isinstance.treespec, LeafSpec.` is deprecated",
    ".*`training_step` returned `None`",
    "Checkpoint directory .* exists and is not empty",
    "You're resuming from a checkpoint that ended before the epoch ended",
    "Be aware that when using `ckpt_path`, callbacks",
)
"""Warnings of Lightning about itself or about this small task."""

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def rows(steps: int = STEPS, *, accumulate: int = 1, bad: int | None = BAD) -> Tensor:
    """`steps * accumulate` batches of BATCH rows; the last batch of the bad step is marked."""
    return torch.cat(batches(steps, accumulate=accumulate, bad=bad))


def loader(steps: int = STEPS, *, accumulate: int = 1, bad: int | None = BAD) -> DataLoader:
    return DataLoader(TensorDataset(rows(steps, accumulate=accumulate, bad=bad)), batch_size=BATCH)


def steps_of(batches: Tensor, accumulate: int = 1) -> list[list[Tensor]]:
    """The batches of each step."""
    parts = list(batches.split(BATCH))
    return [parts[i : i + accumulate] for i in range(0, len(parts), accumulate)]


class Stateful:
    """Batches that continue where a checkpoint was written."""

    def __init__(self, part=slice(None)):
        self.batches, self.next = [rows[part] for (rows,) in steps_of(rows())], 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.next < len(self.batches):
            self.next += 1
            yield [self.batches[self.next - 1]]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def schedule(optimizer):
    """A learning rate that tells how often the schedule has advanced."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


def native(
    optimizer, *, precision="32-true", accumulate=1, with_schedule=False, bad=BAD, dtype=None, seed=3, **options
):
    """Weights, rates, control and skips of a plain loop. Fabric converts the batches to `dtype`."""
    model = Network(seed)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    control = GradientControl(optimizer, model=model, **options)
    scheduler = control.scheduler(schedule(optimizer)) if with_schedule else None
    rates, skipped = [], []
    for parts in steps_of(rows(accumulate=accumulate, bad=bad).to(dtype), accumulate):
        control.zero_grad()
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = model(part).mean()
            control.backward(loss / accumulate)
        skipped.append(control.step().skipped)
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights(model), rates, control, skipped


def assert_same(actual: list[Tensor], expected: list[Tensor], *, clip: object) -> None:
    """Bit for bit without a clip."""
    tolerance = 0.0 if clip is None else 1e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
