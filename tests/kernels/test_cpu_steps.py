"""The optimizer pass of the C extension: threads, places of elements, exact moments. tests/optim has its results."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.cases import same_bits

SHAPES = [(3,), (90_001,), (300, 200), (0,), ()]
ADAM = [0.1, 0.3, 0.9, 0.99, 1e-8, 1.0]
"""Learning rate, weight decay, betas, epsilon, and 1 for decoupled weight decay."""
SGD = [0.1, 0.3, 0.9, 0.0]
"""Learning rate, weight decay, momentum, and 1 for Nesterov momentum."""


class Parameters:
    """Parameters with gradients and moments, and the tables that `cpu.step` reads."""

    def __init__(self, shapes=SHAPES):
        generator = torch.Generator().manual_seed(3)
        self.params = [torch.randn(shape, generator=generator) for shape in shapes]
        self.grads = [torch.randn(shape, generator=generator) for shape in shapes]
        self.first = [torch.zeros(shape) for shape in shapes]
        self.second = [torch.zeros(shape) for shape in shapes]
        self.steps = [torch.zeros(()) for _ in shapes]

    def tensors(self):
        """Everything that a step changes."""
        return [*self.params, *self.first, *self.second, *self.steps]

    def step(self, cpu, settings):
        """Calls `cpu.step` with up to 8 numbers: more than 4 are Adam's."""
        rows = [self.grads, self.params, self.steps, self.first, self.second]
        # An empty tensor has no address; any other number than 0 says that there is a gradient.
        table = [*([t.data_ptr() or 16 for t in row] for row in rows), [0] * len(self.params)]
        n = len(self.params)
        sizes = torch.tensor([param.numel() for param in self.params])
        groups = torch.zeros(n, dtype=torch.int32)
        numbers = torch.tensor([[*settings, *[0.0] * (8 - len(settings))]], dtype=torch.float64)
        cpu.step(len(settings) > 4, torch.tensor(table), sizes, groups, numbers, 1.0)


def stepped(cpu, settings, **options):
    run = Parameters(**options)
    for _ in range(3):
        run.step(cpu, settings)
    return run


@pytest.mark.parametrize("settings", [ADAM, SGD], ids=["adam", "sgd"])
def test_any_number_of_threads_steps_to_the_same_bits(cpu, settings, threads):
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(stepped(cpu, settings).tensors())
    for other in found[1:]:
        assert all(map(same_bits, found[0], other))


def test_the_bits_of_an_element_do_not_depend_on_its_place_in_a_tensor(cpu, threads):
    threads(1)
    whole = stepped(cpu, ADAM, shapes=[(70_001,)])
    parts = Parameters(shapes=[(70_001,)])
    for row in (parts.params, parts.grads, parts.first, parts.second):
        row[:] = [piece.clone() for piece in row[0].split([1, 4095, 4097, 30_000, 31_808])]
    parts.steps = [torch.zeros(()) for _ in range(5)]
    for _ in range(3):
        parts.step(cpu, ADAM)
    assert same_bits(torch.cat(parts.params), whole.params[0])
    assert same_bits(torch.cat(parts.second), whole.second[0])


def test_moments_equal_to_the_gradient_stay_exactly_equal(cpu):
    """`lerp` from the nearer end: constant gradients do not drift."""
    for beta1, beta2 in itertools.product((0.1, 0.5, 0.9), (0.2, 0.99, 0.999)):
        run = Parameters(shapes=[(17,)])
        run.first[0].copy_(run.grads[0])
        run.second[0].copy_(run.grads[0].square())
        run.step(cpu, [0.1, 0.0, beta1, beta2, 1e-8, 1.0])
        assert same_bits(run.first[0], run.grads[0])
        assert same_bits(run.second[0], run.grads[0].square())
