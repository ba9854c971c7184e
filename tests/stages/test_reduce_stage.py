"""reduce: every element counts once and all ranks get the same numbers. Ranks are simulated."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.ranks.collective import reduce
from gradilocks.step.measure import measure
from gradilocks.values import RankGroup

CPU = torch.device("cpu")


def reduced(ranks, *, order=2.0, counts=None, dtype=torch.float32):
    """What each rank's `reduce` returns; `ranks` holds each one's list of gradients."""
    gradients = [[torch.tensor(g, dtype=dtype) for g in rank] for rank in ranks]
    measured = [measure(each, home=CPU, order=order) for each in gradients]
    sent = []

    def run(collective):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_world_size", lambda group=None: len(ranks))
            patch.setattr(dist, "all_gather", collective)
            rank_group = RankGroup(tuple(range(len(ranks))), (None,), CPU)
            counting = counts or [None] * len(ranks)
            pairs = zip(measured, counting, strict=True)
            return [reduce(m, rank_group=rank_group, counts=each)[0] for m, each in pairs]

    def receive(outputs, mine, group=None):
        for output, theirs in zip(outputs, sent, strict=True):
            output.copy_(theirs)

    run(lambda outputs, mine, group=None: sent.append(mine.clone()))
    return run(receive)


def test_tensor_parallel_shards_and_a_replicated_tensor():
    ranks = [[[3.0], [12.0]], [[4.0], [12.0]]]
    for found in reduced(ranks, counts=[[True, True], [True, False]]):
        assert found.norm.item() == pytest.approx(13.0, rel=1e-12)


def test_experts_on_their_own_ranks():
    for found in reduced([[[math.sqrt(20.0)]], [[10.0]]]):
        assert found.norm.item() == pytest.approx(10.954451, rel=1e-7)


def test_the_largest_element_counts_however_often_it_is_held():
    ranks = [[[3.0], [12.0]], [[4.0], [12.0]]]
    for found in reduced(ranks, order=math.inf, counts=[[True, True], [True, False]]):
        assert found.norm.item() == 12.0


def test_a_rank_without_gradients_takes_part():
    for found in reduced([[[3.0, 4.0]], []]):
        assert (found.norm.item(), found.nonfinite.item()) == (5.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_without_gradients_rounds_the_norm_as_the_others_do(dtype):
    one, two, three = reduced([[[1.0, 3.0]], [], [[5.0]]], dtype=dtype)
    assert one.norm.item() == two.norm.item() == three.norm.item()
    exact = math.sqrt(35.0)
    assert (one.norm.item() == torch.tensor(exact).item()) == (dtype is torch.float32)
    assert one.norm.item() == pytest.approx(exact, rel=1e-15 if dtype is torch.float64 else 1e-7)


def test_no_rank_has_a_gradient():
    for found in reduced([[], []]):
        assert (found.norm.item(), found.nonfinite.item()) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_rank_flags_every_rank_with_exactly_one(bad):
    for found in reduced([[[1.0]], [[bad]], [[bad]]]):
        assert found.nonfinite.item() == 1.0
        assert found.nonfinite.dtype is torch.float32
        assert not math.isfinite(found.norm.item())


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [2.0**-120, 1.0, 2.0**120])
def test_extreme_ranks_neither_overflow_nor_vanish(order, size):
    ones = torch.ones(3, dtype=torch.float64)
    expected = size * torch.linalg.vector_norm(ones, order).item()
    for found in reduced([[[size, size]], [[0.0]], [[size]]], order=order):
        assert found.norm.item() == pytest.approx(expected, rel=1e-6)


@given(
    ranks=st.lists(
        st.lists(
            st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=3), max_size=3
        ),
        min_size=1,
        max_size=4,
    ),
    order=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
def test_all_ranks_agree_on_the_norm_of_all_elements(ranks, order):
    found = reduced(ranks, order=order)
    norms = {f.norm.item() for f in found}
    assert len(norms) == 1
    whole = torch.tensor([x for rank in ranks for g in rank for x in g], dtype=torch.float64)
    peak = whole.abs().max().item() if whole.numel() else 0.0
    expected = peak * torch.linalg.vector_norm(whole / peak, order).item() if peak else 0.0
    assert norms.pop() == pytest.approx(expected, rel=1e-6, abs=1e-44)


def test_the_numbers_of_each_tensor_stay_this_ranks():
    one, two = reduced([[[3.0]], [[4.0, 0.0]]])
    assert one.tensors.norms.tolist() == [3.0]
    assert two.tensors.norms.tolist() == [4.0]
