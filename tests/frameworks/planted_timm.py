"""timm's scaler in a loop as timm's train.py has it, with one planted Inf; a line a case.

tests/frameworks/stand_ins must be on the path: timm imports torchvision.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from timm.utils import NativeScaler

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.integrations import task


def train(case):
    model = task.Network()
    optimizer = task.OPTIMIZERS[case["optimizer"]](model.parameters())
    half = case["precision"] == "16-mixed"
    amp_autocast = contextlib.nullcontext
    if half:
        amp_autocast = lambda: torch.autocast("cpu", torch.float16)  # noqa: E731
    loss_scaler = NativeScaler(device="cpu")
    accum_steps = case["accumulate"]
    optimizer.zero_grad()
    for batch_idx, rows in enumerate(task.batches(accumulate=accum_steps, bad=case["bad"])):
        need_update = (batch_idx + 1) % accum_steps == 0
        with amp_autocast():
            loss = model(rows).mean()
        if accum_steps > 1:
            loss /= accum_steps
        loss_scaler(
            loss,
            optimizer,
            clip_grad=case["clip"],
            clip_mode="norm",
            parameters=model.parameters(),
            need_update=need_update,
        )
        if need_update:
            optimizer.zero_grad()


def case(precision, optimizer, accumulate, clip):
    bad, schedule, scaled = task.BAD, "never", True
    return locals()


CASES = [
    case("32-true", "sgd", 1, None),
    case("16-mixed", "sgd", 2, 0.05),
    case("16-mixed", "fused adamw", 1, 0.05),
]

if __name__ == "__main__":
    for each in CASES:
        train(each)
        print(json.dumps(each))
