"""The optimizer pass of the C extension against the formulas in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kernels.cases import same_bits

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SHAPES = [(3,), (90_001,), (300, 200), (0,), ()]
ADAM = {"lr": 0.1, "weight_decay": 0.3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
SGD = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9, "nesterov": 0.0}


class Parameters:
    """Parameters with gradients, moments and master copies, and the tables that `cpu.adam` and `cpu.sgd` read.

    Args:
        dtype: of the parameters.
        grad: dtype of the gradients; that of the parameters by default.
        state: dtype of the moments; that of the parameters by default.
        master: True for float32 master copies.
        shapes: of the parameters.
        divisor: the gradients are multiplied by it.
    """

    def __init__(self, dtype, *, grad=None, state=None, master=False, shapes=SHAPES, divisor=1.0):
        generator = torch.Generator().manual_seed(3)

        def random(shape, kind):
            return torch.randn(shape, generator=generator).to(kind)

        self.masters = [random(shape, torch.float32) for shape in shapes] if master else None
        self.params = [m.to(dtype) for m in self.masters] if master else [random(shape, dtype) for shape in shapes]
        self.grads = [(random(shape, torch.float32) * divisor).to(grad or dtype) for shape in shapes]
        self.first = [torch.zeros(shape, dtype=state or dtype) for shape in shapes]
        self.second = [torch.zeros(shape, dtype=state or dtype) for shape in shapes]
        self.steps = [torch.zeros(()) for _ in shapes]
        self.kind = CODES[dtype] | CODES[grad or dtype] << 3 | CODES[state or dtype] << 6
        self.divisor = divisor

    def tensors(self):
        """Everything that a step changes."""
        return [*self.params, *self.first, *self.second, *self.steps, *(self.masters or ())]

    def step(self, function, settings, absent=()):
        """Calls `cpu.adam` or `cpu.sgd`.

        Args:
            function: one of the two.
            settings: up to 8 numbers.
            absent: indices of parameters without a gradient.
        """
        rows = [self.grads, self.params, self.steps, self.first, self.second, self.masters]
        # An empty tensor has no address; any other number than 0 says that there is a gradient.
        table = [[t.data_ptr() or 16 for t in row] if row else [0] * len(self.params) for row in rows]
        for index in absent:
            table[0][index] = 0
        n = len(self.params)
        sizes = torch.tensor([param.numel() for param in self.params])
        kinds, groups = torch.full((n,), self.kind, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
        numbers = torch.tensor([[*settings, *[0.0] * (8 - len(settings))]], dtype=torch.float64)
        function(torch.tensor(table), sizes, kinds, groups, numbers, self.divisor)


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


CASES = {
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "float32 with bfloat16 gradients": {"dtype": torch.float32, "grad": torch.bfloat16},
    "bfloat16 with float32 moments": {"dtype": torch.bfloat16, "state": torch.float32},
    "bfloat16 with masters": {"dtype": torch.bfloat16, "state": torch.float32, "master": True},
    "float16 with masters": {"dtype": torch.float16, "state": torch.float32, "master": True},
}
every_case = pytest.mark.parametrize("name", CASES)


def check(found, expected):
    """Compares with a float64 result: one rounding to the stored type, after a few in the arithmetic."""
    tolerance = 2e-6 + torch.finfo(found.dtype).eps / 2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@every_case
@pytest.mark.parametrize("decoupled", [0.0, 1.0])
@pytest.mark.parametrize("divisor", [1.0, 1024.0])
def test_a_step_of_adam_is_that_of_float64(cpu, name, decoupled, divisor):
    run = Parameters(**CASES[name], divisor=divisor)
    weights = run.masters or run.params
    for step in (1, 2, 3):
        before = [[t.to(torch.float64, copy=True) for t in row] for row in (weights, run.grads, run.first, run.second)]
        run.step(cpu.adam, [*ADAM.values(), decoupled])
        for i, (weight, grad, first, second) in enumerate(zip(*before, strict=True)):
            expected = adam_in_float64(weight, grad / divisor, first, second, step, decoupled=decoupled, **ADAM)
            for found, number in zip((weights[i], run.first[i], run.second[i]), expected, strict=True):
                check(found, number)
            assert run.steps[i].item() == step


@every_case
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, 0.0), (0.9, 0.0), (0.9, 1.0)])
def test_a_step_of_sgd_is_that_of_float64(cpu, name, momentum, nesterov):
    run = Parameters(**CASES[name], divisor=1024.0)
    weights = run.masters or run.params
    settings = {**SGD, "momentum": momentum, "nesterov": nesterov}
    for _ in range(3):
        before = [[t.to(torch.float64, copy=True) for t in row] for row in (weights, run.grads, run.first)]
        run.step(cpu.sgd, settings.values())
        for i, (weight, grad, buffer) in enumerate(zip(*before, strict=True)):
            weight, buffer = sgd_in_float64(weight, grad / 1024.0, buffer, **settings)
            check(weights[i], weight)
            check(run.first[i], buffer if momentum else torch.zeros_like(buffer))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_parameter_with_a_master_is_the_master_rounded(cpu, dtype):
    run = Parameters(dtype, state=torch.float32, master=True)
    for _ in range(3):
        run.step(cpu.adam, [*ADAM.values(), 1.0])
    assert all(same_bits(param, master.to(dtype)) for param, master in zip(run.params, run.masters, strict=True))


def test_adamw_is_torchs_but_for_rounding(cpu):
    run = Parameters(torch.float32)
    params = [torch.nn.Parameter(param.clone()) for param in run.params]
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3, betas=(0.9, 0.99), fused=True)
    for _ in range(3):
        for param, grad in zip(params, run.grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        run.step(cpu.adam, [*ADAM.values(), 1.0])
    for found, expected in zip(run.params, params, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)


def stepped(cpu, case, function, **options):
    run = Parameters(**CASES[case], **options)
    for _ in range(3):
        run.step(getattr(cpu, function), [*ADAM.values(), 1.0] if function == "adam" else SGD.values())
    return run


@every_case
@pytest.mark.parametrize("function", ["adam", "sgd"])
def test_any_number_of_threads_steps_to_the_same_bits(cpu, name, function, threads):
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(stepped(cpu, name, function).tensors())
    for other in found[1:]:
        assert all(map(same_bits, found[0], other))


@pytest.mark.parametrize("name", ["float32", "bfloat16 with masters"])
def test_the_bits_of_an_element_do_not_depend_on_its_place_in_a_tensor(cpu, name, threads):
    threads(1)
    whole = stepped(cpu, name, "adam", shapes=[(70_001,)])
    parts = Parameters(**CASES[name], shapes=[(70_001,)])
    for row in (parts.params, parts.grads, parts.first, parts.second, *((parts.masters,) if parts.masters else ())):
        row[:] = [piece.clone() for piece in row[0].split([1, 4095, 4097, 30_000, 31_808])]
    parts.steps = [torch.zeros(()) for _ in range(5)]
    for _ in range(3):
        parts.step(cpu.adam, [*ADAM.values(), 1.0])
    assert same_bits(torch.cat(parts.params), whole.params[0])
    assert same_bits(torch.cat(parts.second), whole.second[0])


@pytest.mark.parametrize("function", ["adam", "sgd"])
def test_a_parameter_without_gradient_is_left_unchanged_and_its_step_is_not_counted(cpu, function):
    run = Parameters(torch.float32)
    before = [tensor.clone() for tensor in run.tensors()]
    run.step(getattr(cpu, function), [*ADAM.values(), 1.0] if function == "adam" else SGD.values(), absent=[1, 4])
    n = len(SHAPES)
    for index, (tensor, old) in enumerate(zip(run.tensors(), before, strict=True)):
        if index % n in (1, 4):
            assert same_bits(tensor, old)
    if function == "adam":
        assert [step.item() for step in run.steps] == [1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("function", ["adam", "sgd"])
def test_gradients_are_read_and_not_changed(cpu, function):
    for case in CASES:
        fresh = Parameters(**CASES[case])
        run = stepped(cpu, case, function)
        assert all(map(same_bits, run.grads, fresh.grads))


def test_groups_have_their_own_settings(cpu):
    shapes = [(5,), (6,), (7,)]
    run = Parameters(torch.float32, shapes=shapes)
    before = [param.clone() for param in run.params]
    rows = [run.grads, run.params, run.steps, run.first, run.second]
    table = torch.tensor([*([t.data_ptr() for t in row] for row in rows), [0] * 3])
    sizes, kinds = torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.int32)
    groups = torch.tensor([0, 1, 0], dtype=torch.int32)
    settings = torch.tensor([[0.5] + [0.0] * 7, [0.0] * 8], dtype=torch.float64)
    cpu.sgd(table, sizes, kinds, groups, settings, 1.0)
    assert torch.equal(run.params[0], before[0] - 0.5 * run.grads[0])
    assert torch.equal(run.params[1], before[1])
    assert torch.equal(run.params[2], before[2] - 0.5 * run.grads[2])


def test_moments_equal_to_the_gradient_stay_exactly_equal(cpu):
    """`lerp` from the nearer end: constant gradients do not drift."""
    for beta1, beta2 in itertools.product((0.1, 0.5, 0.9), (0.2, 0.99, 0.999)):
        run = Parameters(torch.float32, shapes=[(17,)])
        run.first[0].copy_(run.grads[0])
        run.second[0].copy_(run.grads[0].square())
        run.step(cpu.adam, [0.1, 0.0, beta1, beta2, 1e-8, 1.0])
        assert same_bits(run.first[0], run.grads[0])
        assert same_bits(run.second[0], run.grads[0].square())
