"""A training step as torchtitan's Trainer has it, with its own clip, with one planted Inf; a line
a case. torchtitan has no scaler.
"""

import json
import sys
from pathlib import Path

import torch
from torchtitan.distributed import utils as dist_utils

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.integrations import task


def train(case):
    model_parts = [task.Network()]
    optimizers = [task.OPTIMIZERS[case["optimizer"]](m.parameters()) for m in model_parts]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, total_iters=5) for o in optimizers]
    batches = iter(task.batches(accumulate=case["accumulate"], bad=case["bad"]))
    for _ in range(task.STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(case["accumulate"]):
            with torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] != "32-true"):
                loss = model_parts[0](next(batches)).mean() / case["accumulate"]
            loss.backward()
        dist_utils.clip_grad_norm_(
            [p for m in model_parts for p in m.parameters()],
            case["clip"],
            foreach=True,
            pp_mesh=None,
            ep_enabled=False,
        )
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()


def case(precision, optimizer, accumulate):
    clip, bad = 0.05, task.STEPS - 1
    return locals()


CASES = [
    case("32-true", "sgd", 1),
    case("bf16-mixed", "fused adamw", 2),
]

if __name__ == "__main__":
    for each in CASES:
        train(each)
        print(json.dumps(each))
