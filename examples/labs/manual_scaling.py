"""Loss scaling by hand, beside gradilocks.GradScaler and torch.amp.GradScaler: the same numbers.

fp16 holds nothing below 3e-8, and in a large batch gradients are smaller than that: each is divided
by the number of characters in the batch. Loss scaling multiplies the loss, and so every gradient,
before the backward pass, and divides the gradients again before the step. Too large a factor makes
them infinite; then the step is left out and the factor halved. After some good steps it is doubled.

That is all, and `ByHand` below does it in plain PyTorch. A small model that guesses the next
character of Python's own documentation is trained in emulated fp16, once with each of the three
scalers, once with none, and once in fp32. You will see three runs that agree in every bit of every
step, skipped ones included, and a fourth that goes astray: nearly all its gradients are zero. Those
that remain push the right character up, and nothing is left to push the wrong ones down.

What is computed: one micro-batch of 1,024 characters a step. It stands for a global batch of 2,048
such micro-batches (2 M characters). Its loss is divided by 2,048, as gradient accumulation does;
its gradients, once out of fp16, are multiplied by 2,048, as if all micro-batches were equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from pydoc_data import topics
from typing import Any, NamedTuple

import torch
from drawing import BLUE, GREEN, ORANGE, RED, options, pyplot, save
from torch import Tensor, nn
from torch.nn import functional as F

import gradilocks

STEPS, QUICK_STEPS = 300, 60
INIT_SCALE = 2.0**32  # As Megatron-LM starts; torch starts at 2^16.
GROWTH_INTERVAL = 25  # torch: 2,000 steps. Smaller here, to see the scale grow.
MICRO_BATCHES = 2048  # In a global batch.
CHARACTERS = 1024  # In a micro-batch.
CONTEXT = 8  # Characters that the model sees.
SIZE = (10, 6.4)  # Of the picture, in hundreds of pixels.


class ByHand:
    """Loss scaling, written out, with the methods of torch's scaler."""

    def __init__(self) -> None:
        self.factor, self.good_steps, self.overflowed = INIT_SCALE, 0, False

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for gradient in gradients:
            gradient.mul_(1.0 / self.factor)
        self.overflowed = not all(gradient.isfinite().all() for gradient in gradients)
        if not self.overflowed:
            optimizer.step()

    def update(self) -> None:
        if self.overflowed:
            self.factor, self.good_steps = self.factor * 0.5, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.factor, self.good_steps = self.factor * 2.0, 0

    def get_scale(self) -> float:
        return self.factor


class Step(NamedTuple):
    """What one step leaves behind."""

    scale: float
    loss: float
    skipped: bool
    weights: str  # A fingerprint of every bit of them, after the step.
    lost: float  # The share of the gradients of the model's outputs that fp16 stores as zero.


Run = list[Step]


def train(scaler: Any, steps: int, *, half: bool = True) -> Run:
    """The loop that everybody has, the same for every arm: same seed, same data."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    text = "".join(topics.topics.values())
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    data = torch.tensor([numbers[character] for character in text])
    look_up, first = nn.Embedding(len(alphabet), 16), nn.Linear(16 * CONTEXT, 96)
    model = nn.Sequential(look_up, nn.Flatten(), first, nn.Tanh(), nn.Linear(96, len(alphabet)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run: Run = []
    before = bits(model)
    for _ in range(steps):
        places = torch.randint(len(data) - CONTEXT, (CHARACTERS,), generator=generator)
        windows = data[places[:, None] + torch.arange(CONTEXT + 1)]
        with gradilocks.emulate(torch.float16) if half else contextlib.nullcontext():
            outputs = model(windows[:, :-1])
        outputs.retain_grad()
        loss = F.cross_entropy(outputs, windows[:, -1])
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss / MICRO_BATCHES).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(MICRO_BATCHES)
        scaler.step(optimizer)
        scaler.update()

        after = bits(model)
        lost = (outputs.grad.half() == 0).float().mean().item() if half else 0.0
        run.append(Step(scale, loss.item(), before == after, after, lost))
        before = after
    return run


def bits(model: nn.Module) -> str:
    """A fingerprint of all parameters: equal only if every bit is."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def run_lab(steps: int) -> dict[str, Run]:
    """All five arms."""
    settings = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}
    none = torch.amp.GradScaler("cpu", enabled=False)
    return {
        "fp16, by hand": train(ByHand(), steps),
        "fp16, gradilocks": train(gradilocks.GradScaler("cpu", **settings), steps),
        "fp16, torch": train(torch.amp.GradScaler("cpu", **settings), steps),
        "fp16, no scaling": train(none, steps),
        "fp32": train(none, steps, half=False),
    }


def first_difference(one: Run, other: Run) -> int | None:
    """The first step at which anything differs; None if nothing does. No tolerance."""
    pairs = enumerate(zip(one, other, strict=True), start=1)
    return next((step for step, (a, b) in pairs if a != b), None)


def show(runs: dict[str, Run]) -> None:
    print(f"{'arm':18}{'loss, last 20':>14}{'skipped':>9}{'last scale':>12}{'lost at first':>15}")
    for name, run in runs.items():
        loss = sum(step.loss for step in run[-20:]) / 20
        skipped = sum(step.skipped for step in run)
        scale = f"2^{math.log2(run[-1].scale):.0f}"
        print(f"{name:18}{loss:14.4f}{skipped:9}{scale:>12}{run[0].lost:15.1%}")
    print("\nScale, skips, loss and every bit of the weights, step by step:")
    for name in ("fp16, gradilocks", "fp16, torch"):
        step = first_difference(runs["fp16, by hand"], runs[name])
        verdict = f"the same in all {len(run)} steps" if step is None else f"step {step} differs"
        print(f"  by hand and {name[6:]}: {verdict}")


def draw(runs: dict[str, Run]) -> Any:
    looks = {
        "fp16, by hand": {"color": BLUE, "linewidth": 7, "alpha": 0.35},
        "fp16, gradilocks": {"color": ORANGE, "linewidth": 3},
        "fp16, torch": {"color": "black", "linewidth": 1, "linestyle": (0, (4, 3))},
        "fp16, no scaling": {"color": RED, "linewidth": 1.5},
        "fp32": {"color": GREEN, "linewidth": 1.2},
    }
    figure, (above, below) = pyplot().subplots(2, sharex=True, figsize=SIZE, layout="constrained")
    for name, run in runs.items():
        numbers = range(1, len(run) + 1)
        below.plot(numbers, [step.loss for step in run], label=name, **looks[name])
        if run[0].scale > 1.0:
            scales = [step.scale for step in run]
            above.step(numbers, scales, where="post", label=name, **looks[name])
    by_hand = runs["fp16, by hand"]
    skips = [number for number in numbers if by_hand[number - 1].skipped]
    marks = {"color": RED, "ms": 8, "mew": 2, "label": "overflow: skip, halve the scale"}
    above.plot(skips, [by_hand[number - 1].scale for number in skips], "x", **marks)
    above.set_yscale("log", base=2)
    above.set(ylabel="loss scale", title="The scale: three scalers on top of each other")
    lost = runs["fp16, no scaling"][0].lost
    title = f"The loss: without scaling, {lost:.0%} of the first gradients round to zero"
    below.set(ylabel="loss", xlabel="step", title=title)
    above.legend(loc="lower right", ncols=4)
    lines, names = below.get_legend_handles_labels()
    below.legend(lines[3:], names[3:], loc="upper left", bbox_to_anchor=(0.08, 1))
    return figure


def main() -> None:
    given = options(__doc__)
    runs = run_lab(QUICK_STEPS if given.quick else STEPS)
    show(runs)
    save(draw(runs), given.output / "manual_scaling.png")


if __name__ == "__main__":
    main()
