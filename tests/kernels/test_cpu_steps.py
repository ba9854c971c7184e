"""The optimizer pass of the C extension against the formulas in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kernels.cases import same_bits

SHAPES = [(3,), (90_001,), (300, 200), (0,), ()]
ADAM = {"lr": 0.1, "weight_decay": 0.3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
SGD = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9, "nesterov": 0.0}


class Parameters:
    """Parameters with gradients and moments, and the tables that `cpu.adam` and `cpu.sgd` read.

    Args:
        shapes: of the parameters.
        divisor: the gradients are multiplied by it.
    """

    def __init__(self, shapes=SHAPES, divisor=1.0):
        generator = torch.Generator().manual_seed(3)
        self.params = [torch.randn(shape, generator=generator) for shape in shapes]
        self.grads = [torch.randn(shape, generator=generator) * divisor for shape in shapes]
        self.first = [torch.zeros(shape) for shape in shapes]
        self.second = [torch.zeros(shape) for shape in shapes]
        self.steps = [torch.zeros(()) for _ in shapes]
        self.divisor = divisor

    def tensors(self):
        """Everything that a step changes."""
        return [*self.params, *self.first, *self.second, *self.steps]

    def step(self, function, settings):
        """Calls `cpu.adam` or `cpu.sgd` with up to 8 numbers."""
        rows = [self.grads, self.params, self.steps, self.first, self.second]
        # An empty tensor has no address; any other number than 0 says that there is a gradient.
        table = [*([t.data_ptr() or 16 for t in row] for row in rows), [0] * len(self.params)]
        n = len(self.params)
        sizes = torch.tensor([param.numel() for param in self.params])
        groups = torch.zeros(n, dtype=torch.int32)
        numbers = torch.tensor([[*settings, *[0.0] * (8 - len(settings))]], dtype=torch.float64)
        function(torch.tensor(table), sizes, groups, numbers, self.divisor)


def adam_in_float64(weight, grad, first, second, step, *, lr, weight_decay, beta1, beta2, eps, decoupled):
    if not decoupled:
        grad = grad + weight_decay * weight
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    change = lr / (1 - beta1**step) * first / (second.sqrt() / math.sqrt(1 - beta2**step) + eps)
    return weight - change - (lr * weight_decay * weight if decoupled else 0.0), first, second


def sgd_in_float64(weight, grad, buffer, *, lr, weight_decay, momentum, nesterov):
    grad = grad + weight_decay * weight
    buffer = momentum * buffer + grad
    grad = (grad + momentum * buffer if nesterov else buffer) if momentum else grad
    return weight - lr * grad, buffer


def check(found, expected):
    """Compares with a float64 result: a few roundings to float32."""
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("decoupled", [0.0, 1.0])
@pytest.mark.parametrize("divisor", [1.0, 1024.0])
def test_a_step_of_adam_is_that_of_float64(cpu, decoupled, divisor):
    run = Parameters(divisor=divisor)
    for step in (1, 2, 3):
        before = [
            [t.to(torch.float64, copy=True) for t in row] for row in (run.params, run.grads, run.first, run.second)
        ]
        run.step(cpu.adam, [*ADAM.values(), decoupled])
        for i, (weight, grad, first, second) in enumerate(zip(*before, strict=True)):
            expected = adam_in_float64(weight, grad / divisor, first, second, step, decoupled=decoupled, **ADAM)
            for found, number in zip((run.params[i], run.first[i], run.second[i]), expected, strict=True):
                check(found, number)
            assert run.steps[i].item() == step


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, 0.0), (0.9, 0.0), (0.9, 1.0)])
def test_a_step_of_sgd_is_that_of_float64(cpu, momentum, nesterov):
    run = Parameters(divisor=1024.0)
    settings = {**SGD, "momentum": momentum, "nesterov": nesterov}
    for _ in range(3):
        before = [[t.to(torch.float64, copy=True) for t in row] for row in (run.params, run.grads, run.first)]
        run.step(cpu.sgd, settings.values())
        for i, (weight, grad, buffer) in enumerate(zip(*before, strict=True)):
            weight, buffer = sgd_in_float64(weight, grad / 1024.0, buffer, **settings)
            check(run.params[i], weight)
            check(run.first[i], buffer if momentum else torch.zeros_like(buffer))


def stepped(cpu, function, **options):
    run = Parameters(**options)
    for _ in range(3):
        run.step(getattr(cpu, function), [*ADAM.values(), 1.0] if function == "adam" else SGD.values())
    return run


@pytest.mark.parametrize("function", ["adam", "sgd"])
def test_any_number_of_threads_steps_to_the_same_bits(cpu, function, threads):
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(stepped(cpu, function).tensors())
    for other in found[1:]:
        assert all(map(same_bits, found[0], other))


def test_the_bits_of_an_element_do_not_depend_on_its_place_in_a_tensor(cpu, threads):
    threads(1)
    whole = stepped(cpu, "adam", shapes=[(70_001,)])
    parts = Parameters(shapes=[(70_001,)])
    for row in (parts.params, parts.grads, parts.first, parts.second):
        row[:] = [piece.clone() for piece in row[0].split([1, 4095, 4097, 30_000, 31_808])]
    parts.steps = [torch.zeros(()) for _ in range(5)]
    for _ in range(3):
        parts.step(cpu.adam, [*ADAM.values(), 1.0])
    assert same_bits(torch.cat(parts.params), whole.params[0])
    assert same_bits(torch.cat(parts.second), whole.second[0])


def test_moments_equal_to_the_gradient_stay_exactly_equal(cpu):
    """`lerp` from the nearer end: constant gradients do not drift."""
    for beta1, beta2 in itertools.product((0.1, 0.5, 0.9), (0.2, 0.99, 0.999)):
        run = Parameters(shapes=[(17,)])
        run.first[0].copy_(run.grads[0])
        run.second[0].copy_(run.grads[0].square())
        run.step(cpu.adam, [0.1, 0.0, beta1, beta2, 1e-8, 1.0])
        assert same_bits(run.first[0], run.grads[0])
        assert same_bits(run.second[0], run.grads[0].square())
