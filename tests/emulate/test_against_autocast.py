"""Emulated fp16 and bf16 beside torch's own, under autocast on this CPU, on small shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradilocks
from tests.emulate.calls import calls, exactly, forward_and_backward, places

LEFT_IN_FLOAT32 = {"mv", "addmv"}
"""By autocast on a CPU, though not on a GPU."""
ADDED_IN_HALF = {"addbmm": {"result"}}
"""What torch adds up in fp16 itself on a CPU, off by many units in the last place."""
ADDED_IN_HALF |= {name: {"gradients"} for name in calls() if name.startswith("conv")}
ADDED_IN_HALF |= {
    name: {"result", "gradients"} for name in calls() if name.startswith("conv_transpose")
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operation", list(calls()))
def test_an_operation_is_exact_arithmetic_rounded_once(operation, dtype):
    call = calls()[operation]
    with gradilocks.emulate(dtype):
        result, gradients = forward_and_backward(call)
    (exact, exact_gradients), (terms, gradient_terms) = exactly(call, dtype)
    assert places(result, exact, dtype, terms) <= 0.5
    for found, meant, sums in zip(gradients, exact_gradients, gradient_terms, strict=True):
        assert places(found, meant, dtype, sums) <= 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operation", sorted(set(calls()) - LEFT_IN_FLOAT32))
def test_an_operation_is_what_autocast_makes_of_it_within_one_place(operation, dtype):
    call = calls()[operation]
    with gradilocks.emulate(dtype):
        result, gradients = forward_and_backward(call)
    with torch.autocast("cpu", dtype):
        real, real_gradients = forward_and_backward(call)
    _, (terms, gradient_terms) = exactly(call, dtype)
    assert real.dtype == dtype
    otherwise = ADDED_IN_HALF.get(operation, set())
    if "result" not in otherwise:
        assert places(result, real, dtype, terms) <= 1.0
    if "gradients" not in otherwise:
        for found, theirs, sums in zip(gradients, real_gradients, gradient_terms, strict=True):
            assert places(found, theirs, dtype, sums) <= 1.0


@pytest.mark.parametrize("operation", sorted(ADDED_IN_HALF))
def test_where_they_differ_it_is_autocast_that_is_off(operation):
    call = calls()[operation]
    with torch.autocast("cpu", torch.float16):
        real, real_gradients = forward_and_backward(call)
    (exact, exact_gradients), (terms, gradient_terms) = exactly(call, torch.float16)
    off = {"result": places(real, exact, torch.float16, terms)}
    off["gradients"] = max(
        places(theirs, meant, torch.float16, sums)
        for theirs, meant, sums in zip(real_gradients, exact_gradients, gradient_terms, strict=True)
    )
    if all(off[part] <= 0.5 for part in ADDED_IN_HALF[operation]):
        pytest.skip("this CPU adds up in float32")
    assert max(off[part] for part in ADDED_IN_HALF[operation]) > 1.0


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def trained(model, inputs, targets, context, steps=1):
    """Losses and the last gradients of a few steps of SGD."""
    torch.manual_seed(0)
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with context():
            output = model(inputs)
        loss = F.cross_entropy(output.float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.grad for parameter in model.parameters()]


def perceptron():
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_perceptron_is_what_autocast_makes_of_it_almost_everywhere_bit_for_bit(dtype):
    """Where not, a sum in another order went to the neighbour."""
    inputs, targets = numbers(64, 16), torch.arange(64) % 4
    losses, gradients = trained(perceptron, inputs, targets, lambda: gradilocks.emulate(dtype))
    real, real_gradients = trained(
        perceptron, inputs, targets, lambda: torch.autocast("cpu", dtype)
    )
    plain, _ = trained(perceptron, inputs, targets, lambda: gradilocks.emulate("fp32"))
    assert abs(losses[0] - real[0]) < abs(losses[0] - plain[0]) / 100
    found, theirs = (torch.cat([g.flatten() for g in each]) for each in (gradients, real_gradients))
    assert (found != theirs).float().mean() < 0.01
    assert places(found, theirs, dtype, theirs.abs().max().expand_as(theirs)) <= 1.0


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(images))
        return self.head(F.gelu(self.second(hidden)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normal = self.norm(rows)
        mixed, _ = self.attention(normal, normal, normal, need_weights=False)
        return self.head((rows + mixed).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rows, self.head = kind(16, 12), nn.Linear(12, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(rows.transpose(0, 1))[0][-1])


MODELS = {
    "convolutions": (Convolutions, (8, 3, 9, 9)),
    "attention": (Attention, (8, 6, 16)),
    "RNN": (lambda: Recurrent(nn.RNN), (8, 6, 16)),
    "GRU": (lambda: Recurrent(nn.GRU), (8, 6, 16)),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_what_autocast_makes_of_it_to_one_unit_in_the_last_place_of_its_norm(name):
    """Not of each number: autocast also stores what is no product, and some nearly cancel."""
    make, shape = MODELS[name]
    inputs, targets = numbers(*shape), torch.arange(8) % 4
    losses, gradients = trained(make, inputs, targets, lambda: gradilocks.emulate("fp16"))
    real, real_gradients = trained(
        make, inputs, targets, lambda: torch.autocast("cpu", torch.float16)
    )
    assert losses == pytest.approx(real, rel=2**-10)
    found, theirs = (torch.cat([g.flatten() for g in each]) for each in (gradients, real_gradients))
    assert (found - theirs).norm() <= 2**-10 * theirs.norm()
