"""`emulate`: which values are rounded, forward and backward, and what is refused."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradilocks
from gradilocks.errors import GradilocksError
from gradilocks.formats import FORMATS

HALF_FORMATS = ["fp16", "bf16", "fp8_e5m2", "fp8_e4m3"]

PRODUCTS = {
    "linear": (F.linear, (4, 6), (3, 6), (3,)),
    "matmul": (torch.matmul, (2, 4, 6), (6, 3)),
    "operator": (lambda a, b: a @ b, (4, 6), (6, 3)),
    "method": (lambda a, b: a.mm(b), (4, 6), (6, 3)),
    "bmm": (torch.bmm, (2, 4, 6), (2, 6, 3)),
    "mv": (torch.mv, (4, 6), (6,)),
    "addmm": (torch.addmm, (3,), (4, 6), (6, 3)),
    "baddbmm": (torch.baddbmm, (2, 4, 3), (2, 4, 6), (2, 6, 3)),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), (2, 4, 6), (6, 3)),
    "inner": (torch.inner, (4, 6), (3, 6)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1], [0])), (4, 6), (6, 3)),
    "linalg.matmul": (torch.linalg.matmul, (4, 6), (6, 3)),
    "conv1d": (F.conv1d, (2, 3, 9), (4, 3, 3), (4,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), (2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 3, 4, 4), (3, 4, 3, 3), (4,)),
}


def operands(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in PRODUCTS[name][1:]]


def is_rounded(values: Tensor, name: str) -> bool:
    return torch.equal(FORMATS[name].round_tensor(values), values)


@pytest.mark.parametrize("name", HALF_FORMATS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_has_rounded_inputs_outputs_and_gradients(product, name):
    function, format = PRODUCTS[product][0], FORMATS[name]
    given = operands(product)
    with gradilocks.emulate(name):
        output = function(*given)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(gradient)

    rounded = [format.round_tensor(tensor.detach()).requires_grad_() for tensor in given]
    expected = function(*rounded)
    assert torch.equal(output, format.round_tensor(expected.detach()))
    expected.backward(format.round_tensor(gradient))
    for tensor, reference in zip(given, rounded, strict=True):
        assert torch.equal(tensor.grad, format.round_tensor(reference.grad))


@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_can_have_another_format(product):
    function = PRODUCTS[product][0]
    given = operands(product)
    with gradilocks.emulate("bf16", backward="fp8_e5m2"):
        output = function(*given)
    output.sum().backward()
    assert is_rounded(output, "bf16")
    assert not is_rounded(output, "fp8_e5m2")
    for tensor in given:
        assert is_rounded(tensor.grad, "fp8_e5m2")


@pytest.mark.parametrize("product", PRODUCTS)
def test_float32_changes_no_bit(product):
    function = PRODUCTS[product][0]
    given, reference = operands(product), operands(product)
    with gradilocks.emulate("fp32"):
        output = function(*given)
    expected = function(*reference)
    output.sum().backward()
    expected.sum().backward()
    assert torch.equal(output, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(given, reference, strict=True))


def test_other_operations_and_everything_outside_stay_float32():
    x, y = operands("matmul")
    with gradilocks.emulate("fp8_e4m3"):
        assert torch.equal(x * 1.1, x.detach() * 1.1)
        assert torch.equal(F.layer_norm(x, (6,)), F.layer_norm(x.detach(), (6,)))
    assert torch.equal(x @ y, torch.matmul(x.detach(), y.detach()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_other_dtypes_are_left_alone(dtype):
    a = (torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    with gradilocks.emulate("fp16"):
        product = a @ a
    assert product.dtype == dtype
    assert torch.equal(product, a @ a)


def test_overflow_becomes_inf_or_the_largest_number():
    a, b = torch.full((1, 2), 300.0), torch.full((2, 1), 300.0)
    with gradilocks.emulate("fp16"):
        assert (a @ b).item() == torch.inf
    with gradilocks.emulate("fp8_e4m3"):
        assert (a @ b).item() == 448.0


def test_a_small_gradient_underflows_without_a_loss_scale_and_survives_with_one():
    model = nn.Linear(4, 1)
    x = torch.full((2, 4), 1.0)
    with gradilocks.emulate("fp16"):
        loss = (model(x) * 1e-9).sum()
        scaled = (model(x) * 1e-9).sum() * 2.0**16
    assert torch.autograd.grad(loss, model.weight)[0].count_nonzero() == 0
    (gradient,) = torch.autograd.grad(scaled, model.weight)
    torch.testing.assert_close(gradient / 2**16, torch.full((1, 4), 2e-9), rtol=2**-9, atol=0.0)


# --- attention --------------------------------------------------------------------------------------------------------


def attention_inputs(heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, 5, 4, generator=generator).requires_grad_() for count in (2, heads, heads)]


MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]]).bool()
ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": MASK},
    "added mask": {"attn_mask": torch.linspace(-2, 2, 25).view(5, 5)},
    "shared heads": {"enable_gqa": True},
}


@pytest.mark.parametrize("options", ATTENTION)
def test_attention_in_float32_is_torchs(options):
    heads = 1 if options == "shared heads" else 2
    given, reference = attention_inputs(heads), attention_inputs(heads)
    with gradilocks.emulate("fp32"):
        output = F.scaled_dot_product_attention(*given, **ATTENTION[options])
    expected = F.scaled_dot_product_attention(*reference, **ATTENTION[options])
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    output.sum().backward()
    expected.sum().backward()
    for a, b in zip(given, reference, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_attention_rounds_its_weights_and_the_gradient_of_its_scores():
    fp16 = FORMATS["fp16"].round_tensor
    given = attention_inputs()
    with gradilocks.emulate("fp16"):
        output = F.scaled_dot_product_attention(*given)
    query, key, value = (fp16(tensor.detach()) for tensor in given)
    weights = (query * 0.5 @ key.mT).softmax(-1)
    assert torch.equal(output, fp16(fp16(weights) @ value))

    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(gradient)
    of_weights = fp16(gradient) @ value.mT
    of_scores = fp16(weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)))
    torch.testing.assert_close(given[1].grad, fp16(of_scores.mT @ (query * 0.5)), rtol=2**-9, atol=2**-20)


def test_a_gradient_of_scores_that_is_too_small_for_fp16_is_lost():
    given = attention_inputs()
    with gradilocks.emulate("fp16"):
        output = F.scaled_dot_product_attention(*given)
    output.backward(torch.full_like(output, 2.0**-24))
    assert given[2].grad.count_nonzero() > 0
    assert given[0].grad.abs().max() < 2.0**-20
    assert is_rounded(given[0].grad, "fp16")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_modules_with_attention_inside_are_rounded_in_training_and_inference(kind, train):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = attention if kind == "attention" else nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)

    def run() -> Tensor:
        return model(x, x, x, need_weights=False)[0] if kind == "attention" else model(x)

    model.train(train)
    with torch.set_grad_enabled(train):
        expected = run()
        with gradilocks.emulate("bf16"):
            output = run()
    difference = (output - expected).abs().max()
    assert 2**-14 < difference < 2**-5
    if kind == "attention":
        assert is_rounded(output, "bf16")


def test_dropout_in_attention_drops_weights():
    ones = torch.ones(1, 1, 4, 4)
    torch.manual_seed(0)
    with gradilocks.emulate("fp16"):
        output = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
    assert set(output.flatten().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0}
    assert output.unique().numel() > 1


# --- the context ------------------------------------------------------------------------------------------------------


def test_kept_modules_stay_float32_and_the_rest_does_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 6))
    outputs: list[Tensor] = []
    for part in (model[0], model[1][0], model[2]):
        part.register_forward_hook(lambda module, args, output: outputs.append(output))
    with gradilocks.emulate("fp16", keep=[model[1]]):
        model(torch.randn(3, 6))
    assert [is_rounded(output, "fp16") for output in outputs] == [True, False, True]
    assert torch.equal(outputs[1], F.linear(outputs[0], model[1][0].weight, model[1][0].bias))
    assert not model[1]._forward_pre_hooks
    assert not model[1]._forward_hooks


def test_a_kept_module_that_raises_does_not_switch_the_emulation_off():
    kept, x = nn.Linear(3, 3), torch.randn(2, 6)
    with gradilocks.emulate("fp16", keep=kept):
        with pytest.raises(RuntimeError):
            kept(x)
        assert is_rounded(x @ x.T, "fp16")


def test_a_recurrent_layer_runs_in_float32_where_it_is_kept():
    torch.manual_seed(0)
    layer, x = nn.LSTM(3, 3), torch.randn(4, 2, 3)
    with gradilocks.emulate("fp16", keep=[layer]):
        output, _ = layer(x)
    assert torch.equal(output, layer(x)[0])


def test_it_is_a_decorator():
    @gradilocks.emulate("fp16")
    def product(a: Tensor) -> Tensor:
        return a @ a

    a = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    assert is_rounded(product(a), "fp16")
    assert is_rounded(product(a), "fp16")
    assert not is_rounded(a @ a, "fp16")


def test_an_exception_ends_it():
    a = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(KeyError), gradilocks.emulate("fp16"):
        raise KeyError
    assert not is_rounded(a @ a, "fp16")
    with gradilocks.emulate("fp16"):
        assert is_rounded(a @ a, "fp16")


def test_other_threads_are_not_affected():
    a = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    found: list[bool] = []
    with gradilocks.emulate("fp16"):
        thread = threading.Thread(target=lambda: found.append(is_rounded(a @ a, "fp16")))
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_are_recomputed_with_the_same_rounding_inside_the_context(reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        with gradilocks.emulate("fp8_e5m2"):
            output = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            output.square().sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_second_derivatives_are_rounded():
    x, y = (tensor[:, :4].detach().requires_grad_() for tensor in operands("operator"))
    with gradilocks.emulate("fp16"):
        (first,) = torch.autograd.grad((x @ y[:4]).square().sum(), x, create_graph=True)
    assert is_rounded(first, "fp16")
    (second,) = torch.autograd.grad(first.sum(), x)
    assert is_rounded(second, "fp16")
    assert second.count_nonzero() > 0


def test_a_compiled_model_runs_uncompiled():
    calls: list[object] = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = torch.compile(model, backend=backend)
    with gradilocks.emulate("fp16"):
        output = compiled(x)
        expected = model(x)
    assert not calls
    assert torch.equal(output, expected)
    assert is_rounded(output, "fp16")
    torch.compiler.reset()


def test_training_in_fp16_follows_float32_only_with_a_loss_scale():
    """The loss is divided by a number of micro-batches, as in a large global batch, which makes gradients small."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x, divisor = torch.randn(64, 8), 2.0**20
    y = x[:, :1] * x[:, 1:2]
    final = {}
    for name, scale in (("fp32", 1.0), ("fp16", 1.0), ("fp16", 2.0**16)):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(60):
            optimizer.zero_grad()
            with gradilocks.emulate(name):
                loss = F.mse_loss(model(x), y)
            (loss / divisor * scale).backward()
            for param in model.parameters():
                param.grad *= divisor / scale
            optimizer.step()
        final[name, scale] = loss.item()
    assert final["fp16", 2.0**16] == pytest.approx(final["fp32", 1.0], rel=0.02)
    assert final["fp16", 1.0] > 1.2 * final["fp32", 1.0]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: nn.LSTM(3, 3)(a), r"lstm cannot be emulated.*keep="),
        (lambda a: nn.GRUCell(3, 3)(a), r"gru_cell cannot be emulated.*keep="),
        (lambda a: a.clone().addmm_(a, a), r"addmm_ cannot be emulated"),
        (lambda a: torch.mm(a, a, out=torch.empty(3, 3)), r"mm\(out=\) is not supported"),
        (lambda a: a.half() @ a.half(), r"matmul got a torch\.float16 tensor.*model\.float\(\)"),
        (lambda a: torch.sparse.mm(a.to_sparse(), a) @ a.to_sparse(), r"sparse"),
    ],
)
def test_an_operation_that_cannot_be_emulated_is_an_error(call, message):
    with pytest.raises(GradilocksError, match=message), gradilocks.emulate("fp16"):
        call(torch.eye(3))


def test_autocast_is_refused():
    a, refused = torch.eye(3), pytest.raises(GradilocksError, match="Remove autocast")
    with refused, torch.autocast("cpu", torch.bfloat16), gradilocks.emulate("fp16"):
        a @ a


def test_one_emulation_inside_another_is_refused_and_the_outer_one_goes_on():
    a = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    with gradilocks.emulate("fp16"):
        with pytest.raises(GradilocksError, match="already active"), gradilocks.emulate("bf16"):
            pass
        assert is_rounded(a @ a, "fp16")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": "fp4"}, ValueError, "unknown format 'fp4'"),
        ({"format": "fp16", "backward": torch.int8}, ValueError, "unknown format 'int8'"),
        ({"format": "fp16", "keep": "head"}, TypeError, r"keep= takes modules, got 'head'.*get_submodule"),
        ({"format": "fp16", "keep": [nn.MultiheadAttention(4, 1).out_proj]}, ValueError, "Keep the whole attention"),
    ],
)
def test_a_bad_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message), gradilocks.emulate(**arguments):
        pass
