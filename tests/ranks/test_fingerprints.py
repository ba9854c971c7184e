"""copies: gradients in; numbers out that agree between ranks just if these are copies."""

import math

import pytest
import torch

from gradilocks.ranks.agreement import are_copies, fingerprint


def marks(tensor, shape=None):
    return fingerprint(tensor, tuple(tensor.shape) if shape is None else shape)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_where_there_is_nothing_there_is_nothing_to_compare():
    nothing = [fingerprint(None, (3,)), marks(torch.zeros(3)), marks(torch.zeros(0))]
    assert not any(each.usable for each in nothing)
    assert are_copies(nothing)
    for each in nothing:
        assert not are_copies([each, marks(random(5, 3))])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_nothing(bad):
    assert not marks(torch.tensor([bad, 1.0])).usable


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000])
def test_gradients_of_one_norm_are_told_apart(size):
    """Whatever the direction: of 200 gradients of the same norm no two are taken for copies."""
    rows = []
    for seed in range(200):
        direction = random(seed, size)
        norm = 1.02**seed if size == 1 else 1.0  # One element has two directions only.
        rows.append(marks(norm * direction / direction.norm()))
    taken = [
        (one, other)
        for one in range(200)
        for other in range(one)
        if are_copies([rows[one], rows[other]])
    ]
    if size == 2:  # A circle has room for some hundred that are not within rounding.
        for one, other in taken:
            between = [random(seed, 2) / random(seed, 2).norm() for seed in (one, other)]
            assert (between[0] - between[1]).norm() < 5e-2
    elif size == 3:
        assert len(taken) < 10
    else:
        assert not taken


def test_a_change_anywhere_in_a_large_gradient_is_seen():
    whole = random(0, 600_000)
    for place in (0, 262_143, 262_144, 599_999):
        other = whole.clone()
        other[place] += 0.1 * whole.norm()
        assert not are_copies([marks(whole), marks(other)])


def test_the_layout_in_memory_does_not_matter():
    whole = random(1, 30, 40)
    assert are_copies([marks(whole), marks(whole.t().contiguous().t())])
    assert not are_copies([marks(whole), marks(whole.t().contiguous(), (30, 40))])


@pytest.mark.parametrize("dense_dims", [0, 1, 2])
def test_a_sparse_gradient_is_the_same_as_a_dense_one(dense_dims):
    whole = random(2, 50, 6, 4)
    whole[3:47] = 0.0
    sparse = whole.to_sparse(3 - dense_dims)
    assert are_copies([marks(whole), marks(sparse)])
    doubled = torch.sparse_coo_tensor(
        torch.cat([sparse.indices()] * 2, dim=1),
        torch.cat([0.5 * sparse.values()] * 2),
        whole.shape,
        check_invariants=False,
    )
    assert are_copies([marks(whole), marks(doubled)])
    assert not are_copies([marks(sparse), marks(whole.roll(1, 0).to_sparse(3 - dense_dims))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_size_of_the_numbers_does_not_matter(dtype):
    largest = torch.finfo(dtype).max
    for size in (largest / 1e3, 1.0, torch.finfo(dtype).tiny * 1e3):
        one = random(4, 100).to(dtype) * size
        assert are_copies([marks(one), marks(one * (1.0 + 1e-6))])
        assert not are_copies([marks(one), marks(one * 1.1)])
        assert not are_copies([marks(one), marks(-one)])


def test_a_gradient_that_requires_grad_leaves_no_graph():
    grad = random(6, 3).requires_grad_()
    assert marks(grad) == marks(grad.detach())
    assert grad.grad_fn is None
