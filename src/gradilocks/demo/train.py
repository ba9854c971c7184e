"""The demo's training loop: Settings enter, a Step leaves after each step, a Summary at the end.

The loop is the one of the quickstart: ``control.backward(loss)``, ``control.step()``,
``control.zero_grad()``. Two things are added to it to show what fp16 does to the gradients of a
large global batch: the micro-batch is counted ``accumulation`` times, and what the first backward
pass would lose is measured beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from gradilocks import DynamicScale, GradientControl, NoScale, StaticScale
from gradilocks.demo.half import HalfLinear, underflow_share
from gradilocks.demo.model import GPT
from gradilocks.demo.text import Batches, Text, python_documentation
from gradilocks.demo.values import Settings, Step, Summary, Underflow, summarize


def train(settings: Settings, on_step: Callable[[Step], None]) -> Summary:
    """Trains the small GPT in emulated fp16 under ``GradientControl``.

    Args:
        settings: what to train and how.
        on_step: called after every step, in order, with what it did.

    Returns:
        The run in a few numbers.

    Example:
        >>> from gradilocks.demo.train import train
        >>> from gradilocks.demo.values import Settings
        >>> train(Settings(steps=2, rows=2, width=8), on_step=lambda step: None).steps
        2
    """
    with _one_thread():
        return _train(settings, on_step)


def _train(settings: Settings, on_step: Callable[[Step], None]) -> Summary:
    text = python_documentation()
    model = build_model(settings, text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    control = GradientControl(
        optimizer, model=model, clip=settings.clip, scale=_scale_policy(settings)
    )
    underflow = measure_underflow(settings, model, text, scale=control.scale)
    batches = _batches(settings, text)
    steps: list[Step] = []
    began = time.perf_counter()
    for number in range(1, settings.steps + 1):
        inputs, targets = batches.draw()
        loss = _mean_loss(model(inputs), targets)
        control.backward(loss / settings.accumulation)
        _count_micro_batch(model, settings.accumulation)
        outcome = control.step()
        control.zero_grad()
        step = Step(
            number=number,
            loss=loss.item(),
            scale=outcome.scale,
            norm=outcome.norm,
            clipped=outcome.clipped,
            skipped=outcome.skipped,
            culprits=tuple(outcome.culprits) if outcome.skipped else (),
        )
        steps.append(step)
        on_step(step)
    return summarize(
        settings,
        steps,
        underflow=underflow,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=time.perf_counter() - began,
    )


def build_model(settings: Settings, text: Text) -> GPT:
    """Builds the GPT from the seed and leaves torch's global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return GPT(
            vocabulary=len(text.vocabulary),
            length=settings.length,
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            linear=HalfLinear,
        )


def measure_underflow(settings: Settings, model: GPT, text: Text, *, scale: float) -> Underflow:
    """Measures, on the first batch, what fp16 zeroes of the gradients entering the last layer.

    Args:
        settings: gives the batch and the accumulation count.
        model: its parameters and their gradients stay as they are.
        text: gives the batch.
        scale: the scale to compare with none.
    """
    inputs, targets = _batches(settings, text).draw()
    logits = model(inputs)
    loss = _mean_loss(logits, targets) / settings.accumulation
    (unscaled,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * scale, logits)
    return Underflow(unscaled=underflow_share(unscaled), scaled=underflow_share(scaled))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Holds torch to one thread, so that a run does not depend on the machine's cores or load.

    The tensors are too small to share out. 300 steps on two cores took 10 to 13 s with two threads
    and 15 to 17 s with one; while other programs ran, 76 to 82 s with two and 15 to 16 s with one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _batches(settings: Settings, text: Text) -> Batches:
    return Batches(text, rows=settings.rows, length=settings.length, seed=settings.seed)


def _scale_policy(settings: Settings) -> DynamicScale | NoScale | StaticScale:
    if settings.scale is None:
        return NoScale()
    if isinstance(settings.scale, str):
        return DynamicScale(
            init_scale=settings.initial_scale, growth_interval=settings.growth_interval
        )
    return StaticScale(settings.scale)


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _count_micro_batch(model: nn.Module, times: int) -> None:
    """Turns one micro-batch's gradient into the sum of ``times`` equal ones.

    Accumulation is in float32, where up to 2^13 equal fp16 values add up exactly, so the Linear
    layers get what that many backward passes would leave, at the cost of one.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(times)
