"""Lightning and Fabric train as their users write it; the losses of each step are printed.

Each line is a JSON list: the name of a case, and by step what its own loop ran backward.
"""

import json
import logging
import sys
import warnings

import torch
from lightning import Fabric, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


def batches(count=8):
    inputs = torch.randn(4 * count, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=4)


class Automatic(LightningModule):
    def __init__(self, kind="SGD"):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kind = kind
        self.losses = []

    def training_step(self, batch, number):
        loss = self.net(batch[0]).square().mean() + 0.5
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return getattr(torch.optim, self.kind)(self.parameters(), lr=0.05)


class Manual(Automatic):
    def __init__(self, every, divide):
        super().__init__()
        self.automatic_optimization = False
        self.every, self.divide = every, divide

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.manual_backward(loss / self.every if self.divide else loss)
        if (number + 1) % self.every == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def windows(losses, size):
    return [losses[k : k + size] for k in range(0, len(losses), size)]


def fit(name, model, *, every=None, divisor=1, **options):
    """`every` losses belong to a step, and Lightning or the module has divided by `divisor`."""
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=1, **options,
    )  # fmt: skip
    trainer.fit(model, batches())
    if every is not None:
        print(json.dumps([name, [sum(w) / divisor for w in windows(model.losses, every)]]))
        return
    first, evaluations = [], len(model.losses) // 8
    for number in range(8):  # Each step evaluates the closure as often as it likes: the first.
        first.append(model.losses[number * evaluations])
    print(json.dumps([name, first]))


def fabric_loop(name, every):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(6, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(batches())
    losses = []
    for number, (inputs,) in enumerate(loader):
        last = (number + 1) % every == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(inputs).square().mean()
            losses.append(loss.item())
            fabric.backward(loss / every)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    print(json.dumps([name, [sum(w) / every for w in windows(losses, every)]]))


if __name__ == "__main__":
    seed_everything(0, verbose=False)
    fit("automatic", Automatic(), every=1)
    fit("accumulated", Automatic(), every=4, divisor=4, accumulate_grad_batches=4)
    fit("with a last window of two", Automatic("AdamW"), every=3, divisor=3,
        accumulate_grad_batches=3)  # fmt: skip
    fit("clipped", Automatic(), every=2, divisor=2, accumulate_grad_batches=2,
        gradient_clip_val=0.01)  # fmt: skip
    fit("bfloat16", Automatic(), every=4, divisor=4, accumulate_grad_batches=4,
        precision="bf16-mixed")  # fmt: skip
    fit("manual", Manual(1, False), every=1)
    fit("manual, divided", Manual(4, True), every=4, divisor=4)
    fit("manual, summed", Manual(2, False), every=2)
    fit("LBFGS", Automatic("LBFGS"))
    fabric_loop("Fabric", 4)
    sys.stdout.flush()
