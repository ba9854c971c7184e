"""Where the gradients of a script lie, and whether they are there still: in C++ and in Python."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from gradilocks.kernels import native
from gradilocks.observe.gradient_memory import REPLACED, WRITTEN, memory_of

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


def params_with(*gradients):
    params = []
    for gradient in gradients:
        params.append(nn.Parameter(torch.ones(3)))
        params[-1].grad = gradient
    return params


def own(gradient):
    made = torch.ones(3).as_subclass(Own)
    made.elsewhere = gradient
    return made


def sparse():
    return torch.tensor([1.0, 0.0, 1.0]).to_sparse()


def test_gradients_that_stay_where_they_are_are_known_again(walked_in):
    params = [*params_with(torch.ones(3), None, sparse()), own(torch.ones(3)), own(None)]
    memory = memory_of(params)
    assert memory.holds(params)
    assert memory.holds(tuple(params))
    params[0].grad.mul_(2.0)
    assert memory.holds(params)
    assert not memory.holds(params[:-1])
    assert memory_of([]).holds([])


def test_one_that_was_replaced_cleared_or_added_is_not_known(walked_in):
    for place, gradient in ((0, torch.ones(3)), (0, None), (1, torch.ones(3)), (2, sparse())):
        params = params_with(torch.ones(3), None, sparse())
        memory = memory_of(params)
        params[place].grad = gradient
        assert not memory.holds(params)


def test_views_of_one_storage_are_told_apart_by_where_they_begin(walked_in):
    bucket = torch.ones(6)
    params = params_with(bucket[:3], bucket[3:])
    memory = memory_of(params)
    assert memory.holds(params)
    assert not memory.holds(params[::-1])
    assert memory.rows_of(params[::-1]) == [1, 0]
    params[0].grad = bucket[:3]  # Another tensor in the same place.
    assert memory.holds(params)


def test_rows_are_found_in_any_order_and_among_others(walked_in):
    params = params_with(torch.ones(3), None, torch.ones(3), sparse())
    params.append(own(torch.ones(3)))
    others = params_with(torch.ones(3), None)
    memory = memory_of(params)
    mixed = [params[4], others[0], params[2], params[1], others[1], params[0], params[3]]
    assert memory.rows_of(mixed) == [4, -1, 2, -1, -1, 0, 3]
    assert memory.rows_of([]) == []


def test_what_was_written_to_is_told_from_what_was_replaced(walked_in):
    params = params_with(*(torch.ones(3) for _ in range(4)), None, None)
    with torch.inference_mode():
        params.append(own(torch.ones(3)))
    memory = memory_of(params)
    params[1].grad.add_(1.0)
    params[2].grad = torch.ones(3)
    params[3].grad = None
    params[4].grad = torch.ones(3)
    rows = range(len(params))
    changes = bytes([0, WRITTEN, REPLACED, REPLACED, REPLACED, 0, 0])
    assert memory.changes(params, rows) == changes
    assert memory.changes(params[::-1], list(rows)[::-1]) == changes[::-1]
    assert memory.changes(params[:2], [-1, 99]) == bytes([REPLACED, REPLACED])
    with pytest.raises(ValueError, match=r"expects a row|is shorter"):
        memory.changes(params, [0])


def test_memory_that_the_script_lets_go_is_gone(walked_in):
    params = params_with(torch.ones(3), None, sparse())
    storage = weakref.ref(params[0].grad.untyped_storage())
    memory = memory_of(params)
    assert not memory.is_gone()
    params[0].grad = None
    gc.collect()
    assert storage() is None
    assert not memory.is_gone()
    params[2].grad = None
    assert memory.is_gone()
    # A new gradient may get the address of the old one, and is none of these.
    params[0].grad = torch.ones(3)
    assert memory.rows_of(params) == [-1, -1, -1]


def test_gradients_can_be_swapped_though_their_memory_is_known(walked_in):
    (param,) = params_with(torch.ones(3))
    memory = memory_of([param])
    torch.utils.swap_tensors(param, nn.Parameter(torch.zeros(3)))
    assert not memory.holds([param])


def test_what_is_no_list_of_tensors_is_refused(walked_in):
    for given in (None, [1], 3):
        with pytest.raises((TypeError, AttributeError)):
            memory_of(given)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_gradients_without_a_storage_are_known_by_themselves(walked_in):
    compressed = torch.eye(3).to_sparse_csr()
    params = [own(compressed)]
    memory = memory_of(params)
    assert memory.holds(params)
    params[0].elsewhere = torch.eye(3).to_sparse_csr()
    assert not memory.holds(params)
    del compressed
    gc.collect()
    assert memory.is_gone()
