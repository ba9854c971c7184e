"""Gradients that the kernels cannot take: the roll leaves them to the stages, unread."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.control.roll_call import RollCall
from tests.control.short_way import DEVICES, parameter, serve

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks.step.roll import Roll

from gradilocks import kernels
from gradilocks.kernels import fused, reference


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    return serve(request.param, monkeypatch)


@pytest.fixture
def pupils(device):
    made = RollCall(device)
    assert made.call() is not None
    return made


def strided(pupils):
    param = pupils.groups[0][0]
    param.grad = torch.arange(32.0, device=param.device).view(4, 8)[:, ::2]


def strided_with_the_strides_of_a_dense_one(pupils):
    param = pupils.groups[2][0]
    pupils.call()
    # Column by column: (2, 8) with strides (1, 2), then part of a larger one with the same.
    param.grad = torch.arange(16.0, device=param.device).view(8, 2).t()
    assert pupils.call() is not None
    param.data, param.grad = param.data.view(1, 16), None
    param.grad = torch.arange(32.0, device=param.device).view(16, 2).t()[:1]


def expanded(pupils):
    param = pupils.groups[0][1]
    param.grad = torch.ones(1, device=param.device).expand(6)


def negative_view(pupils):
    param = pupils.groups[0][1]
    param.grad = torch._neg_view(torch.ones(6, device=param.device))


def sparse(pupils):
    param = pupils.groups[0][0]
    param.grad = torch.eye(4, device=param.device).to_sparse()


def complex_valued(pupils):
    (new,) = [nn.Parameter(torch.ones(2, dtype=torch.complex64, device=pupils.params()[0].device))]
    new.grad = torch.ones_like(new)
    pupils.groups[1].append(new)


def float8(pupils):
    param = pupils.groups[0][1]
    param.grad.data = param.grad.data.to(torch.float8_e4m3fn)


def of_a_subclass(pupils):
    class Odd(torch.Tensor):
        pass

    param = pupils.groups[0][1]
    param.grad = torch.ones(6, device=param.device).as_subclass(Odd)


def all_gone(pupils):
    for param in pupils.params():
        param.grad = None


NOT_PLAIN = [
    strided,
    strided_with_the_strides_of_a_dense_one,
    expanded,
    negative_view,
    sparse,
    complex_valued,
    float8,
    of_a_subclass,
    all_gone,
]


@pytest.mark.parametrize("change", NOT_PLAIN, ids=lambda change: change.__name__)
def test_what_the_kernels_cannot_take_is_left_to_the_stages_and_taken_again_after_it(
    pupils, change
):
    first = pupils.call()
    change(pupils)
    assert pupils.call() is None
    assert pupils.call() is None
    fresh = RollCall(first.device)
    pupils.groups = fresh.groups
    assert pupils.call() is not None


def test_a_gradient_becomes_a_dtensor_and_is_not_read_at_its_address(pupils):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    param = pupils.groups[0][1]
    kind = param.device.type
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(kind, (1,))
        param.grad = distribute_tensor(torch.ones(6, device=kind), mesh, [Replicate()])
        assert pupils.call() is None
        param.grad = None
        assert pupils.call() is not None
        whole = distribute_tensor(torch.ones(6, device=kind), mesh, [Replicate()])
        pupils.groups[0][1] = nn.Parameter(whole)
        assert pupils.call() is None  # Its gradient may be on another rank.
    finally:
        dist.destroy_process_group()


def test_gradients_on_a_device_that_the_kernels_do_not_serve_are_left_alone(monkeypatch):
    monkeypatch.setitem(kernels._chosen, "meta", (fused, "for this test"))
    monkeypatch.setitem(kernels._chosen, "cpu", (reference, "for this test"))
    first, second = nn.Parameter(torch.ones(2, device="meta")), parameter(3)
    second.grad = torch.ones_like(second)
    assert Roll().call([[first, second]]) is None


@pytest.mark.gpu
def test_a_gradient_that_was_moved_to_the_host_is_not_read_on_the_device(monkeypatch):
    pupils = RollCall(serve("cuda", monkeypatch))
    assert pupils.call() is not None
    grad = pupils.groups[0][1].grad
    grad.data = grad.data.cpu()
    assert pupils.call() is None
