"""The roll of gradients: the same object while nothing changes, and no change goes unnoticed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.control.roll_call import RollCall
from tests.control.short_way import DEVICES, parameter, serve

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks.step import roll

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    return serve(request.param, monkeypatch)


@pytest.fixture(params=[True, False], ids=["with torch's guard", "without it"])
def pupils(device, request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(roll, "tensor_guards", lambda tensors: None)
    made = RollCall(device)
    assert made.call() is not None
    return made


def test_the_same_object_comes_back_while_nothing_changes(pupils):
    first = pupils.call()
    assert pupils.call() is first
    for param in pupils.params():
        param.grad.mul_(2.0)
        param.data.mul_(2.0)
    assert pupils.call() is first


def test_the_same_object_comes_back_with_new_gradients(pupils):
    first = pupils.call()
    kept = []
    for _ in range(3):
        kept += [param.grad for param in pupils.params()]  # So that addresses are new.
        pupils.new_gradients()
        assert pupils.call() is first


def test_what_does_not_matter_to_the_kernels_changes_nothing(pupils):
    first = pupils.call()
    pupils.params()[0].requires_grad_(False)
    assert pupils.call() is first
    with torch.autocast(first.device.type, dtype=torch.bfloat16):
        assert pupils.call() is first
    with torch.no_grad():
        assert pupils.call() is first
    assert pupils.call() is first


def frozen(pupils):
    pupils.groups[0][1].grad = None


def replaced(pupils):
    old = pupils.groups[0][1]
    new = nn.Parameter(old.detach().clone())
    new.grad = torch.full_like(new, 7.0)
    pupils.groups[0][1] = new


def replaced_by_one_element_of_equal_value(pupils):
    old = pupils.groups[1][0]
    new = nn.Parameter(old.detach().clone())
    new.grad = torch.full_like(new, 7.0)
    pupils.groups[1][0] = new


def swapped(pupils):
    first = pupils.groups[0]
    first[0], first[1] = first[1], first[0]


def data_swapped(pupils):
    param = pupils.groups[0][0]
    pupils.kept = param.data
    param.data = param.data.clone()


def data_shrunk_in_its_place(pupils):
    param = pupils.groups[0][1]
    param.data, param.grad = param.data[:3], None
    param.grad = torch.full_like(param, 2.0)


def data_transposed_in_its_place(pupils):
    param = pupils.groups[0][0]
    param.data = param.data.t()


def dtype_changed_in_its_place(pupils):
    param = pupils.groups[0][1]
    param.data, param.grad = param.data.view(torch.float16)[:6], None
    param.grad = torch.full_like(param, 2.0)


def gradient_of_another_dtype(pupils):
    param = pupils.groups[0][1]
    param.grad.data = param.grad.data.half()


def gradient_transposed(pupils):
    param = pupils.groups[0][0]
    param.grad = torch.arange(16.0, device=param.device).view(4, 4).t()


def gradient_unaligned(pupils):
    param = pupils.groups[0][1]
    param.grad = torch.arange(7.0, device=param.device)[1:]


def group_added(pupils):
    (new,) = [parameter(5, device=pupils.params()[0].device)]
    new.grad = torch.full_like(new, 7.0)
    pupils.groups.append([new])


def group_removed(pupils):
    del pupils.groups[1]


def parameter_added(pupils):
    pupils.groups[1].append(pupils.groups[2].pop())


CHANGES = [
    frozen,
    replaced,
    replaced_by_one_element_of_equal_value,
    swapped,
    data_swapped,
    data_shrunk_in_its_place,
    data_transposed_in_its_place,
    dtype_changed_in_its_place,
    gradient_of_another_dtype,
    gradient_transposed,
    gradient_unaligned,
    group_added,
    group_removed,
    parameter_added,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(pupils, change):
    first = pupils.call()
    change(pupils)
    second = pupils.call()
    assert second is not None
    assert second is not first
    assert pupils.call() is second


def test_storage_given_to_a_gradient_is_found(pupils):
    first = pupils.call()
    grad = pupils.groups[0][1].grad
    grad.set_(torch.full_like(grad, 5.0))
    assert pupils.call() is first  # Only the address is another, and `call` compares it.


def test_unfreezing_is_noticed(pupils):
    param = pupils.groups[2][1]
    param.grad = None
    first = pupils.call()
    assert len(first.params) == 4
    param.grad = torch.ones_like(param)
    assert len(pupils.call().params) == 5


def test_one_element_without_a_gradient_is_told_from_an_equal_one_that_has_it(pupils):
    old = pupils.groups[1][0]
    old.grad = None
    assert len(pupils.call().params) == 4
    new = nn.Parameter(old.detach().clone())
    new.grad = torch.ones_like(new)
    pupils.groups[1][0] = new
    assert len(pupils.call().params) == 5


# Said by torch, once a process, of the thread in which it runs backward.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_lazy_parameters_wait_for_their_shape(pupils, device):
    lazy = nn.LazyLinear(1, device=device)
    pupils.groups.append(list(lazy.parameters()))
    first = pupils.call()
    assert len(first.params) == 5
    assert pupils.call() is first
    pupils.groups[3][0] = nn.Parameter(torch.ones(2, device=device))
    assert pupils.call() is not first
    lazy(torch.ones(1, 1, device=device)).sum().backward()
    assert len(pupils.call().params) == 6


def test_the_gradients_are_not_kept_alive_once_released(pupils):
    pupils.call()
    gradients = [weakref.ref(param.grad) for param in pupils.params()]
    for param in pupils.params():
        param.grad = None
    gc.collect()
    assert [gradient() for gradient in gradients] == [None] * 5


def test_no_parameters_are_no_roll():
    assert roll.Roll().call([]) is None
    assert roll.Roll().call([[], []]) is None
