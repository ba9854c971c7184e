"""The temporal-order problem of Pascanu, Mikolov and Bengio (2013), with and without clipping.

A sequence of random symbols c, d, e, f has an A or a B near its beginning, and another one in its
middle. At the end a recurrent network must say which came in which order: AA, AB, BA or BB. To
learn that, its gradient has to reach back over most of the sequence. But a network that remembers
so long is one whose gradients can explode: now and then a step is fifty times too long, and throws
away what was learned. Clipping the norm shortens that step and keeps its direction.

You will see, by the length of the sequences, how many of six networks solve the problem: with
SGD, with SGD at a tenth of the learning rate, and with SGD whose gradients are clipped to norm 1.

What the paper says ("On the difficulty of training recurrent neural networks", ICML 2013, on the
temporal order problem, beside its figure of success rates by length): as long as gradients do not
vanish, clipping raises the rate of success; on sequences longer than 20 they do vanish, and neither
SGD nor clipped SGD solves the task; clipping together with a regularizer against vanishing
gradients (SGD-CR, not in this lab) solves it always, up to length 200.

As in their public code: the task, 50 tanh units, sparse weights of spectral radius 0.95, batches of
20, the limit 1. Smaller here: 1,000 steps where theirs end at 5 million, and for that a learning
rate of 0.1 where theirs is 0.01; lengths up to 40. Solved means at most 1 % wrong among 500 new
sequences at one of the tests, every 100 steps; their code asks for no error among 10,000. Such
training is chaotic: another rounding, as on another machine, changes single outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from drawing import BLUE, GREY, ORANGE, options, pyplot, save
from torch import Tensor, nn
from torch.nn import functional as F

import gradilocks

LENGTHS, QUICK_LENGTHS = (10, 15, 20, 30, 40), (10, 20)
STEPS, QUICK_STEPS = 1000, 40
SEEDS = 6  # 0 to 5; every one of them counts.
HIDDEN, BATCH = 50, 20
MAX_NORM = 1.0
TEST_EVERY, QUICK_TEST_EVERY = 100, 20
TEST_SIZE, SOLVED = 500, 0.01
SIZE = (10, 4.6)  # Of the picture, in hundreds of pixels.
PAPERS_WALL = 20  # Beyond this length, the paper says, neither SGD nor clipped SGD succeeds.


@dataclass(frozen=True)
class Arm:
    name: str
    lr: float
    max_norm: float | None
    color: str


ARMS = (
    Arm("SGD, lr 0.1", 0.1, None, ORANGE),
    Arm("SGD, lr 0.01", 0.01, None, GREY),
    Arm("SGD, lr 0.1, clipped", 0.1, MAX_NORM, BLUE),
)


class Network(nn.Module):
    """One recurrent network: 50 tanh units, 15 connections into each, spectral radius 0.95."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        recurrent = 0.01 * torch.randn(HIDDEN, HIDDEN, generator=draw)
        recurrent *= torch.rand(HIDDEN, HIDDEN, generator=draw).argsort(dim=1) < 15
        radius = torch.linalg.eigvals(recurrent).abs().max()
        into = 0.01 * torch.randn(6, HIDDEN, generator=draw)
        out = 0.01 * torch.randn(HIDDEN, 4, generator=draw)
        # One tensor for all that drives the units, one for what is read from them; biases last.
        self.units = nn.Parameter(
            torch.cat([into, 0.95 * recurrent / radius, torch.zeros(1, HIDDEN)])
        )
        self.out = nn.Parameter(torch.cat([out, torch.zeros(1, 4)]))


def sequences(draw: torch.Generator, number: int, length: int) -> tuple[Tensor, Tensor]:
    """Random symbols (A, B are 0, 1) and which of the four orders they have."""
    symbols = torch.randint(2, 6, (number, length), generator=draw)
    places = torch.randint(max(1, length // 10), (number, 2), generator=draw)
    places += torch.tensor([length // 10, length // 2])
    letters = torch.randint(2, (number, 2), generator=draw)
    return symbols.scatter(1, places, letters), letters @ torch.tensor([1, 2])


def answers(networks: nn.ModuleList, symbols: Tensor) -> Tensor:
    """What each network says of its own sequences: one product for all, and no numbers mix."""
    units = torch.stack([network.units for network in networks])
    into, recurrent, bias = units.split((6, HIDDEN, 1), dim=1)
    out, out_bias = torch.stack([network.out for network in networks]).split((HIDDEN, 1), dim=1)
    count, number, length = symbols.shape
    shown = F.one_hot(symbols.transpose(1, 2), 6).float().reshape(count, length * number, 6)
    driven = torch.baddbmm(bias, shown, into).view(count, length, number, HIDDEN).unbind(1)
    state = torch.zeros(count, number, HIDDEN)
    for drive in driven:
        state = torch.baddbmm(drive, state, recurrent).tanh()
    return torch.baddbmm(out_bias, state, out)


def all_networks() -> nn.ModuleList:
    """Every seed of the first arm, then of the second: the same seeds, so the same start."""
    return nn.ModuleList(Network(seed) for _ in ARMS for seed in range(SEEDS))


def train(networks: nn.ModuleList, length: int, steps: int, test_every: int) -> Tensor:
    """The share of wrong answers: (test, arm, seed). The arms see the same data."""
    # Each network is a group of its own, by the names of its parameters ("7.units", "7.out"),
    # and so has a norm and a limit of its own.
    limits = {f"{number}.*": ARMS[number // SEEDS].max_norm for number in range(len(networks))}
    rates = [
        {"params": networks[SEEDS * number : SEEDS * (number + 1)].parameters(), "lr": arm.lr}
        for number, arm in enumerate(ARMS)
    ]
    clip = gradilocks.ClipPerGroup(limits)
    # Raise: a NaN in one network must not cost the others a step unseen.
    control = gradilocks.GradientControl(
        torch.optim.SGD(rates), model=networks, scale=None, clip=clip, on_nonfinite="raise"
    )
    draws = [torch.Generator().manual_seed(1000 + seed) for seed in range(SEEDS)]

    def batch(size: int) -> tuple[Tensor, Tensor]:
        drawn = [sequences(draw, size, length) for draw in draws]
        symbols, orders = (torch.stack(each) for each in zip(*drawn, strict=True))
        return symbols.repeat(len(ARMS), 1, 1), orders.repeat(len(ARMS), 1)

    wrong = []
    for step in range(1, steps + 1):
        symbols, orders = batch(BATCH)
        said = answers(networks, symbols)
        losses = F.cross_entropy(said.flatten(0, 1), orders.flatten(), reduction="none")
        # The sum over networks: each gets the gradient of its own mean, as if it were alone.
        control.backward(losses.view(orders.shape).mean(dim=1).sum())
        control.step()
        control.zero_grad()
        if step % test_every == 0:
            symbols, orders = batch(TEST_SIZE)
            with torch.no_grad():
                missed = answers(networks, symbols).argmax(dim=-1) != orders
            wrong.append(missed.float().mean(dim=1).view(len(ARMS), SEEDS))
    return torch.stack(wrong)


def solved(wrong: Tensor) -> Tensor:
    """How many networks of each arm have solved the problem, at one test or another."""
    return (wrong.amin(dim=0) <= SOLVED).sum(dim=1)


def show(results: dict[int, Tensor]) -> None:
    print(f"How many of {SEEDS} networks (seeds 0 to {SEEDS - 1}) solve it, and the share of wrong")
    print("answers at the end, the mean of all; guessing has 75 % wrong.\n")
    print(f"{'length':>6}" + "".join(f"{arm.name:>24}" for arm in ARMS) + "   the paper")
    for length, wrong in results.items():
        ends = wrong[-1].mean(dim=1)
        cells = zip(solved(wrong).tolist(), ends.tolist(), strict=True)
        row = "".join(f"{f'{count} of {SEEDS}, {end:4.0%}':>24}" for count, end in cells)
        claim = "clipping helps" if length <= PAPERS_WALL else "neither succeeds"
        print(f"{length:6}{row}   {claim}")


def draw(results: dict[int, Tensor], test_every: int) -> Any:
    figure, (rates, course) = pyplot().subplots(1, 2, figsize=SIZE, layout="constrained")
    lengths = list(results)
    shown = min(lengths, key=lambda length: abs(length - PAPERS_WALL))
    tests = [test_every * (number + 1) for number in range(len(results[shown]))]
    for number, arm in enumerate(ARMS):
        counts = [solved(results[length])[number].item() / SEEDS for length in lengths]
        rates.plot(lengths, counts, "o-", color=arm.color, label=arm.name, linewidth=2)
        errors = results[shown][:, number]
        course.plot(tests, errors, color=arm.color, linewidth=0.8, alpha=0.6)
        course.plot(tests, errors.mean(dim=1), color=arm.color, linewidth=3)
    rates.axvspan(PAPERS_WALL, max(*lengths, PAPERS_WALL + 1), color=GREY, alpha=0.12, linewidth=0)
    note = "the paper: beyond 20,\nneither SGD nor\nclipped SGD succeeds"
    rates.text(max(lengths) - 0.4, 1.0, note, va="top", ha="right", fontsize=9, color="#555a61")
    rates.set(xlabel="length of the sequences", ylabel="share of seeds that solve it")
    rates.set(title="Solved, by length", ylim=(-0.03, 1.05))
    rates.yaxis.set_major_formatter("{x:.0%}")
    course.yaxis.set_major_formatter("{x:.0%}")
    course.set(xlabel="step", ylabel="wrong answers", ylim=(-0.03, 1.05))
    course.set_title(f"Length {shown}: each seed (thin), and their mean")
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    given = options(__doc__)
    lengths, steps, test_every = LENGTHS, STEPS, TEST_EVERY
    if given.quick:
        lengths, steps, test_every = QUICK_LENGTHS, QUICK_STEPS, QUICK_TEST_EVERY
    results = {length: train(all_networks(), length, steps, test_every) for length in lengths}
    show(results)
    save(draw(results, test_every), given.output / "temporal_order.png")


if __name__ == "__main__":
    main()
