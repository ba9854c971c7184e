"""fastai trains as its users write it, with one planted Inf: a line a case, as optimizers come.

Its mixed precision is for CUDA, so a subclass takes torch's parts for the CPU in their place.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from fastai.basics import SGD, DataLoader, DataLoaders, Learner, OptimWrapper
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.integrations import task


class OnCPU(MixedPrecision):
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast("cpu", torch.float16)
        self.learn.scaler = torch.amp.GradScaler("cpu")


def mean(losses, _):
    return losses.mean()


def make(case):
    if case["optimizer"] == "fastai's sgd":
        return lambda params, lr: SGD(params, lr=lr, mom=0.9)
    if case["optimizer"] == "wrapped adamw":
        return lambda params, lr: OptimWrapper(params, torch.optim.AdamW, lr=lr)
    return lambda params, lr: OptimWrapper(params, torch.optim.SGD, lr=lr, momentum=0.9)


def learner(case, **options):
    rows = task.rows(accumulate=case["accumulate"], bad=case["bad"])
    data = DataLoader([(row, torch.zeros(())) for row in rows], bs=task.BATCH)
    return Learner(
        DataLoaders(data, data), task.Network(), loss_func=mean, lr=case["lr"], **options
    )


def train(case):
    learn = learner(case, opt_func=make(case), path=".")
    if case["precision"] == "16-mixed":
        learn.add_cb(OnCPU())
    if case["accumulate"] > 1:
        learn.add_cb(GradientAccumulation(case["accumulate"] * task.BATCH))
    if case["clip"] is not None:
        learn.add_cb(GradientClip(case["clip"]))
    with learn.no_logging(), learn.no_mbar(), contextlib.redirect_stdout(io.StringIO()):
        learn.fit(1)


def case(precision, optimizer, accumulate, clip):
    # Without a scaler the bad step is taken, and nothing after it is worth a look.
    bad = task.BAD if precision == "16-mixed" else task.STEPS - 1
    lr, schedule = 0.05, "never"
    return locals()


CASES = [
    case("32-true", "fastai's sgd", 1, None),
    case("32-true", "fastai's sgd", 2, 0.05),
    case("32-true", "wrapped sgd", 2, 0.05),
    case("32-true", "wrapped adamw", 1, None),
    case("16-mixed", "fastai's sgd", 1, None),
    case("16-mixed", "fastai's sgd", 2, 0.05),
    case("16-mixed", "wrapped sgd", 2, 0.05),
    case("16-mixed", "wrapped adamw", 1, None),
]

if __name__ == "__main__":
    for each in CASES:
        train(each)
        print(json.dumps({**each, "skips first": True}))  # GradientClip comes after the scaler.
