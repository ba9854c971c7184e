"""The table of gradients: one object while nothing changes, and no change goes unnoticed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.engine.backends import parameter, serve

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks import kernels
from gradilocks.kernels import native, pieces, reference, triton_backend
from gradilocks.step import table
from gradilocks.step.table import GradientTable

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class CheckedTable:
    """Three groups of parameters, their gradients, and the table of them."""

    def __init__(self, device):
        shapes = [[(4, 4), (6,)], [(1,)], [(2, 8), (3,)]]
        self.groups = [[parameter(*shape, device=device) for shape in group] for group in shapes]
        self.table = GradientTable()
        self.new_gradients()

    def new_gradients(self):
        for place, param in enumerate(self.params()):
            param.grad = torch.full_like(param, 1.0 + place)

    def params(self):
        return [param for group in self.groups for param in group]

    def find(self):
        """Finds the gradients and compares everything that is said of them with what is there."""
        found = self.table.find_addressed([self.groups], name=str)
        if found is None:
            return None
        having = [param for param in self.params() if param.grad is not None]
        assert [id(param) for param in found.params] == [id(param) for param in having]
        assert [id(grad) for grad in found.tensors] == [id(param.grad) for param in having]
        grads = [param.grad for param in having]
        assert found.at.addresses == [grad.data_ptr() for grad in grads]
        assert found.homes == [param.data_ptr() for param in having]
        assert found.at.sizes == tuple(grad.numel() for grad in grads)
        assert found.dtypes == {grad.dtype for grad in grads}
        assert found.device == grads[0].device
        located = found.at.located
        assert located.pointers.tolist() == found.at.addresses
        assert located.chunking.sizes.tolist() == list(found.at.sizes)
        assert located.rest == ()
        kinds = {bucket.kind for bucket in located.chunking.buckets}
        assert kinds == {
            (grad.dtype, 16 if grad.data_ptr() % 16 == 0 else grad.element_size()) for grad in grads
        }
        assert all(pieces.is_dense(grad) for grad in grads)
        found.release()
        return found


@pytest.fixture(params=["in C++", "with torch's guard", "without it"])
def checked(device, request, monkeypatch):
    if request.param == "in C++":
        if native.library() is None:
            pytest.skip("the native library cannot be built here")
    else:
        monkeypatch.setattr(native, "library", lambda: None)
    if request.param == "without it":
        monkeypatch.setattr(table, "tensor_guards", lambda tensors: None)
    made = CheckedTable(device)
    found = made.find()
    assert (found.walker is not None) == (request.param == "in C++")
    return made


def test_the_same_object_comes_back_while_nothing_changes(checked):
    first = checked.find()
    assert checked.find() is first
    for param in checked.params():
        param.grad.mul_(2.0)
        param.data.mul_(2.0)
    assert checked.find() is first


def test_the_same_object_comes_back_with_new_gradients(checked):
    first = checked.find()
    kept = []
    for _ in range(3):
        kept += [param.grad for param in checked.params()]  # So that addresses are new.
        checked.new_gradients()
        assert checked.find() is first


def test_what_does_not_matter_to_the_kernels_changes_nothing(checked):
    first = checked.find()
    checked.params()[0].requires_grad_(False)
    assert checked.find() is first
    with torch.autocast(first.device.type, dtype=torch.bfloat16):
        assert checked.find() is first
    with torch.no_grad():
        assert checked.find() is first
    assert checked.find() is first


def frozen(checked):
    checked.groups[0][1].grad = None


def replaced(checked):
    old = checked.groups[0][1]
    new = nn.Parameter(old.detach().clone())
    new.grad = torch.full_like(new, 7.0)
    checked.groups[0][1] = new


def replaced_by_one_element_of_equal_value(checked):
    old = checked.groups[1][0]
    new = nn.Parameter(old.detach().clone())
    new.grad = torch.full_like(new, 7.0)
    checked.groups[1][0] = new


def swapped(checked):
    first = checked.groups[0]
    first[0], first[1] = first[1], first[0]


def data_swapped(checked):
    param = checked.groups[0][0]
    checked.kept = param.data
    param.data = param.data.clone()


def data_shrunk_in_its_place(checked):
    param = checked.groups[0][1]
    param.data, param.grad = param.data[:3], None
    param.grad = torch.full_like(param, 2.0)


def data_transposed_in_its_place(checked):
    param = checked.groups[0][0]
    param.data = param.data.t()


def dtype_changed_in_its_place(checked):
    param = checked.groups[0][1]
    param.data, param.grad = param.data.view(torch.float16)[:6], None
    param.grad = torch.full_like(param, 2.0)


def gradient_of_another_dtype(checked):
    param = checked.groups[0][1]
    param.grad.data = param.grad.data.half()


def gradient_transposed(checked):
    param = checked.groups[0][0]
    param.grad = torch.arange(16.0, device=param.device).view(4, 4).t()


def gradient_unaligned(checked):
    param = checked.groups[0][1]
    param.grad = torch.arange(7.0, device=param.device)[1:]


def group_added(checked):
    (new,) = [parameter(5, device=checked.params()[0].device)]
    new.grad = torch.full_like(new, 7.0)
    checked.groups.append([new])


def group_removed(checked):
    del checked.groups[1]


def parameter_added(checked):
    checked.groups[1].append(checked.groups[2].pop())


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
def test_a_change_is_noticed(checked, change):
    first = checked.find()
    change(checked)
    second = checked.find()
    assert second is not None
    assert second is not first
    assert checked.find() is second


def test_storage_given_to_a_gradient_is_found(checked):
    first = checked.find()
    grad = checked.groups[0][1].grad
    grad.set_(torch.full_like(grad, 5.0))
    assert checked.find() is first  # Only the address is another, and `find` compares it.


def test_unfreezing_is_noticed(checked):
    param = checked.groups[2][1]
    param.grad = None
    first = checked.find()
    assert len(first.params) == 4
    param.grad = torch.ones_like(param)
    assert len(checked.find().params) == 5


def test_one_element_without_a_gradient_is_told_from_an_equal_one_that_has_it(checked):
    old = checked.groups[1][0]
    old.grad = None
    assert len(checked.find().params) == 4
    new = nn.Parameter(old.detach().clone())
    new.grad = torch.ones_like(new)
    checked.groups[1][0] = new
    assert len(checked.find().params) == 5


# Said by torch, once a process, of the thread in which it runs backward.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_lazy_parameters_wait_for_their_shape(checked, device):
    lazy = nn.LazyLinear(1, device=device)
    checked.groups.append(list(lazy.parameters()))
    first = checked.find()
    assert len(first.params) == 5
    assert checked.find() is first
    checked.groups[3][0] = nn.Parameter(torch.ones(2, device=device))
    assert checked.find() is not first
    lazy(torch.ones(1, 1, device=device)).sum().backward()
    assert len(checked.find().params) == 6


def test_the_gradients_are_not_kept_alive_once_released(checked):
    checked.find()
    gradients = [weakref.ref(param.grad) for param in checked.params()]
    for param in checked.params():
        param.grad = None
    gc.collect()
    assert [gradient() for gradient in gradients] == [None] * 5


def test_no_parameters_have_no_addressed_gradients():
    assert table.GradientTable().find_addressed([], name=str) is None
    assert table.GradientTable().find_addressed([[[], []]], name=str) is None


def strided(checked):
    param = checked.groups[0][0]
    param.grad = torch.arange(32.0, device=param.device).view(4, 8)[:, ::2]


def strided_with_the_strides_of_a_dense_one(checked):
    param = checked.groups[2][0]
    checked.find()
    # Column by column: (2, 8) with strides (1, 2), then part of a larger one with the same.
    param.grad = torch.arange(16.0, device=param.device).view(8, 2).t()
    assert checked.find() is not None
    param.data, param.grad = param.data.view(1, 16), None
    param.grad = torch.arange(32.0, device=param.device).view(16, 2).t()[:1]


def expanded(checked):
    param = checked.groups[0][1]
    param.grad = torch.ones(1, device=param.device).expand(6)


def negative_view(checked):
    param = checked.groups[0][1]
    param.grad = torch._neg_view(torch.ones(6, device=param.device))


def sparse(checked):
    param = checked.groups[0][0]
    param.grad = torch.eye(4, device=param.device).to_sparse()


def complex_valued(checked):
    (new,) = [nn.Parameter(torch.ones(2, dtype=torch.complex64, device=checked.params()[0].device))]
    new.grad = torch.ones_like(new)
    checked.groups[1].append(new)


def float8(checked):
    param = checked.groups[0][1]
    param.grad.data = param.grad.data.to(torch.float8_e4m3fn)


def of_a_subclass(checked):
    class Odd(torch.Tensor):
        pass

    param = checked.groups[0][1]
    param.grad = torch.ones(6, device=param.device).as_subclass(Odd)


def all_gone(checked):
    for param in checked.params():
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
def test_what_the_kernels_cannot_take_is_left_to_plain_torch_and_taken_again_after_it(
    checked, change
):
    first = checked.find()
    change(checked)
    assert checked.find() is None
    assert checked.find() is None
    fresh = CheckedTable(first.device)
    checked.groups = fresh.groups
    assert checked.find() is not None


def test_a_gradient_becomes_a_dtensor_and_is_not_read_at_its_address(checked):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    param = checked.groups[0][1]
    kind = param.device.type
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(kind, (1,))
        param.grad = distribute_tensor(torch.ones(6, device=kind), mesh, [Replicate()])
        assert checked.find() is None
        param.grad = None
        assert checked.find() is not None
        whole = distribute_tensor(torch.ones(6, device=kind), mesh, [Replicate()])
        checked.groups[0][1] = spread = nn.Parameter(whole)
        assert checked.find() is not None  # It has none yet.
        spread.grad = distribute_tensor(torch.ones(6, device=kind), mesh, [Replicate()])
        table = GradientTable()
        for _ in range(2):
            found = table.find_addressed([checked.groups], name=str)
            assert found.params[1] is spread
            assert found.at.addresses[1] == spread.grad.to_local().data_ptr()
            assert found.homes[1] == spread.to_local().data_ptr()
    finally:
        dist.destroy_process_group()


def test_gradients_on_a_device_that_the_kernels_do_not_serve_are_left_alone(monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, "meta", triton_backend)
    monkeypatch.setitem(kernels.BACKENDS, "cpu", reference)
    first, second = nn.Parameter(torch.ones(2, device="meta")), parameter(3)
    second.grad = torch.ones_like(second)
    assert GradientTable().find_addressed([[[first, second]]], name=str) is None


@pytest.mark.gpu
def test_a_gradient_that_was_moved_to_the_host_is_not_read_on_the_device(monkeypatch):
    checked = CheckedTable(serve("cuda", monkeypatch))
    assert checked.find() is not None
    grad = checked.groups[0][1].grad
    grad.data = grad.data.cpu()
    assert checked.find() is None
