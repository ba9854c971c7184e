"""What clipping does to a gradient, seen as geometry: a ball keeps the direction, a box does not.

A gradient is one long vector: the gradients of all parameters, end to end. Clipping by norm pulls a
vector that leaves the ball of radius max_norm back to its surface, along its own line: the step
gets shorter and still goes downhill the same way. Clipping by value cuts each element on its own.
That puts the vector into a box, and the longer it was, the nearer to a corner, wherever it pointed.
Clipping tensor by tensor lies between: each tensor keeps its direction, but not its share of the
whole, so the whole turns.

You will see that on the gradients of a small network in training: first on two of its numbers,
where ball and box can be drawn, then on all of them: the norm before and after, which bends like a
hockey stick at max_norm, and the angle by which each way of clipping turns the gradient.

The lab checks what it shows, with the bounds that float32 leaves room for (one rounding: 2^-24):
  norm after ClipByNorm       max_norm * norm / (norm + 1e-6), within 4 roundings; and a gradient
                              that was shorter than max_norm is left as it was
  direction after ClipByNorm  turned by at most 2 roundings, 1.2e-7
  clip_grad_norm_, clip_grad_value_ and the policies of GradientControl: the same vector, every bit
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from drawing import BLUE, GREEN, GREY, ORANGE, options, pyplot, save
from torch import Tensor, nn
from torch.nn import functional as F

import gradilocks
from gradilocks import ClipByNorm, ClipByValue, ClipPerTensor, GradientControl

BATCHES, QUICK_BATCHES = 400, 40
MAX_NORM, PER_TENSOR, VALUE = 2.5, 1.25, 0.1
DRAWN, PLANE_NORM = 50, 0.5  # How many gradients are drawn in the plane, and their limit there.
SIZE = (10, 8.6)  # Of the picture, in hundreds of pixels.
ROUNDING = 2.0**-24  # The largest relative error of one rounding to float32.
POLICIES = {
    "ClipByNorm": ClipByNorm(MAX_NORM),
    "ClipPerTensor": ClipPerTensor(PER_TENSOR),
    "ClipByValue": ClipByValue(VALUE),
}
COLORS = {"ClipByNorm": BLUE, "ClipPerTensor": GREEN, "ClipByValue": ORANGE}

Gradients = list[Tensor]


@dataclass(frozen=True)
class Geometry:
    """One way of clipping, over all batches."""

    before: Tensor  # The norm of each batch's gradient.
    after: Tensor  # The same once it is clipped.
    turned: Tensor  # The angle between the two, in radians.


def real_gradients(batches: int) -> list[Gradients]:
    """The gradients of a small network, batch by batch, while SGD trains it."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    truth = torch.randn(16, 2)
    collected = []
    for _ in range(batches):
        inputs = torch.randn(32, 16)
        targets = inputs @ truth + 0.5 * torch.randn(32, 2)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        collected.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return collected


def clipped(gradients: Gradients, policy: Any) -> Gradients:
    """What a policy makes of gradients.

    The loss is chosen so that its gradients are the given ones; the parameters are zeros, and SGD
    takes a step of length 1. What it leaves in them is the clipped gradient, bit for bit, negated.
    """
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    control = GradientControl(torch.optim.SGD(parameters, lr=1.0), scale=None, clip=policy)
    control.backward(sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True)))
    control.step()
    return [-p.detach() for p in parameters]


def clipped_in_place(gradients: Gradients, clip: Any, limit: float) -> Gradients:
    """The same by the functions that stand in for torch's."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    clip(parameters, limit)
    return [p.grad for p in parameters]


def vector(gradients: Gradients) -> Tensor:
    """End to end, in float64, so that measuring adds no error worth naming."""
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def angle(one: Tensor, other: Tensor) -> float:
    """Between two vectors; exact for tiny angles too, where the arc cosine of 1 - 1e-15 is not."""
    one, other = one / one.norm(), other / other.norm()
    return 2.0 * math.asin(min(1.0, (one - other).norm().item() / 2.0))


def measure(batches: list[Gradients]) -> dict[str, Geometry]:
    measured = {}
    for name, policy in POLICIES.items():
        pairs = [(vector(each), vector(clipped(each, policy))) for each in batches]
        measured[name] = Geometry(
            before=torch.stack([before.norm() for before, _ in pairs]),
            after=torch.stack([after.norm() for _, after in pairs]),
            turned=torch.tensor([angle(*pair) for pair in pairs], dtype=torch.float64),
        )
    return measured


def check(batches: list[Gradients], measured: dict[str, Geometry]) -> None:
    """Holds every sentence of the docstring against the numbers."""
    ball = measured["ClipByNorm"]
    long = ball.before > MAX_NORM
    expected = MAX_NORM * ball.before / (ball.before + 1e-6)
    assert ((ball.after / expected - 1.0).abs()[long] <= 4 * ROUNDING).all()
    assert (ball.after[~long] == ball.before[~long]).all()
    assert (ball.turned <= 2 * ROUNDING).all()
    for gradients in batches:
        for part in clipped(gradients, POLICIES["ClipPerTensor"]):
            assert part.double().norm() <= PER_TENSOR * (1 + 4 * ROUNDING)
        for policy, clip, limit in (
            ("ClipByNorm", gradilocks.clip_grad_norm_, MAX_NORM),
            ("ClipByValue", gradilocks.clip_grad_value_, VALUE),
        ):
            ours = vector(clipped(gradients, POLICIES[policy]))
            assert torch.equal(ours, vector(clipped_in_place(gradients, clip, limit)))


def show(measured: dict[str, Geometry]) -> None:
    print(f"{'':15}{'limit':>24}{'largest norm':>20}{'turned by, degrees':>22}")
    print(f"{'policy':15}{'':24}{'before':>11}{'after':>9}{'median':>11}{'largest':>11}")
    limits = (f"norm {MAX_NORM:g}", f"norm {PER_TENSOR:g} a tensor", f"{VALUE:g} an element")
    for (name, one), limit in zip(measured.items(), limits, strict=True):
        degrees = one.turned.rad2deg()
        row = f"{name:15}{limit:>24}{one.before.max():11.3f}{one.after.max():9.4f}"
        print(f"{row}{degrees.median():11.2g}{degrees.max():11.2g}")
    long, every = (one.before > MAX_NORM).sum(), len(one.before)
    print(f"\nChecked: {long} of {every} gradients were longer than {MAX_NORM:g}. By norm, each of")
    print("them now has that length and its old direction, and the others are as they were.")


def draw(batches: list[Gradients], measured: dict[str, Geometry]) -> Any:
    figure, panels = pyplot().subplots(2, 2, figsize=SIZE, layout="constrained")
    ball, box, norms, turns = panels.flat
    draw_plane(ball, batches, ClipByNorm(PLANE_NORM), BLUE)
    draw_plane(box, batches, ClipByValue(PLANE_NORM), ORANGE)
    ball.set_title("By norm: into the ball, each along its own line")
    box.set_title("By value: into the box, each number cut on its own")
    for name, one in measured.items():
        look = {"color": COLORS[name], "label": name}
        norms.scatter(one.before, one.after, s=9, alpha=0.6, linewidths=0, **look)
        turns.hist(one.turned.cos().numpy(), bins=60, range=(0.7, 1.0), alpha=0.5, **look)
    norms.set(xlim=(0, None), ylim=(0, None), title="All parameters: the norm before and after")
    norms.set(xlabel="norm before", ylabel="norm after")
    norms.axhline(MAX_NORM, color=GREY, linewidth=0.8, linestyle=":")
    norms.legend(markerscale=2)
    turns.set(yscale="log", xlabel="cosine of the angle between before and after")
    turns.set(ylabel="batches", title="All parameters: how far clipping turns them")
    turns.legend(loc="upper left")
    return figure


def draw_plane(axis: Any, batches: list[Gradients], policy: Any, color: str) -> None:
    """The gradient of the last bias, two numbers, clipped on its own: an arrow for each batch."""
    turns = torch.linspace(0, 2 * math.pi, 181)
    rays = torch.stack([turns.cos(), turns.sin()], dim=1) * 10  # Far out, all around:
    edge = torch.stack([clipped([ray], policy)[0] for ray in rays])  # clipped, they show the edge.
    axis.fill(*edge.T, facecolor=color + "26", edgecolor=color)
    for gradients in batches[:DRAWN]:
        before, after = gradients[-1].tolist(), clipped(gradients[-1:], policy)[0].tolist()
        axis.plot(*zip(before, after, strict=True), color=GREY, linewidth=0.8, alpha=0.6)
        axis.plot(*before, "o", color=GREY, markersize=3)
        axis.plot(*after, "o", color=color, markersize=4.5)
    axis.set(xlabel="gradient of output bias 0", ylabel="of output bias 1")
    axis.set_aspect("equal", adjustable="datalim")


def main() -> None:
    given = options(__doc__)
    batches = real_gradients(QUICK_BATCHES if given.quick else BATCHES)
    measured = measure(batches)
    check(batches, measured)
    show(measured)
    save(draw(batches, measured), given.output / "clipping_geometry.png")


if __name__ == "__main__":
    main()
