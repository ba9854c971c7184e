"""Lightning and Fabric train as their users write it, with one planted Inf.

Each line is the settings of a case, as JSON, in the order of the optimizers.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[3]))
from tests.integrations import task

for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Regression(LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.net = task.Network()
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = task.OPTIMIZERS[self.optimizer](self.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class ManualRegression(Regression):
    def __init__(self, optimizer, accumulate, clip):
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.accumulate, self.clip = accumulate, clip

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean() / self.accumulate
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulate == 0:
            optimizer = self.optimizers()
            if self.clip is not None:
                self.clip_gradients(
                    optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm"
                )
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def loader(case):
    return DataLoader(
        task.rows(accumulate=case["accumulate"], bad=case["bad"]), batch_size=task.BATCH
    )


def plugin(case, kind):
    if case["precision"] != "16-mixed":
        return {"precision": case["precision"]}
    return {"plugins": [kind("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}


def train(case):
    if case["loop"] == "automatic":
        model = Regression(case["optimizer"])
        own = {
            "accumulate_grad_batches": case["accumulate"],
            "gradient_clip_val": case["clip"],
        }
    else:
        model = ManualRegression(case["optimizer"], case["accumulate"], case["clip"])
        own = {}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **plugin(case, MixedPrecision),
        **own,
    )
    trainer.fit(model, loader(case))


def train_with_fabric(case):
    fabric = Fabric(accelerator="cpu", devices=1, **plugin(case, FabricMixedPrecision))
    model = task.Network()
    optimizer = task.OPTIMIZERS[case["optimizer"]](model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    model, optimizer = fabric.setup(model, optimizer)
    for number, batch in enumerate(fabric.setup_dataloaders(loader(case))):
        accumulating = (number + 1) % case["accumulate"] != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(model(batch).mean() / case["accumulate"])
        if not accumulating:
            if case["clip"] is not None:
                fabric.clip_gradients(
                    model, optimizer, max_norm=case["clip"], error_if_nonfinite=False
                )
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def case(loop, precision, optimizer, accumulate, clip, prefix):
    # Without a scaler the bad step is taken, and nothing after it is worth a look.
    bad = task.BAD if precision == "16-mixed" else task.STEPS - 1
    return locals()


CASES = [
    case("automatic", "16-mixed", "sgd", 1, None, "net."),
    case("automatic", "16-mixed", "sgd", 2, 0.05, "net."),
    case("automatic", "16-mixed", "fused adamw", 2, None, "net."),
    case("automatic", "bf16-mixed", "sgd", 2, 0.05, "net."),
    case("automatic", "32-true", "fused adamw", 1, None, "net."),
    case("automatic", "32-true", "ours", 2, 0.05, "net."),
    case("manual", "16-mixed", "sgd", 2, 0.05, "net."),
    case("manual", "16-mixed", "ours", 1, None, "net."),
    case("manual", "32-true", "sgd", 2, 0.05, "net."),
    case("Fabric", "16-mixed", "sgd", 2, 0.05, ""),
    case("Fabric", "16-mixed", "fused adamw", 1, None, ""),
    case("Fabric", "bf16-mixed", "sgd", 2, 0.05, ""),
    case("Fabric", "32-true", "ours", 1, None, ""),
]

if __name__ == "__main__":
    for each in CASES:
        (train_with_fabric if each["loop"] == "Fabric" else train)(each)
        # In manual optimization Lightning's clip comes before the scaler unscales.
        scaled = each["loop"] == "manual" and each["precision"] == "16-mixed"
        fabric = each["loop"] == "Fabric"  # Which converts what a model is called with.
        print(json.dumps({**each, "clips scaled": scaled, "rounds inputs": fabric}))
