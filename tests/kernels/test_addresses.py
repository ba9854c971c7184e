"""Addresses of gradients, read by the C extension and in Python."""

from __future__ import annotations

import pytest
import torch

from gradilocks.kernels import addresses
from gradilocks.kernels.addresses import EMPTY, AddressReader


@pytest.fixture(params=["C", "Python"])
def reader_class(request, monkeypatch):
    """AddressReader with and without the extension."""
    if request.param == "Python":
        monkeypatch.setattr(addresses, "_read_addresses", None)
    elif addresses._read_addresses is None:
        pytest.skip("the C extension is not compiled, or this torch has no DLPack exchange functions")
    return AddressReader


@pytest.fixture
def params():
    return [
        torch.nn.Parameter(torch.zeros(4, 3)),
        torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.zeros(0)),
        torch.nn.Parameter(torch.zeros(())),
        torch.nn.Parameter(torch.zeros(1, 6, dtype=torch.bfloat16)),
    ]


def test_the_addresses_of_gradients_that_are_laid_out_as_their_parameters(reader_class, params):
    reader = reader_class(params)
    grads = [torch.zeros_like(param) for param in params]
    pointers = [grad.data_ptr() for grad in grads]
    pointers[2] = EMPTY
    assert reader.read(grads).tolist() == pointers
    assert reader.read(params).tolist() != pointers
    assert reader.read([None, grads[1], None, None, None]).tolist() == [0, pointers[1], 0, 0, 0]
    assert reader.read([None] * 5).tolist() == [0] * 5
    assert reader.read(grads).tolist() == pointers
    part_of_storage = torch.zeros(100)[7:19].view(4, 3)
    assert reader.read([part_of_storage, *grads[1:]])[0] == part_of_storage.data_ptr()


def test_strides_of_dimensions_of_size_one_do_not_matter(reader_class, params):
    column = torch.zeros(6, 1, dtype=torch.bfloat16).t()
    assert column.stride() != params[4].stride()
    assert reader_class(params).read([None] * 4 + [column])[4] == column.data_ptr()


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, lambda grad: grad.half()),
        (0, lambda grad: grad.view(3, 4).t()),
        (0, lambda grad: grad.to_sparse()),
        (0, lambda grad: grad.unsqueeze(0)),
        (0, lambda grad: grad.to("meta")),
        (1, lambda grad: grad.contiguous()),
        (1, lambda grad: grad.to_sparse()),
        (3, lambda grad: torch.view_as_complex(torch.ones(2)).conj().imag),
        (4, lambda grad: grad.to(torch.float16)),
    ],
)
def test_other_gradients_have_no_address(reader_class, params, index, change):
    reader = reader_class(params)
    grads = [torch.zeros_like(param) for param in params]
    changed = [*grads[:index], change(grads[index]), *grads[index + 1 :]]
    assert reader.read_gradients(changed) is None
    assert reader.read_gradients(grads) is not None


def test_a_gradient_with_another_number_of_elements_is_an_error(reader_class, params):
    with pytest.raises(RuntimeError, match="a gradient has 3 elements and its parameter 12"):
        reader_class(params).read_gradients([torch.zeros(3), None, None, None, None])


@pytest.mark.parametrize("offset", [0, 10])
def test_freed_memory_is_an_error(reader_class, params, offset):
    reader = reader_class(params)
    storage = torch.zeros(100)
    grad = storage[offset : offset + 12].view(4, 3)
    storage.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"tensor of shape \(4, 3\) has no memory: its storage was freed"):
        reader.read_gradients([grad, None, None, None, None])


def test_a_parameter_with_gaps_in_memory_has_no_address(reader_class):
    param = torch.zeros(4, 6)[:, ::2].requires_grad_()
    assert reader_class([param]).read([param]) is None
