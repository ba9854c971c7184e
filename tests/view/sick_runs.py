"""Trainings with one fault each, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from view.healthy_runs import TiedGPT, classes, classify, mlp, next_token, sentences, update

Train = Callable[[], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(lr: float, momentum: float = 0.0) -> MakeOptimizer:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def adam(lr: float) -> MakeOptimizer:
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr)


def classifier(
    make: MakeOptimizer,
    *,
    steps: int = 120,
    batch: int = 32,
    noise: float = 2.0,
    clears: bool = True,
    change_loss: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
    change_input: Callable[[int, Tensor], Tensor] = lambda step, x: x,
    change_lr: Callable[[int], float] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    model: nn.Module | None = None,
) -> Train:
    """A classifier whose optimizer, loss, inputs, learning rate or scaler may be at fault."""

    def train() -> None:
        net = mlp(16, 64, 4) if model is None else model
        optimizer = make(net)
        for step in range(1, steps + 1):
            x, y = classes(batch, noise=noise)
            if clears:
                optimizer.zero_grad()
            if change_lr is not None:
                optimizer.param_groups[0]["lr"] = change_lr(step)
            loss = change_loss(step, F.cross_entropy(net(change_input(step, x)), y))
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    return train


def nan_in(*steps: int) -> Callable[[int, Tensor], Tensor]:
    return lambda step, loss: loss * math.nan if step in steps else loss


def large_input_in(bad: int, factor: float) -> Callable[[int, Tensor], Tensor]:
    return lambda step, x: factor * x if step == bad else x


def batch_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )


def dead_net() -> nn.Module:
    net = mlp(16, 64, 64, 4)
    for layer in (0, 2):
        nn.init.constant_(net[layer].bias, -100.0)
    return net


def gpt(*, clears: bool, limit: float | None = None, lr: float = 1e-3, steps: int = 60) -> Train:
    """A small GPT, without zero_grad() if `clears` is False."""

    def train() -> None:
        model = TiedGPT(layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for _ in range(steps):
            if clears:
                optimizer.zero_grad()
            next_token(model, sentences(4)).backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()

    return train


def gpt_in_float16_without_scaling() -> None:
    """Backward in fp16 storage with a loss divided by 2^20, as for a very large batch: most gradients underflow."""
    model = TiedGPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.register_hook(lambda grad: (grad / 2**20).half().float() * 2**20)
    for _ in range(60):
        update(optimizer, next_token(model, sentences(4)))


def vanishing_gradients() -> None:
    net = mlp(16, *[32] * 20, 4, activation=nn.Sigmoid)
    classifier(sgd(0.05), steps=200, model=net)()


def clipped_to_almost_nothing() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(120):
        x, y = classes(4)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        optimizer.step()


def clipped_before_unscale(*, unscales: bool, size: float = 0.1) -> Train:
    def train() -> None:
        model, scaler = mlp(16, 64, 4), torch.amp.GradScaler("cpu", init_scale=2.0**16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(120):
            x, y = classes(32, noise=2.0)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(size * x), y)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    return train


def schedule_that_ends_early(end: int) -> Train:
    return classifier(sgd(0.05, 0.9), noise=4.0, change_lr=lambda step: 0.05 if step <= end else 0.0)


def backward_that_never_runs() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        x, y = classes(8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y)
        optimizer.step()


def bfloat16_weights_that_do_not_move() -> None:
    model = mlp(16, 64, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    classify(60, optimizer, model, rows=16, noise=1.0, dtype=torch.bfloat16)


def overflow_at_every_scale() -> None:
    """Gradients that are Inf whatever the loss scale is."""
    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(60):
        optimizer.zero_grad()
        scale = scaler.scale((weight * 1.0).sum())
        scale.backward()
        if step >= 10:
            weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
