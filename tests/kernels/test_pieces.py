"""pieces.of: every element once, views where there can be views, none larger than asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradilocks.kernels import pieces


@settings(max_examples=150)
@given(data=st.data(), size=st.integers(1, 40))
def test_the_pieces_of_any_view_hold_every_element_once(data, size):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    steps = data.draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    numbered = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    view = numbered[tuple(slice(None, None, step) for step in steps)].permute(order)
    parts = list(pieces.of(view, size))
    assert all(part.dim() == 1 and 1 <= part.numel() <= size for part in parts)
    together = torch.cat(parts).sort().values
    assert torch.equal(together, view.reshape(-1).sort().values)
    if pieces.is_dense(view):
        for part in parts:
            assert part.untyped_storage().data_ptr() == numbered.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(4, 5), True),
        (torch.zeros(4, 5).t(), True),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.zeros(2, 3, 4).permute(1, 2, 0), True),
        (torch.tensor(1.0), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(1, 5, 1)[:, :, :], True),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(4, 6)[:, :5], False),
        (torch.zeros(1).expand(7), False),
        (torch.zeros(4, 1).expand(4, 7), False),
        (torch.zeros(20).unfold(0, 3, 1), False),
        (torch.zeros(20)[::2], False),
        (torch.zeros(4, 5)[1:3], True),
    ],
)
def test_dense_means_one_stretch_of_memory_each_place_once(tensor, dense):
    assert pieces.is_dense(tensor) is dense


def test_an_empty_tensor_has_no_pieces():
    assert list(pieces.of(torch.zeros(3, 0), 8)) == []
    assert list(pieces.of(torch.zeros(6, 4)[::2, :0], 8)) == []


def test_writing_to_the_pieces_of_a_dense_tensor_writes_to_the_tensor():
    tensor = torch.zeros(5, 7).t()
    for part in pieces.of(tensor, 4):
        part += 1
    assert torch.equal(tensor, torch.ones(7, 5))


@pytest.mark.parametrize(
    ("dtype", "summed_in"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.float64),
        (torch.complex128, torch.float64),
    ],
)
def test_pieces_are_summed_in_float32_or_float64(dtype, summed_in):
    assert pieces.in_float(torch.ones(3, dtype=dtype)).dtype is summed_in
