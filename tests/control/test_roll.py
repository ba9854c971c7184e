"""The roll of gradients: the same object while nothing changes, and no change goes unnoticed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from short_way import DEVICES, parameter, serve
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks import kernels
from gradilocks.kernels import fused, pieces, reference
from gradilocks.roll import Roll

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    return serve(request.param, monkeypatch)


class Class:
    """Three groups of parameters, their gradients, and who calls their roll."""

    def __init__(self, device):
        shapes = [[(4, 4), (6,)], [(1,)], [(2, 8), (3,)]]
        self.groups = [[parameter(*shape, device=device) for shape in group] for group in shapes]
        self.roll = Roll()
        self.new_gradients()

    def new_gradients(self):
        for place, param in enumerate(self.params()):
            param.grad = torch.full_like(param, 1.0 + place)

    def params(self):
        return [param for group in self.groups for param in group]

    def call(self):
        """Calls the roll and compares everything it says with what is there."""
        called = self.roll.call(self.groups)
        if called is None:
            return None
        having = [param for param in self.params() if param.grad is not None]
        assert [id(param) for param in called.params] == [id(param) for param in having]
        assert [id(grad) for grad in called.grads] == [id(param.grad) for param in having]
        grads = [param.grad for param in having]
        assert called.addresses == [grad.data_ptr() for grad in grads]
        assert called.homes == [param.data_ptr() for param in having]
        assert called.sizes == [grad.numel() for grad in grads]
        assert called.dtypes == [grad.dtype for grad in grads]
        assert called.device == grads[0].device
        located = called.located
        assert located.pointers.tolist() == called.addresses
        assert located.layout.sizes.tolist() == called.sizes
        assert located.rest == ()
        kinds = {bucket.kind for bucket in located.layout.buckets}
        assert kinds == {
            (grad.dtype, 16 if grad.data_ptr() % 16 == 0 else grad.element_size()) for grad in grads
        }
        assert all(pieces.is_dense(grad) for grad in grads)
        called.release()
        return called


@pytest.fixture
def pupils(device):
    made = Class(device)
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
    fresh = Class(first.device)
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


def test_gradients_on_a_device_that_the_kernels_do_not_serve_are_left_alone(monkeypatch):
    monkeypatch.setitem(kernels._chosen, "meta", (fused, "for this test"))
    monkeypatch.setitem(kernels._chosen, "cpu", (reference, "for this test"))
    first, second = nn.Parameter(torch.ones(2, device="meta")), parameter(3)
    second.grad = torch.ones_like(second)
    assert Roll().call([[first, second]]) is None


def test_the_gradients_are_not_kept_alive_once_released(pupils):
    pupils.call()
    gradients = [weakref.ref(param.grad) for param in pupils.params()]
    all_gone(pupils)
    gc.collect()
    assert [gradient() for gradient in gradients] == [None] * 5


def test_no_parameters_are_no_roll():
    assert Roll().call([]) is None
    assert Roll().call([[], []]) is None


@pytest.mark.gpu
def test_a_gradient_that_was_moved_to_the_host_is_not_read_on_the_device(monkeypatch):
    pupils = Class(serve("cuda", monkeypatch))
    assert pupils.call() is not None
    grad = pupils.groups[0][1].grad
    grad.data = grad.data.cpu()
    assert pupils.call() is None
