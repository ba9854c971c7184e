"""Ignite trains as its users write it, with one planted Inf; a line a case.

Its own mixed precision is for CUDA: on a CPU what is left of it is the scaler.
"""

import json
import sys
from pathlib import Path

import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.integrations import task


def mean(losses, _):
    return losses.mean()


def train(case):
    model = task.Network()
    optimizer = task.OPTIMIZERS[case["optimizer"]](model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    rows = task.rows(accumulate=case["accumulate"], bad=case["bad"])
    loader = DataLoader([(row, torch.zeros(())) for row in rows], batch_size=task.BATCH)
    if case["clip"] is None:
        mixed = {"amp_mode": "amp", "scaler": torch.amp.GradScaler("cpu")} if case["scaled"] else {}
        trainer = create_supervised_trainer(
            model,
            optimizer,
            mean,
            device="cpu",
            gradient_accumulation_steps=case["accumulate"],
            **mixed,
        )
    else:

        def train_step(engine, batch):  # There is no clip in the ready-made one.
            x, y = batch
            with torch.autocast("cpu", torch.bfloat16):
                loss = mean(model(x), y) / case["accumulate"]
            loss.backward()
            if engine.state.iteration % case["accumulate"] == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        trainer = Engine(train_step)

    @trainer.on(Events.ITERATION_COMPLETED(every=case["accumulate"]))
    def step_schedule():
        scheduler.step()

    trainer.run(loader, max_epochs=1)


def case(precision, optimizer, accumulate, clip, scaled):
    # Without a scaler the bad step is taken, and nothing after it is worth a look.
    bad = task.BAD if scaled else task.STEPS - 1
    return locals()


CASES = [
    case("32-true", "sgd", 1, None, scaled=True),
    case("32-true", "fused adamw", 2, None, scaled=True),
    case("32-true", "sgd", 2, None, scaled=False),
    case("bf16-mixed", "sgd", 2, 0.05, scaled=False),
]

if __name__ == "__main__":
    for each in CASES:
        train(each)
        print(json.dumps(each))
