"""Each operation rounds what goes in and what comes out, on the way forward and on the way back."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import gradilocks
from gradilocks.errors import GradilocksError
from gradilocks.lab.emulate.rounding import rounding_to
from gradilocks.lab.formats import format_named
from tests.emulate.calls import (
    biased_convolutions,
    calls,
    forward_and_backward,
    gradient_for,
    taken_apart,
)

FORMATS = ["fp16", "bf16", "tf32", "fp8 e5m2", "fp8 e4m3"]


def by_hand(call, forward, backward):
    """The same, with every rounding written out and the arithmetic left to float32."""
    function, tensors = call
    stored = [forward(tensor).requires_grad_() for tensor in tensors]
    result = function(*stored)
    upstream = backward(gradient_for(result))
    gradients = torch.autograd.grad(result, stored, upstream)
    return forward(result.detach()), [backward(gradient) for gradient in gradients]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("operation", list(calls()))
def test_an_operation_equals_its_roundings_written_out(operation, name):
    rounding = rounding_to(format_named(name))
    with gradilocks.emulate(name):
        result, gradients = forward_and_backward(calls()[operation])
    expected, expected_gradients = by_hand(calls()[operation], rounding, rounding)
    assert torch.equal(result, expected)
    for found, meant in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(found, meant)


@pytest.mark.parametrize("operation", list(biased_convolutions()))
def test_the_bias_of_a_convolution_is_added_to_what_is_stored(operation):
    def half(values):
        return values.half().float()

    function, (inputs, weight, bias) = biased_convolutions()[operation]
    with gradilocks.emulate("fp16"):
        result, gradients = forward_and_backward((function, [inputs, weight, bias]))
    stored, (to_inputs, to_weight) = by_hand((function, [inputs, weight]), half, half)
    channels = half(bias).view(-1, *[1] * (weight.dim() - 2))
    assert torch.equal(result, half(stored + channels))
    assert torch.equal(gradients[0], to_inputs)
    assert torch.equal(gradients[1], to_weight)
    upstream = half(gradient_for(result))
    to_bias = upstream.sum([d for d in range(upstream.dim()) if d != 1])
    torch.testing.assert_close(gradients[2], half(to_bias), rtol=2**-10, atol=0)


def test_a_convolution_takes_its_arguments_by_name_and_inputs_without_a_batch():
    layer = torch.nn.Conv1d(4, 6, 3, padding="same")
    inputs = torch.randn(2, 4, 9)
    with gradilocks.emulate("fp16"):
        whole = layer(inputs)
        assert torch.equal(layer(inputs[0]), whole[0])
        named = F.conv1d(input=inputs, weight=layer.weight, bias=layer.bias, padding="same")
    assert torch.equal(named, whole)


@pytest.mark.parametrize("operation", ["linear", "matmul", "conv2d"])
def test_gradients_may_have_a_format_of_their_own(operation):
    e4m3, e5m2 = (rounding_to(format_named(name)) for name in ("e4m3", "e5m2"))
    with gradilocks.emulate(torch.float8_e4m3fn, backward=torch.float8_e5m2):
        result, gradients = forward_and_backward(calls()[operation])
    expected, expected_gradients = by_hand(calls()[operation], e4m3, e5m2)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, gradients, expected_gradients))


@pytest.mark.parametrize("operation", [*calls(), *biased_convolutions()])
def test_without_rounding_nothing_changes(operation):
    with taken_apart():
        result, gradients = forward_and_backward(calls()[operation])
    expected, expected_gradients = forward_and_backward(calls()[operation])
    assert torch.equal(result, expected)
    assert all(map(torch.equal, gradients, expected_gradients))


@pytest.mark.parametrize("name", ["addmm", "addmv", "addbmm", "baddbmm"])
def test_a_method_that_writes_into_its_tensor_writes_what_is_stored(name):
    _, (target, *factors) = calls()[name]
    with gradilocks.emulate("fp16"):
        expected = getattr(torch, name)(target, *factors)
        written = target.clone()
        assert getattr(written, f"{name}_")(*factors) is written
    assert torch.equal(written, expected)


def test_out_is_written():
    _, (left, right) = calls()["mm"]
    out = torch.empty(0)
    with gradilocks.emulate("fp16"):
        assert torch.mm(left, right, out=out) is out
        assert torch.equal(out, torch.mm(left, right))


def test_what_is_too_large_overflows_or_saturates_as_the_format_says():
    large = torch.full((1, 1), 300.0)
    found = {}
    for name in ("fp16", "bf16", "e5m2", "e4m3"):
        with gradilocks.emulate(name):
            found[name] = (large @ large).item()
    assert found == {"fp16": float("inf"), "bf16": 90112.0, "e5m2": float("inf"), "e4m3": 448.0}


def test_more_than_two_factors_are_stored_at_both_ends():
    source = torch.Generator().manual_seed(0)
    factors = [torch.randn(8, 8, generator=source) for _ in range(3)]
    with gradilocks.emulate("fp16"):
        results = [
            torch.linalg.multi_dot(factors),
            torch.einsum("ij,jk,kl->il", *factors),
        ]
    half = [factor.half().float() for factor in factors]
    for result in results:
        assert torch.equal(result, result.half().float())
        torch.testing.assert_close(result, half[0] @ half[1] @ half[2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [torch.float64, torch.complex64, torch.int64])
def test_other_kinds_of_numbers_are_left_alone(kind):
    values = (torch.arange(9).view(3, 3) * 1000 + 1).to(kind)
    with gradilocks.emulate("fp16"):
        assert torch.equal(values @ values, torch.matmul(values, values))
        result = values @ values
    assert torch.equal(result, values @ values)


def test_what_is_no_product_stays_float32():
    values = torch.randn(4, 33)
    with gradilocks.emulate("fp16"):
        assert torch.equal(F.layer_norm(values, (33,)), torch.layer_norm(values, (33,)))
        found = values.softmax(-1), F.gelu(values), values + 1e-5, values.sum()
    expected = values.softmax(-1), F.gelu(values), values + 1e-5, values.sum()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_under_emulation_is_refused_with_the_way_out(kind):
    layer = torch.nn.Linear(4, 4).to(kind)
    with (
        gradilocks.emulate("fp16"),
        pytest.raises(GradilocksError, match=rf"linear got {kind}.*model\.float\(\)"),
    ):
        layer(torch.ones(1, 4, dtype=kind))


@pytest.mark.parametrize("equation", ["ij->ji", "ij->i", "ij,ij->ij", "ij , kl -> ijkl"])
def test_an_einsum_without_a_product_of_matrices_is_left_alone(equation):
    values = torch.randn(4, 4)
    factors = [values] * (1 + equation.count(","))
    with gradilocks.emulate("fp16"):
        found = torch.einsum(equation, *factors)
    assert torch.equal(found, torch.einsum(equation, *factors))


@pytest.mark.parametrize(
    "equation", ["ij,jk->ik", "ij,jk", "bij,bjk->bik", "i,i", "...ij,jk->...ik"]
)
def test_an_einsum_with_one_is_stored(equation):
    shapes = {"ij": (4, 4), "jk": (4, 4), "bij": (2, 4, 4), "bjk": (2, 4, 4), "i": (4,)}
    names = equation.split("->")[0].split(",")
    source = torch.Generator().manual_seed(0)
    factors = [torch.randn(shapes.get(n, (2, 4, 4)), generator=source) for n in names]
    with gradilocks.emulate("fp16"):
        found = torch.einsum(equation, *factors)
    halves = [factor.half().float() for factor in factors]
    assert torch.equal(found, torch.einsum(equation, *halves).half().float())


def others():
    """Operations that are rarely met, as calls and the same by hand."""
    source = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(6, 6, generator=source) for _ in range(3))
    rows, kernel = torch.randn(9, 2, 6, generator=source), torch.randn(3, 6, 4, generator=source)
    convolution = (None, [1], [0], [1], False, [0], 1)
    images, weight = torch.randn(2, 3, 8, generator=source), torch.randn(4, 3, 3, generator=source)
    return {
        "linalg.matmul": (torch.linalg.matmul, [a, b]),
        "rmatmul": (lambda x, y: torch.Tensor.__rmatmul__(y, x), [a, b]),
        "Tensor.bmm": (lambda x, y: x[None].bmm(y[None]), [a, b]),
        "Tensor.mv": (lambda x, y: x.mv(y[0]), [a, b]),
        "Tensor.addmm": (lambda x, y, z: x.addmm(y, z), [a, b, c]),
        "Tensor.baddbmm": (lambda x, y, z: x[None].baddbmm(y[None], z[None]), [a, b, c]),
        "conv_tbc": (lambda x, y: torch.conv_tbc(x, y, torch.zeros(4)), [rows, kernel]),
        "convolution": (lambda x, y: torch.convolution(x, y, *convolution), [images, weight]),
        "by name": (lambda x, y: torch.mm(input=x, mat2=y), [a, b]),
    }


@pytest.mark.parametrize("operation", list(others()))
def test_others_equal_their_roundings_written_out(operation):
    rounding = rounding_to(format_named("e5m2"))
    with gradilocks.emulate("e5m2"):
        result, gradients = forward_and_backward(others()[operation])
    expected, expected_gradients = by_hand(others()[operation], rounding, rounding)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, gradients, expected_gradients))


def test_a_chain_of_two_is_a_product():
    a, b = torch.randn(6, 6), torch.randn(6, 6)
    with gradilocks.emulate("fp16"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.chain_matmul(a, b)
        assert torch.equal(found, a @ b)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it first")
def test_a_loss_with_its_last_layer_inside_is_seen_through():
    rows, weight = torch.randn(6, 8), torch.randn(5, 8)
    targets = torch.arange(6) % 5
    with gradilocks.emulate("fp16"):
        found = F.linear_cross_entropy(rows, weight, targets)
        expected = F.cross_entropy(F.linear(rows, weight), targets)
    assert torch.equal(found, expected)
    assert not torch.equal(found, F.linear_cross_entropy(rows, weight, targets))


def test_out_with_gradients_is_refused_as_torch_refuses_it():
    values = torch.randn(3, 3, requires_grad=True)
    with (
        gradilocks.emulate("fp16"),
        pytest.raises(RuntimeError, match="don't support automatic differentiation"),
    ):
        torch.mm(values, values, out=torch.empty(3, 3))


@pytest.mark.parametrize("name", ["fp16", "tf32", "e4m3", "fp4"])
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_matrix_is_left_in_float32(name, layout):
    sparse = torch.eye(4).mul(1.0001).to_sparse(layout=layout)
    dense = torch.randn(4, 4)
    with gradilocks.emulate(name):
        assert torch.equal(sparse @ dense, dense * torch.tensor(1.0001))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_the_way_out():
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with gradilocks.emulate("fp16"), pytest.raises(GradilocksError, match="to_padded_tensor"):
        F.linear(nested, torch.randn(4, 4))


@pytest.mark.parametrize("name", ["fp16", "fp4"])
def test_the_default_dtype_of_torch_is_no_matter(name):
    values = torch.randn(4, 4)
    with gradilocks.emulate(name):
        expected = values @ values
        torch.set_default_dtype(torch.float64)
        try:
            found = values @ values
        finally:
            torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_an_array_is_told_what_torch_tells_it():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError) as plain:
        numpy.ones((2, 2)) @ torch.ones(2, 2)
    with gradilocks.emulate("fp16"), pytest.raises(TypeError) as caught:
        numpy.ones((2, 2)) @ torch.ones(2, 2)
    assert str(caught.value) == str(plain.value)
