"""`audit`: counts against the gradients themselves, shares against real rounding, and what it recommends."""

from __future__ import annotations

import importlib
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradilocks
from gradilocks.audit import Audit, Histogram, ModuleGradients, _add, _examine, _histogram, _new_row
from gradilocks.errors import GradilocksError, NoGradients
from gradilocks.formats import FORMATS
from gradilocks.view.ls import list_runs


def histogram_of(*tensors: Tensor) -> Histogram:
    row = _new_row()
    for tensor in tensors:
        _add(row, tensor)
    return _histogram(row)


def audit_of(*modules: dict, formats=("fp16", "bf16")) -> Audit:
    """An audit of modules with given gradients."""
    found = tuple(
        ModuleGradients(
            f"m{index}",
            "Linear",
            histogram_of(torch.tensor(module.get("parameters", []))),
            histogram_of(torch.tensor(module.get("outputs", []))),
            module.get("largest_output", 1.0),
        )
        for index, module in enumerate(modules)
    )
    return Audit(1, found, tuple(_examine(FORMATS[name], found) for name in formats))


# --- histograms -------------------------------------------------------------------------------------------------------

VALUES = st.lists(st.floats(width=32) | st.integers(-149, 127).map(lambda e: 2.0**e), min_size=1, max_size=30)


@given(values=VALUES)
def test_every_value_is_in_its_bin(values):
    found = histogram_of(torch.tensor(values, dtype=torch.float32))
    finite = [abs(value) for value in values if math.isfinite(value) and value]
    expected: dict[int, int] = {}
    for value in finite:
        mantissa, exponent = math.frexp(value)
        exponent -= mantissa == 0.5  # A power of two is the last value of the bin below.
        expected[exponent] = expected.get(exponent, 0) + 1
    assert found.bins == expected
    assert found.zeros == values.count(0.0)
    assert found.nonfinite == sum(not math.isfinite(value) for value in values)
    assert found.largest == max(finite, default=0.0)


@pytest.mark.parametrize("name", FORMATS)
@given(values=VALUES, exponent=st.integers(-20, 30))
def test_the_share_of_underflow_is_that_of_real_rounding(name, values, exponent):
    tensor = torch.tensor(values, dtype=torch.float32)
    tensor = tensor[tensor.isfinite() & (tensor != 0)]
    scale, format = 2.0**exponent, FORMATS[name]
    rounded = [format.round(value * scale) for value in tensor.tolist()]
    expected = rounded.count(0.0) / len(rounded) if rounded else 0.0
    assert histogram_of(tensor).underflow(format, scale) == pytest.approx(expected)


def test_float64_complex_sparse_bfloat16_and_strided_gradients_are_counted():
    assert histogram_of(torch.tensor([1e-300, 1.0], dtype=torch.float64)).bins == {-996: 1, 0: 1}
    assert histogram_of(torch.tensor([1.0 + 4.0j])).bins == {0: 1, 2: 1}
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor([1.0, 1.0, 8.0]), (5,), check_invariants=True
    )
    assert histogram_of(sparse).bins == {1: 1, 3: 1}
    assert histogram_of(torch.tensor([2.0**-130], dtype=torch.bfloat16)).bins == {-130: 1}
    assert histogram_of(torch.tensor([[1.0, 2.0], [4.0, 8.0]]).T[1]).bins == {1: 1, 3: 1}
    assert histogram_of(torch.empty(0)) == Histogram({}, 0, 0, 0.0)


def test_a_large_tensor_is_counted_in_several_chunks(monkeypatch):
    monkeypatch.setattr(importlib.import_module("gradilocks.audit"), "_CHUNK", 7)
    values = torch.arange(1.0, 101.0)
    assert histogram_of(values).values == 100
    assert histogram_of(values).largest == 100.0


def test_the_lost_sum_weighs_values_by_their_size():
    found = histogram_of(torch.tensor([1.0] + [2.0**-30] * 99))
    assert found.underflow(FORMATS["fp16"], 1.0) == 0.99
    assert found.lost_sum(FORMATS["fp16"], 1.0) < 1e-6
    assert found.lost_sum(FORMATS["fp16"], 2.0**10) == 0.0


# --- models -----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


BATCHES = [torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def test_the_gradients_of_parameters_and_outputs_are_counted_by_module():
    model = mlp()
    result = gradilocks.audit(model, loss_of, BATCHES)
    assert [(module.name, module.kind) for module in result.modules] == [
        ("0", "Linear"),
        ("1", "ReLU"),
        ("2", "Linear"),
    ]
    assert result.batches == 3

    parameters: list[Tensor] = []
    outputs: list[Tensor] = []
    for batch in BATCHES:
        hidden = model[0](batch)
        loss = model[2](F.relu(hidden)).square().mean()
        *of_parameters, of_hidden = torch.autograd.grad(loss, [*model[0].parameters(), hidden])
        parameters += of_parameters
        outputs.append(of_hidden)
    assert result.modules[0].parameters == histogram_of(*parameters)
    assert result.modules[0].outputs == histogram_of(*outputs)
    assert result.modules[0].largest_output == max(model[0](batch).abs().max().item() for batch in BATCHES)


def test_zeros_that_relu_made_are_not_losses():
    result = gradilocks.audit(mlp(), loss_of, BATCHES)
    assert result.modules[0].outputs.zeros > 0
    assert all(found.underflow == 0.0 for found in result.formats[:2])
    assert all(found.holds for found in result.formats[:2])


def test_the_model_and_the_random_numbers_are_unchanged():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    loss_of(model, BATCHES[0]).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [param.grad for param in model.parameters()]
    state = torch.get_rng_state()
    gradilocks.audit(model, loss_of, BATCHES)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(param._backward_hooks for param in model.parameters())


def test_after_an_error_in_the_loss_the_hooks_are_gone_and_gradients_are_back():
    model = mlp()
    loss_of(model, BATCHES[0]).backward()
    grads = [param.grad for param in model.parameters()]

    def broken(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise KeyError("broken")

    with pytest.raises(KeyError):
        gradilocks.audit(model, broken, BATCHES)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))


def test_a_shared_parameter_is_counted_once_and_a_module_called_twice_twice():
    tied = nn.Linear(4, 4, bias=False)
    other = nn.Linear(4, 4, bias=False)
    other.weight = tied.weight
    result = gradilocks.audit(nn.Sequential(tied, other, tied), loss_of, [torch.ones(2, 4)])
    assert [module.name for module in result.modules] == ["0", "1"]
    assert result.modules[0].parameters.values + result.modules[0].parameters.zeros == 16
    assert result.modules[1].parameters.values == 0
    assert result.modules[0].outputs.values == 2 * 8


def test_modules_that_write_in_place_or_return_dicts_work():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            return {"logits": [self.body(x) * self.scale]}

    torch.manual_seed(0)
    result = gradilocks.audit(Net(), lambda model, x: model(x)["logits"][0].square().mean(), BATCHES[:1])
    assert [module.name for module in result.modules] == ["Net", "body.0", "body.1", "body.2"]
    assert result.modules[0].outputs.values == 15
    assert all(module.outputs.values for module in result.modules)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_are_counted_once(reentrant):
    model = mlp()
    x = BATCHES[0].clone().requires_grad_()
    plain = gradilocks.audit(model, loss_of, [x])
    recomputed = gradilocks.audit(
        model, lambda model, x: checkpoint(model, x, use_reentrant=reentrant).square().mean(), [x]
    )
    assert recomputed.modules == plain.modules


def test_a_compiled_model_runs_uncompiled():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    result = gradilocks.audit(model, lambda _, x: loss_of(compiled, x), BATCHES)
    assert result.modules == gradilocks.audit(model, loss_of, BATCHES).modules
    torch.compiler.reset()


def test_at_most_so_many_batches_are_taken():
    assert gradilocks.audit(mlp(), loss_of, iter(BATCHES), steps=2).batches == 2


def test_a_bfloat16_model_can_be_audited_and_float16_gradients_cannot():
    model = mlp().bfloat16()
    assert gradilocks.audit(model, lambda m, x: loss_of(m, x.bfloat16()), BATCHES).modules[0].parameters.values > 0

    def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(x).float().square().mean()

    with pytest.raises(GradilocksError, match=r"gradients are torch\.float16: small values are zero already"):
        gradilocks.audit(mlp(), autocast_loss, BATCHES)


def test_emulated_gradients_are_refused():
    def emulated_loss(model: nn.Module, x: Tensor) -> Tensor:
        with gradilocks.emulate("fp16"):
            return loss_of(model, x)

    with pytest.raises(GradilocksError, match="outside of emulate"):
        gradilocks.audit(mlp(), emulated_loss, BATCHES)


def test_a_loss_function_that_trains_is_an_error():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains(model: nn.Module, x: Tensor) -> Tensor:
        loss_of(model, x).backward()
        optimizer.step()
        return loss_of(model, x)

    with pytest.raises(GradilocksError, match=r"loss_fn changed the parameter 0\.weight"):
        gradilocks.audit(model, trains, BATCHES)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((mlp(), loss_of, []), {}, GradilocksError, "batches is empty"),
        ((mlp(), lambda m, x: 3.0, BATCHES), {}, GradilocksError, "one element, got float"),
        ((mlp(), lambda m, x: torch.ones(2, 3), BATCHES), {}, GradilocksError, r"one element, got shape \(2, 3\)"),
        ((mlp(), lambda m, x: torch.ones(()), BATCHES), {}, NoGradients, "does not depend on parameters"),
        ((mlp(), loss_of, BATCHES[0]), {}, GradilocksError, r"write \[batch\]"),
        ((loss_of, loss_of, BATCHES), {}, GradilocksError, r"model must be a torch\.nn\.Module, got function"),
        ((mlp(), lambda m, x: torch.ones((), requires_grad=True) * 2, BATCHES), {}, NoGradients, "no parameter"),
    ],
)
def test_a_bad_argument_is_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        gradilocks.audit(*arguments, **options)


# --- recommendations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("largest", "scale"), [(1.0, 2048.0), (0.9, 4096.0), (65504.0, 2**-4), (1e-20, 2.0**32)])
def test_the_scale_is_the_largest_power_of_two_that_leaves_four_doublings(largest, scale):
    (fp16, bf16) = audit_of({"parameters": [largest, largest / 2]}).formats
    assert (fp16.scale, bf16.scale) == (scale, 1.0)
    assert scale == 2.0**32 or 65504.0 / 32 < largest * scale <= 65504.0 / 16


def test_fp16_is_recommended_with_its_scale_and_bf16_named_as_simpler():
    result = audit_of({"parameters": [1e-3, 1e-6], "outputs": [1e-4]})
    assert result.recommended.format.name == "fp16"
    assert result.conclusion().startswith(
        "fp16 holds the gradients with a loss scale of 2^21. bf16 needs no loss scale"
    )


def test_bf16_is_recommended_where_the_range_is_too_wide_for_fp16():
    result = audit_of({"parameters": [1e3]}, {"parameters": [1e-9]})
    assert result.recommended.format.name == "bf16"
    assert result.conclusion() == (
        "Train in bf16, without a loss scale. fp16 does not hold m1: 100% of the sum of its parameter gradients "
        "underflows at a scale of 4."
    )


def test_outputs_too_large_for_fp16_rule_it_out_whatever_the_gradients_are():
    result = audit_of({"parameters": [1.0]}, {"parameters": [1.0], "largest_output": 1e5})
    assert result.formats[0].failures == {"m1": "outputs up to 100,000 overflow at 65504"}
    assert result.recommended.format.name == "bf16"


def test_a_loss_of_one_percent_of_the_sum_or_of_five_percent_of_the_parameters_is_the_limit():
    def holds(**gradients: list[float]) -> bool:
        return audit_of({"parameters": [1e3]}, gradients).formats[0].holds

    # At a scale of 4, values up to 2^-27 become zero.
    small, kept = 2.0**-28, 2.0**-26
    assert holds(outputs=[small] + [kept] * 30)
    assert not holds(outputs=[small] * 2 + [kept] * 30)
    assert holds(parameters=[2.0**-40] * 5 + [1.0] * 95)
    assert not holds(parameters=[2.0**-40] * 6 + [1.0] * 94)
    assert holds(outputs=[2.0**-40] * 90 + [1.0] * 10)


def test_gradients_that_overflow_at_the_smallest_scale_are_a_failure():
    result = audit_of({"parameters": [1e15]})
    assert result.formats[0].failures == {"m0": "gradients up to 1e+15 overflow at a scale of 2^-24"}


def test_without_a_format_that_holds_float32_is_what_is_left():
    result = audit_of({"parameters": [1e3]}, {"parameters": [1e-9]}, formats=["fp16"])
    assert result.recommended is None
    assert result.conclusion() == "Train in fp32: the gradients do not fit fp16."


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_zero_gradients_give_no_recommendation(value):
    nonfinite = audit_of({"parameters": [1.0]}, {"parameters": [value, 1.0]})
    assert nonfinite.recommended is None
    assert nonfinite.conclusion() == "No recommendation: gradients contain NaN or Inf in m1. Find the cause first."
    assert not any(result.holds for result in nonfinite.formats)
    zero = audit_of({"parameters": [0.0], "outputs": [0.0]})
    assert zero.recommended is None
    assert zero.conclusion() == "No recommendation: all gradients are zero."


def test_training_in_the_recommended_format_follows_float32():
    """The loss is divided by 2^20, so that fp16 without a scale would lose every gradient."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x[:, :3].sin()) / 2.0**20

    best = gradilocks.audit(mlp(), loss_fn, BATCHES).recommended
    assert best.format.name == "fp16"
    losses = {}
    for name, scale in (("fp32", 1.0), ("fp16", best.scale), ("fp16", 1.0)):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(60):
            optimizer.zero_grad()
            with gradilocks.emulate(name):
                loss = loss_fn(model, BATCHES[step % 3])
            (loss * scale).backward()
            for param in model.parameters():
                param.grad *= 2.0**20 / scale
            optimizer.step()
        losses[name, scale] = sum(loss_fn(model, batch).item() for batch in BATCHES)
    assert losses["fp16", best.scale] == pytest.approx(losses["fp32", 1.0], rel=0.05)
    assert losses["fp16", 1.0] > 1.5 * losses["fp32", 1.0]


# --- output -----------------------------------------------------------------------------------------------------------


def test_the_text_has_a_conclusion_and_two_tables():
    result = gradilocks.audit(mlp(), loss_of, BATCHES)
    title, conclusion, formats, modules = str(result).split("\n\n")
    assert title == "Audit of 3 batches"
    assert conclusion == result.conclusion()
    assert [line.split()[0] for line in formats.splitlines()] == ["format", "fp16", "bf16", "fp8_e5m2", "fp8_e4m3"]
    assert [line.split()[:2] for line in modules.splitlines()[1:]] == [["0", "Linear"], ["1", "ReLU"], ["2", "Linear"]]


def test_a_hostile_module_name_cannot_control_the_terminal():
    model = nn.Sequential()
    model.add_module("a\x1b[31m", nn.Linear(6, 3))
    text = gradilocks.audit(model, loss_of, BATCHES).to_text()
    assert "\x1b" not in text
    assert "a\\x1b[31m" in text


def test_the_json_is_one_line_that_says_what_it_is():
    result = gradilocks.audit(mlp(), loss_of, BATCHES, label="small")
    assert "\n" not in result.to_json()
    content = json.loads(result.to_json())
    assert (content["kind"], content["label"], content["batches"]) == ("audit", "small", 3)
    assert content["recommended"] == "fp16"
    assert [found["format"] for found in content["formats"]] == ["fp16", "bf16", "fp8_e5m2", "fp8_e4m3"]
    bins = content["modules"][0]["parameters"]["bins"]
    assert {int(exponent): amount for exponent, amount in bins.items()} == result.modules[0].parameters.bins


def test_ls_lists_a_written_audit_and_a_file_is_not_overwritten(tmp_path):
    result = gradilocks.audit(mlp(), loss_of, BATCHES, label="small")
    path = tmp_path / "folder" / "audit.jsonl"
    result.write(path)
    (entry,) = list_runs(path.parent)
    assert entry.is_audit
    assert entry.header["label"] == "small"
    content = path.read_bytes()
    with pytest.raises(GradilocksError, match=r"audit\.jsonl cannot be written: File exists"):
        result.write(path)
    assert path.read_bytes() == content
