"""copies: gradients in; numbers out that agree between ranks just if all of them are copies."""

import math

import pytest
import torch

from gradilocks.ranks.agreement import FINGERPRINT, are_copies, fingerprint
from gradilocks.step.measure import measure


def norms_of(tensors):
    return measure(tensors, home=torch.device("cpu")).tensors.norms


def marks(*tensors, shapes=None, places=None):
    found = fingerprint(
        tensors,
        places=range(len(tensors)) if places is None else places,
        shapes=[tuple(t.shape) for t in tensors] if shapes is None else shapes,
        norms=norms_of(tensors),
    )
    return found.numbers.tolist()


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_there_are_as_many_marks_without_any_gradient():
    assert marks() == [0.0] * len(FINGERPRINT)
    assert are_copies([marks(), marks()])


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000])
def test_gradients_of_one_norm_are_told_apart(size):
    """Whatever the direction: of 200 gradients of the same norm no two are taken for copies."""
    rows = []
    for seed in range(200):
        direction = random(seed, size)
        norm = 1.0 + seed if size == 1 else 1.0  # One element has two directions only.
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
            assert (between[0] - between[1]).norm() < 5e-3
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
    assert not are_copies([marks(whole), marks(whole.t().contiguous(), shapes=[(30, 40)])])


def test_where_a_gradient_belongs_matters():
    one, other = random(2, 8), random(3, 8)
    assert not are_copies([marks(one, other), marks(other, one)])
    assert not are_copies([marks(one, places=[0]), marks(one, places=[1])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_size_of_the_numbers_does_not_matter(dtype):
    largest = torch.finfo(dtype).max
    for size in (largest / 1e3, 1.0, torch.finfo(dtype).tiny * 1e3):
        one = random(4, 100).to(dtype) * size
        assert are_copies([marks(one), marks(one * (1.0 + 1e-6))])
        assert not are_copies([marks(one), marks(one * 1.1)])
        assert not are_copies([marks(one), marks(-one)])


def test_what_is_not_finite_or_zero_is_not_compared():
    tensors = [torch.zeros(3), torch.tensor([math.nan]), torch.tensor([math.inf]), random(5, 3)]
    found = fingerprint(
        tensors, places=range(4), shapes=[(3,), (1,), (1,), (3,)], norms=norms_of(tensors)
    )
    assert found.compared.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert found.numbers.tolist() == marks(tensors[3], places=[3])


def test_gradients_that_require_grad_leave_no_graph():
    tensors = [random(6, 3).requires_grad_()]
    found = fingerprint(tensors, places=[0], shapes=[(3,)], norms=norms_of(tensors))
    assert not found.numbers.requires_grad
