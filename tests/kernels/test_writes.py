"""`multiply_`, `clamp_` and `unscale_` of every backend: the same bits as one rounding of the exact result."""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks.kernels import reference
from kernels.cases import DTYPES, INF, KINDS, NAN, layouts, product, same_bits, values

# Triton's interpreter computes with NumPy, which warns where arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

FACTORS = [1.0 / 65536, 1.0 / 3, 1.0, 3.7, 2.0**20, 0.0, -1.5, 1e30, INF, NAN]
BOUNDS = [0.0, 0.1, 1 / 3, 1.0, 65_510.0, 1e39, INF]


def tensors_for(backend, dtype):
    """Every kind of value in odd sizes."""
    if backend.name == "Triton" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16 instead of rounding; the gpu tests cover it")
    sizes = [1, 1029] if backend.name == "Triton" else [0, 1, 17, 4097]
    large = [] if backend.name == "Triton" else [values("normal", 70_001, dtype)]
    return [values(kind, size, dtype) for size in sizes for kind in KINDS] + large


def clamped(tensor, bound):
    return tensor.clone() if bound > torch.finfo(tensor.dtype).max else tensor.clamp(-bound, bound)


def check(backend, tensors, expected, change):
    """Applies `change` to copies and compares bits, versions and the memory between elements."""
    copies = backend.copies(tensors)
    versions = [tensor._version for tensor in copies]
    result = change(copies)
    for tensor, before, copy, wanted, version in zip(
        tensors, backend.copies(tensors), copies, expected, versions, strict=True
    ):
        assert same_bits(copy, wanted), (tensor.shape, tensor.stride())
        assert same_bits(copy, tensor) or copy._version > version
        whole_before, whole_after = (_whole(t) for t in (before, copy))
        outside = torch.ones(whole_after.shape, dtype=torch.bool)
        outside.as_strided(copy.shape, copy.stride(), copy.storage_offset()).fill_(False)
        assert same_bits(whole_after.cpu()[outside], whole_before.cpu()[outside])
    return result


def _whole(tensor):
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((room,), (1,), 0)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_product_is_rounded_once(backend, dtype, factor):
    tensors = tensors_for(backend, dtype)
    expected = [product(tensor, factor) for tensor in tensors]
    check(backend, tensors, expected, lambda copies: backend.module.multiply_(copies, backend.number(factor)))


def test_each_tensor_can_have_its_own_factor(backend):
    tensors = [values("all three", 100, dtype) for dtype in (torch.float32, torch.float64) for _ in FACTORS]
    factors = FACTORS * 2
    expected = [product(tensor, factor) for tensor, factor in zip(tensors, factors, strict=True)]
    check(backend, tensors, expected, lambda copies: backend.module.multiply_(copies, backend.number(factors)))


@pytest.mark.parametrize("factor", [1.0 / 65536, 1.0, 3.7, 1e30, INF])
def test_unscaling_multiplies_and_finds_products_that_are_not_finite(backend, dtype, factor):
    for tensor in tensors_for(backend, dtype)[:: 2 if backend.name == "Triton" else 1]:
        expected = product(tensor, factor)
        flag = check(
            backend, [tensor], [expected], lambda copies: backend.module.unscale_(copies, backend.number(factor))
        )
        assert (flag.dtype, flag.shape, flag.device.type) == (torch.float32, (), backend.device)
        assert flag.item() == float(not expected.isfinite().all())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_unscaling_finds_one_bad_element_among_many_tensors(backend, bad):
    size = backend.sizes[-1]
    tensors = [torch.ones(size, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64)]
    number = backend.number(0.5)
    assert backend.module.unscale_(backend.copies(tensors), number).item() == 0.0
    for index in range(3):
        for place in (0, size // 2, size - 1):
            copies = backend.copies(tensors)
            copies[index][place] = bad
            assert backend.module.unscale_(copies, number).item() == 1.0


def test_unscaling_takes_a_float32_number_as_torchs_scaler_gives_it(backend):
    (copy,) = backend.copies([torch.full((5,), 3.0)])
    backend.module.unscale_([copy], torch.tensor(1 / 3, device=backend.device))
    assert copy.tolist() == [torch.tensor(3.0).mul(torch.tensor(1 / 3)).item()] * 5


@pytest.mark.parametrize("bound", BOUNDS)
def test_elements_are_clamped_and_nan_stays(backend, dtype, bound):
    tensors = tensors_for(backend, dtype)
    expected = [clamped(tensor, bound) for tensor in tensors]

    def clamp(copies):
        backend.module.clamp_(copies, backend.number(bound))
        for copy in copies if bound == 0.0 else ():
            copy.abs_()  # max(-0.0, 0.0) is either zero, depending on the version of Triton.

    check(backend, tensors, [tensor.abs() if bound == 0.0 else tensor for tensor in expected], clamp)


@pytest.mark.parametrize("operation", ["multiply_", "unscale_", "clamp_"])
def test_every_layout_is_changed_and_nothing_beside_it(backend, dtype, operation):
    if backend.name == "Triton" and dtype is not torch.float32:
        pytest.skip("layouts do not depend on the dtype; one is enough for the slow interpreter")
    tensors = list(layouts(dtype).values())
    expected = [clamped(t, 0.3) if operation == "clamp_" else product(t, 0.3) for t in tensors]
    check(backend, tensors, expected, lambda copies: getattr(backend.module, operation)(copies, backend.number(0.3)))


def test_a_factor_of_one_and_an_infinite_bound_change_no_bit(backend):
    tensors = [values(kind, 129, torch.float32) for kind in KINDS]
    check(backend, tensors, tensors, lambda copies: backend.module.multiply_(copies, backend.number(1.0)))
    check(backend, tensors, tensors, lambda copies: backend.module.clamp_(copies, backend.number(INF)))


def test_on_a_cpu_a_factor_of_one_and_an_infinite_bound_write_nothing(backend):
    if backend.name not in ("torch", "C"):
        pytest.skip("only on a CPU does the host know the factor")
    tensor = torch.ones(5)
    version = tensor._version
    backend.module.multiply_([tensor], torch.tensor(1.0, dtype=torch.float64))
    backend.module.clamp_([tensor], torch.tensor(INF, dtype=torch.float64))
    backend.module.unscale_([tensor], torch.tensor(1.0, dtype=torch.float64))
    assert tensor._version == version


def test_tensors_of_all_dtypes_and_layouts_go_through_one_call(backend):
    tensors = [values("normal", 9, dtype) for dtype in DTYPES if dtype is not torch.bfloat16]
    tensors += [torch.zeros(0), torch.tensor(2.0), torch.randn(3, 4).t(), torch.randn(4, 6)[:, ::2]]
    expected = [product(tensor, 0.25) for tensor in tensors]
    for operation in ("multiply_", "unscale_"):
        check(
            backend,
            tensors,
            expected,
            lambda copies, name=operation: getattr(backend.module, name)(copies, backend.number(0.25)),
        )


def test_parameters_are_changed_without_being_recorded_by_autograd(backend):
    weight = torch.nn.Parameter(torch.ones(4, device=backend.device))
    backend.module.multiply_([weight], backend.number(2.0))
    backend.module.clamp_([weight], backend.number(1.5))
    assert weight.tolist() == [1.5] * 4
    assert weight.is_leaf


def test_autograd_notices_that_a_saved_tensor_was_multiplied(backend):
    weight = torch.ones(4, device=backend.device, requires_grad=True)
    saved = weight * 1.0
    loss = saved.square().sum()
    backend.module.multiply_([saved.detach()], backend.number(2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_off_the_cpu_float64_is_multiplied_in_float64_and_half_precision_in_float32(monkeypatch):
    """The operations for other devices, run on a CPU."""

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    for dtype, value in ((torch.float64, 1e50), (torch.float16, 3.0), (torch.bfloat16, 3.0), (torch.float32, 3.0)):
        tensor = torch.full((4,), value, dtype=dtype)
        factor = 1e-50 if dtype is torch.float64 else 1 / 3
        expected = product(tensor, factor)
        number = torch.tensor(factor, dtype=torch.float64).as_subclass(Elsewhere)
        reference.multiply_([tensor], number)
        assert same_bits(tensor, expected)
        flag = reference.unscale_([tensor], number)
        assert flag.item() == 0.0
    assert math.isclose(tensor[0].item(), 1 / 3, rel_tol=1e-6)


hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies


@pytest.mark.parametrize("name", ["reference", "cpu"])
@hypothesis.settings(max_examples=80)
@hypothesis.given(
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=40),
    factor=st.floats(2.0**-60, 2.0**20, width=32),
    dtype=st.sampled_from(DTYPES),
)
def test_any_numbers_are_measured_exactly_and_multiplied_with_one_rounding(name, numbers, factor, dtype):
    module = pytest.importorskip(f"gradilocks.kernels.{name}", reason="not compiled", exc_type=ImportError)
    tensor = torch.tensor(numbers).to(dtype)
    expected = product(tensor, factor)
    found = tensor.clone()
    flag = module.unscale_([found], torch.tensor(factor, dtype=torch.float64))
    assert same_bits(found, expected)
    assert flag.item() == float(not expected.isfinite().all())
    statistics = module.measure([tensor])[:, 0].tolist()
    assert statistics[2:] == [(tensor == 0).sum(), tensor.isnan().sum(), tensor.isinf().sum()]
    if tensor.isfinite().all():
        assert statistics[0] == pytest.approx(math.hypot(*tensor.double().tolist()), rel=1e-14, abs=0.0)
