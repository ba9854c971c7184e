"""CUDA tensors of more than 2^31 elements, and a billion elements against float64."""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks import kernels

pytestmark = pytest.mark.gpu

SIZE = 2**31 + 1000


def number(value):
    return torch.tensor(value, dtype=torch.float64, device="cuda")


@pytest.fixture
def large(request):
    """A tensor of ones of the dtype in the parameter."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    yield torch.ones(SIZE, dtype=request.param, device="cuda")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("large", [torch.bfloat16, torch.float16], indirect=True, ids=str)
def test_more_than_two_to_the_31_elements_are_measured(large):
    large[-1], large[-2] = math.nan, 0.0
    norm, largest, zeros, nan, inf = kernels.measure([large])[:, 0].tolist()
    assert math.isnan(norm)
    assert (largest, zeros, nan, inf) == (1.0, 1.0, 1.0, 0.0)
    large[-1] = 0.0
    assert kernels.measure([large])[0].item() == pytest.approx(math.sqrt(SIZE - 2), rel=1e-12)
    large[2**31 + 5] = math.inf
    assert kernels.measure([large], order=math.inf)[0].item() == math.inf


@pytest.mark.parametrize("large", [torch.float16], indirect=True, ids=str)
def test_more_than_two_to_the_31_elements_are_multiplied_clamped_and_unscaled(large):
    large[-1] = 8.0
    kernels.multiply_([large], number(0.5))
    assert (large[:-1] == 0.5).all()
    assert large[-1].item() == 4.0
    kernels.clamp_([large], number(0.25))
    assert (large == 0.25).all()
    assert kernels.unscale_([large], number(2.0)).item() == 0.0
    assert (large == 0.5).all()
    large[-1] = math.inf
    assert kernels.unscale_([large], number(1.0)).item() == 1.0


def test_the_norm_of_a_billion_float32_elements_is_that_of_float64():
    tensor = torch.randn(1_000_000_000, device="cuda")
    exact = sum(part.double().square().sum() for part in tensor.split(1 << 26)).sqrt()
    assert kernels.measure([tensor])[0].item() == pytest.approx(exact.item(), rel=1e-12)
