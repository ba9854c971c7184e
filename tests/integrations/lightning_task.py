"""A small training for Lightning's Trainer and Fabric, and the same as a native loop with GradientControl.

The last column of a batch marks the bad one, in which the gradient of `middle.weight`, and of nothing else, is Inf.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradilocks.optim
from gradilocks import GradientControl

WIDTH, BATCH, STEPS, BAD = 6, 4, 6, 2

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


class Network(nn.Module):
    """Three layers; `forward` returns the loss of each row."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(WIDTH, 8)
            self.middle = nn.Linear(8, 8)
            self.head = nn.Linear(8, 1)
        self.is_bad = False
        self.middle.weight.register_hook(lambda grad: torch.full_like(grad, torch.inf) if self.is_bad else grad)

    def forward(self, rows: Tensor) -> Tensor:
        rows, marker = rows[:, :WIDTH], rows[:, WIDTH]
        self.is_bad = bool(marker.amax() > 0)
        hidden = torch.tanh(self.middle(torch.tanh(self.first(rows))))
        return 0.01 * (self.head(hidden).float().squeeze(-1) - rows.float().sum(-1)).square()


def rows(steps: int = STEPS, *, accumulate: int = 1, bad: int | None = BAD) -> Tensor:
    """`steps * accumulate` batches of BATCH rows; the last batch of the bad step is marked."""
    made = torch.randn(steps * accumulate * BATCH, WIDTH, generator=torch.Generator().manual_seed(5))
    marker = torch.zeros(len(made), 1)
    if bad is not None:
        last = ((bad + 1) * accumulate - 1) * BATCH
        marker[last : last + BATCH] = 1.0
    return torch.cat([made, marker], dim=1)


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


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


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
