"""measure: gradients in, one Measurement out; the norm over all of them never overflows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.kernels.reference import summarize, total_norm
from gradilocks.step.measure import measure
from gradilocks.values import Statistics

CPU = torch.device("cpu")
ORDERS = [1.0, 2.0, 3.0, math.inf]


@given(
    norms=st.lists(st.floats(0.0, 1e300), max_size=8),
    order=st.sampled_from(ORDERS),
)
def test_the_norm_of_norms_is_the_norm_of_all_elements(norms, order):
    found = total_norm(torch.tensor(norms, dtype=torch.float64), order).item()
    peak = max(norms, default=0.0)
    if peak == 0.0:
        expected = 0.0
    elif order == math.inf:
        expected = peak
    else:
        expected = peak * math.fsum((n / peak) ** order for n in norms) ** (1.0 / order)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_nan_and_inf_pass_into_the_norm_of_norms(order):
    def norm(*norms):
        return total_norm(torch.tensor(norms, dtype=torch.float64), order).item()

    assert norm(1.0, math.inf) == math.inf
    assert math.isnan(norm(1.0, math.nan))
    assert math.isnan(norm(math.inf, math.nan))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("detail", [False, True])
def test_no_gradients_make_a_measurement_of_nothing(order, detail):
    found = measure([], home=CPU, order=order, detail=detail)
    assert (found.norm.item(), found.nonfinite.item()) == (0.0, 0.0)
    assert found.tensors.norms.numel() == found.tensors.nan.numel() == 0
    assert (found.tensors.largest is not None) == detail


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_flag_is_exactly_one_however_many_are_bad(count, bad):
    tensors = [torch.full((3,), bad) for _ in range(count)] + [torch.ones(2)]
    found = measure(tensors, home=CPU)
    assert found.nonfinite.item() == 1.0
    assert found.nonfinite.dtype is torch.float32
    assert (found.tensors.nan + found.tensors.inf).tolist() == [3] * count + [0]


def test_a_nan_in_one_tensor_does_not_spread_to_the_others():
    found = measure([torch.tensor([3.0, 4.0]), torch.tensor([math.nan])], home=CPU)
    assert found.tensors.norms[0].item() == 5.0
    assert math.isnan(found.norm.item())


@given(
    rows=st.lists(
        st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    order=st.sampled_from(ORDERS),
)
def test_many_tensors_are_one_vector(rows, order):
    whole = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    found = measure([torch.tensor(row) for row in rows], home=CPU, order=order)
    peak = whole.abs().max().item() or 1.0
    expected = peak * torch.linalg.vector_norm(whole / peak, order).item()
    assert found.norm.item() == pytest.approx(expected, rel=1e-6, abs=1e-44)
    assert found.nonfinite.item() == 0.0


def test_statistics_known_already_are_summarized_without_reading_the_gradients():
    found = summarize(
        Statistics(
            norms=torch.tensor([3.0, 4.0], dtype=torch.float64),
            nan=torch.tensor([0, 0]),
            inf=torch.tensor([0, 0]),
        ),
        order=2.0,
        double=False,
    )
    assert (found.norm.item(), found.nonfinite.item(), found.order) == (5.0, 0.0, 2.0)
