"""One arm with one seed: a Job enters, a Step leaves after each step, a Result at the end.

The loop is that of the quickstart: ``control.backward(loss)``, ``control.step()``,
``control.zero_grad()``, the forward pass under ``gradilocks.emulate``. Two things are added: the
micro-batch is counted ``accumulation`` times, and what fp16 rounds to zero on the first way back
is counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gradilocks import GradientControl, Recorder, emulate
from gradilocks.demo.arms import MADE_BY, Job, Result, Setup, Step
from gradilocks.demo.small_gpt import GPT, Batches, Text, python_documentation
from gradilocks.errors import NeverFinite


def train(job: Job, on_step: Callable[[Step], None]) -> Result:
    """Trains the small GPT as the arm has it, and writes its run file.

    Args:
        job: what to train and how.
        on_step: called after every step, in order, with what it did.
    """
    arm, setup = job.arm, job.setup
    text = python_documentation()
    model = build_model(setup, text, seed=job.seed)
    batches = Batches(text, rows=setup.rows, length=setup.length, seed=job.seed)
    made: Any = getattr(torch.optim, arm.optimizer)
    optimizer: torch.optim.Optimizer = made(model.parameters(), lr=arm.rate, fused=True)
    low = arm.format != "fp32"
    steps: list[Step] = []
    lost: list[float] = []
    stopped = None
    began = time.perf_counter()

    def note(step: Step) -> None:
        steps.append(step)
        on_step(step)

    try:
        with _one_thread(), _recorder(job) as recorder:
            control = GradientControl(
                optimizer,
                model=model,
                scale="dynamic" if arm.scaled else None,
                clip=arm.clip,
                record=recorder,
            )
            for number in range(1, setup.steps + 1):
                inputs, targets = batches.draw()
                with emulate(arm.format) if low else nullcontext():
                    logits = model(inputs)
                if low and number == 1:
                    _on_the_way_back(logits, lambda gradient: lost.append(lost_share(gradient)))
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                # Divides what flows back and leaves the loss that the run file tells: the sum of
                # so many losses, each divided by their count, is the loss again.
                _on_the_way_back(loss, lambda gradient: gradient / setup.accumulation)
                control.backward(loss)
                _count_micro_batch(model, setup.accumulation)
                value, rate = loss.item(), optimizer.param_groups[0]["lr"]
                try:
                    outcome = control.step()
                except NeverFinite:
                    note(Step(number, value, steps[-1].scale, math.nan, False, True, rate))
                    raise
                control.zero_grad()
                note(
                    Step(
                        number=number,
                        loss=value,
                        scale=outcome.scale,
                        norm=outcome.norm,
                        clipped=outcome.clipped,
                        skipped=outcome.skipped,
                        rate=rate,
                    )
                )
    except NeverFinite as error:
        stopped = str(error).splitlines()[0]
    return Result.from_steps(
        job,
        steps,
        lost=lost[0] if lost else None,
        stopped=stopped,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=time.perf_counter() - began,
    )


def build_model(setup: Setup, text: Text, *, seed: int) -> GPT:
    """Builds the GPT from the seed and leaves torch's global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(
            vocabulary=len(text.vocabulary),
            length=setup.length,
            width=setup.width,
            layers=setup.layers,
            heads=setup.heads,
        )


def lost_share(gradient: torch.Tensor) -> float:
    """Returns which share of the non-zero values fp16 rounds to zero; 0.0 if all are zero."""
    nonzero = gradient.count_nonzero().item()
    kept = gradient.half().count_nonzero().item()
    return 1.0 - kept / nonzero if nonzero else 0.0


def _on_the_way_back(tensor: torch.Tensor, look: Callable[[torch.Tensor], Any]) -> None:
    """Shows a tensor's gradient to a function, which may return another one to go on with."""
    register: Any = tensor.register_hook
    register(look)


def _recorder(job: Job) -> Recorder:
    return Recorder(
        job.path,
        flush_every=10,  # So that an interrupt leaves nearly all of it.
        exists="replace",
        command=job.command or None,
        settings={
            "made_by": MADE_BY,
            "arm": job.arm.name,
            "seed": job.seed,
            "format": job.arm.format,
            "accumulation": job.setup.accumulation,
        },
        log=False,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Holds torch to one thread, so that a run does not depend on the machine's cores or load.

    The tensors are too small to share out: two arms side by side, one thread each, are faster than
    one arm on two threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _count_micro_batch(model: nn.Module, times: int) -> None:
    """Turns one micro-batch's gradient into the sum of ``times`` equal ones.

    Accumulation is in float32, where up to 2^13 equal fp16 values add up exactly, so a Linear layer
    gets what that many backward passes would leave, at the cost of one.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(times)
