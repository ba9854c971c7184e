"""The task of `task.py` for Lightning's Trainer, in any of its ways, and for Fabric."""

from __future__ import annotations

import logging

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations import task

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def module_of(package, **methods):
    """A LightningModule of that package over the task's network; `methods` are added to it.

    `optimizer` (a maker), `schedule` (a function of the optimizer) and `frame` are its settings.
    """

    class Lit(package.LightningModule):
        def __init__(self, optimizer="sgd", schedule=None):
            super().__init__()
            self.net = task.Network()
            self.optimizer, self.schedule = optimizer, schedule
            self.losses, self.rates = [], []

        def training_step(self, batch, _):
            loss = self.net(batch[0]).mean()
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, *_):
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self):
            made = task.OPTIMIZERS[self.optimizer](self.parameters())
            if self.schedule is None:
                return made
            return {"optimizer": made, "lr_scheduler": self.schedule(made)}

    return type("Lit", (Lit,), methods)


def half(package, **settings):
    """What `precision="16-mixed"` is, on a CPU, where Lightning does not take it."""
    scaler = torch.amp.GradScaler("cpu", **settings)
    return package.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)


def precision_of(package, precision):
    if precision == "16-mixed":
        return {"plugins": [half(package)]}
    return {"precision": precision}


def loader(steps=task.STEPS, *, accumulate=1, bad=task.BAD):
    rows = task.rows(steps, accumulate=accumulate, bad=bad)
    return DataLoader(TensorDataset(rows), batch_size=task.BATCH)


def fitted(package, module, *, data=None, ckpt_path=None, **settings):
    """The Trainer that has trained `module`."""
    trainer = package.Trainer(**{**QUIET, **settings})
    accumulate = settings.get("accumulate_grad_batches", 1)
    data = loader(accumulate=accumulate) if data is None else data
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


class Resumable:
    """The batches of `task.py`, and where it stands: Lightning goes on in the midst of an epoch."""

    def __init__(self, steps=task.STEPS, *, accumulate=1, bad=task.BAD):
        self.batches, self.at = task.batches(steps, accumulate=accumulate, bad=bad), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield [self.batches[self.at - 1]]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
