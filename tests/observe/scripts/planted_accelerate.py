"""Accelerate trains as its users write it, with one planted Inf; the cases as in planted_lightning.

Accelerate has fp16 on a GPU only. On a CPU torch's own parts can do it, so they are put in by hand.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[3]))
from tests.integrations import task


def train(case):
    mixed = "bf16" if case["precision"] == "bf16-mixed" else "no"
    accelerator = Accelerator(
        cpu=True, mixed_precision=mixed, gradient_accumulation_steps=case["accumulate"]
    )
    if case["precision"] == "16-mixed":
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    model = task.Network()
    optimizer = task.OPTIMIZERS[case["optimizer"]](model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    rows = task.rows(accumulate=case["accumulate"], bad=case["bad"])
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=task.BATCH), scheduler
    )
    for batch in training_dataloader:
        with accelerator.accumulate(model):
            loss = model(batch).mean()
            accelerator.backward(loss)
            if case["clip"] is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), case["clip"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)


def case(precision, optimizer, accumulate, clip):
    # Without a scaler the bad step is taken, and nothing after it is worth a look.
    bad = task.BAD if precision == "16-mixed" else task.STEPS - 1
    return locals()


CASES = [
    case("16-mixed", "sgd", 1, None),
    case("16-mixed", "sgd", 2, 0.05),
    case("16-mixed", "fused adamw", 2, None),
    case("16-mixed", "ours", 2, 0.05),
    case("bf16-mixed", "sgd", 2, 0.05),
    case("32-true", "fused adamw", 1, 0.05),
]

if __name__ == "__main__":
    for each in CASES:
        train(each)
        waits = each["optimizer"] == "sgd"  # Of skips by fused ones Accelerate knows nothing.
        print(json.dumps({**each, "schedule": "taken" if waits else "always"}))
