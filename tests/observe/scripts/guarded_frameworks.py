"""Lightning's and Accelerate's trainings with NaN in one batch; prints what each of them leaves.

With `reference` as its argument that batch's step is left out by the script.
"""

import json
import logging
import sys
import warnings

import torch
from accelerate import Accelerator
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
REFERENCE = "reference" in sys.argv


def batches():
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    inputs[13, 2] = float("nan")  # In the fourth batch.
    return DataLoader(TensorDataset(inputs), batch_size=4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def left(model, optimizer):
    values = [each.tolist() for each in model.state_dict().values()]
    state = optimizer.state_dict()["state"]
    return [
        values,
        [{k: torch.as_tensor(v).tolist() for k, v in s.items()} for s in state.values()],
    ]


class Automatic(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, number):
        return self.net(batch[0]).square().mean()

    def optimizer_step(self, epoch, number, optimizer, closure):
        if REFERENCE and number == 3:
            closure()
        else:
            optimizer.step(closure=closure)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def lightning():
    model = Automatic()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(model, batches())
    return left(model, trainer.optimizers[0])


def accelerate():
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    for number, (inputs,) in enumerate(loader):
        accelerator.backward(model(inputs).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if not (REFERENCE and number == 3):
            optimizer.step()
        optimizer.zero_grad()
    return left(model, optimizer.optimizer)


for train in (lightning, accelerate):
    print(json.dumps([train.__name__, train()]))
