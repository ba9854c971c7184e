"""Who a script's parameters are and which have a gradient: known in C++, and in Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from gradilocks import kernels
from gradilocks.kernels import native
from gradilocks.observe.parameter_marks import marks_of
from gradilocks.record import sample
from gradilocks.record.sample import LARGEST_WHOLE, Weights

NATIVE = native.library()
without_a_compiler = pytest.mark.skipif(NATIVE is None, reason="the native library is not built")


@pytest.fixture(params=[pytest.param("native", marks=without_a_compiler), "python"])
def walked_in(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


class Own(torch.Tensor):
    """Has its gradient elsewhere."""

    elsewhere = None

    @property
    def grad(self):
        return self.elsewhere


def own(gradient):
    made = torch.ones(2).as_subclass(Own)
    made.elsewhere = gradient
    return made


def test_those_without_a_gradient_are_marked(walked_in):
    params = [nn.Parameter(torch.ones(2)) for _ in range(4)] + [own(None), own(torch.ones(2))]
    params[1].grad = torch.ones(2)
    params[3].grad = torch.zeros(2).to_sparse()
    marks = marks_of(params)
    assert marks.lacking == int.from_bytes(bytes([1, 0, 1, 0, 1, 0]), "little")
    assert marks.there == int.from_bytes(bytes([1] * 6), "little")
    assert marks_of([]).ids == b""
    assert marks_of([]).there == 0


def test_marks_of_a_list_that_has_changed_are_told_along_the_old_one(walked_in):
    one, two, three = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one.grad = torch.ones(2)
    then = marks_of([one, two])
    now = marks_of([three, one]).along(then.ids)
    assert now.ids == then.ids
    assert now.there == 1  # The second is gone,
    assert now.lacking == 256  # and who is gone has no gradient.
    assert then.along(then.ids) is then


@without_a_compiler
def test_both_ways_mark_alike(monkeypatch):
    dice = random.Random(0)
    params = [nn.Parameter(torch.ones(1)) for _ in range(50)]
    for _ in range(20):
        for param in params:
            param.grad = dice.choice([None, torch.ones(1)])
        dice.shuffle(params)
        found = marks_of(params)
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            assert marks_of(params) == found


@without_a_compiler
@pytest.mark.parametrize("given", [None, [None], [object()], 3])
def test_what_is_no_parameter_is_an_error_and_no_crash(given):
    with pytest.raises((TypeError, AttributeError)):
        NATIVE.parameter_marks(given)
    with pytest.raises((TypeError, ValueError)):
        NATIVE.sampled_runs(given, 4096, 16)


@without_a_compiler
def test_a_tensor_that_is_too_small_for_its_runs_is_refused():
    with pytest.raises(ValueError, match="runs"):
        NATIVE.sampled_runs([torch.ones(100)], 4096, 16)
    with pytest.raises(ValueError, match="runs"):
        NATIVE.sampled_runs([torch.ones(100)], 1, 16)


LARGE = {
    "plain": lambda: torch.randn(700, 512),
    "half": lambda: torch.randn(700, 512).bfloat16(),
    "channels last": lambda: torch.randn(64, 32, 9, 16).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(512, 700).t(),
    "a slice": lambda: torch.randn(700, 600)[:, 5:517],
    "just too large": lambda: torch.randn(LARGEST_WHOLE + 1),
}


@without_a_compiler
def test_both_ways_look_at_the_same_runs_of_large_tensors():
    tensors = [make() for make in LARGE.values()]
    found = sample._sampled(tensors)
    for tensor, one, other in zip(tensors, found, map(sample._runs_of, tensors), strict=True):
        assert torch.equal(one, other)
        if tensor.is_contiguous():
            assert one.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def one_by_one(param):
    """What is looked at of a parameter, as one operation after another has it."""
    if param.is_complex():
        param = torch.view_as_real(param)
    if param.numel() > LARGEST_WHOLE:
        param = sample._runs_of(param)
    return param.to(torch.promote_types(param.dtype, torch.float32), copy=True).reshape(-1)


def test_weights_of_all_kinds_together_are_those_of_each_to_the_bit(walked_in):
    torch.manual_seed(0)
    params = [torch.randn(size) for size in ((), (1,), (3, 5), (0,), (7, 1, 2), (129,))]
    params += [torch.randn(5, 4).t(), torch.randn(8).half(), torch.randn(9, 9).bfloat16()]
    params += [torch.randn(6).double(), torch.randn(4, dtype=torch.complex64)]
    params += [make() for make in LARGE.values()]
    random.Random(0).shuffle(params)
    before, weights = [one_by_one(param) for param in params], Weights(params)
    alone = [Weights([param]) for param in params]
    for param in params[::2]:
        param.mul_(1.01)
    weight, change = weights.norms(torch.device("cpu"))
    assert weight.dtype is change.dtype is torch.float32
    for place, param in enumerate(params):
        own_weight, own_change = alone[place].norms(torch.device("cpu"))
        assert (weight[place], change[place]) == (own_weight[0], own_change[0]), place
        elements = torch.view_as_real(param).numel() if param.is_complex() else param.numel()
        factor = math.sqrt(max(1.0, elements / LARGEST_WHOLE))
        moved = one_by_one(param) - before[place]
        exact = [factor * each.double().norm().item() for each in (before[place], moved)]
        assert [weight[place].item(), change[place].item()] == pytest.approx(exact, rel=1e-6), place


def test_weights_are_measured_alike_where_no_kernel_reaches_them(monkeypatch):
    torch.manual_seed(0)
    params = [torch.randn(size) for size in ((), (3, 5), (0,), (129,), (300, 300))]
    measured = []
    for by_address in (kernels.BACKENDS["cpu"].BY_ADDRESS, False):
        monkeypatch.setattr(kernels.BACKENDS["cpu"], "BY_ADDRESS", by_address)
        copies = [param.clone() for param in params]
        weights = Weights(copies)
        for param in copies:
            param.add_(0.01)
        measured.append(weights.norms(torch.device("cpu")))
    for mine, other in zip(*measured, strict=True):
        # torch adds 65,536 squares up in float32.
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_the_copy_of_an_only_parameter_is_its_own(walked_in):
    for only in (torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(300, 300)):
        weights = Weights([only])
        only.zero_()
        assert weights.norms(torch.device("cpu"))[0].item() > 1.0
