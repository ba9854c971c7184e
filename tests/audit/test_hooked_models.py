"""Modules that are hard to put hooks on: every gradient is counted, once, and nothing breaks."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradilocks

Pair = namedtuple("Pair", ["left", "right"])


def mean(model, batch):
    return model(batch).square().mean()


def modules(found):
    return {module.name: module for module in found.modules}


def test_parameters_and_outputs_are_counted_module_by_module_in_forward_order():
    torch.manual_seed(0)
    model = nn.ModuleDict({"last": nn.Linear(3, 2), "first": nn.Linear(4, 3)})

    def loss(model, batch):
        return model["last"](model["first"](batch)).square().mean()

    found = gradilocks.audit(model, loss, [torch.randn(5, 4), torch.randn(5, 4)])
    assert list(modules(found)) == ["first", "last"]
    assert modules(found)["first"].parameters.values == 2 * 15
    assert modules(found)["first"].activations.values == 2 * 15
    assert modules(found)["last"].activations.values == 2 * 10
    assert found.steps == 2


def test_what_is_counted_are_the_gradients_themselves():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    batch = torch.randn(7, 6)
    found = modules(gradilocks.audit(model, mean, [batch]))
    outputs = []
    value = batch
    for layer in model:
        value = layer(value)
        value.retain_grad()
        outputs.append(value)
    value.square().mean().backward()
    for name, output in zip("012", outputs, strict=True):
        exponents = torch.frexp(output.grad)[1].flatten() - 1
        seen = found[name].activations
        assert seen.largest == output.grad.abs().max().item()
        assert dict(seen.bins())[int(exponents.min())] == int((exponents == exponents.min()).sum())
        assert sum(seen.counts) == int((output.grad != 0).sum())
    weights = torch.cat([model[0].weight.grad.flatten(), model[0].bias.grad])
    assert found["0"].parameters.largest == weights.abs().max().item()


def test_in_place_modules_keep_working_and_have_gradients_of_their_own():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
    placed = nn.Sequential(plain[0], nn.ReLU(inplace=True), plain[2])
    batch = torch.randn(7, 6)
    expected = gradilocks.audit(plain, mean, [batch])
    assert gradilocks.audit(placed, mean, [batch]).modules == expected.modules


class Nested(nn.Module):
    """Returns what its first argument says."""

    def __init__(self, wrap):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x * self.weight)


@dataclass
class Output:
    value: torch.Tensor
    note: str = "kept"


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (y, None), lambda out: out[0]),
        (lambda y: {"a": [y, 3]}, lambda out: out["a"][0]),
        (lambda y: Pair(y, y.detach()), lambda out: out.left),
        (lambda y: Output(y), lambda out: out.value),
        (lambda y: (y, y), lambda out: out[1]),
    ],
    ids=["tuple", "dict of lists", "named tuple", "dataclass", "one tensor twice"],
)
def test_tensors_are_found_in_whatever_a_module_returns(wrap, unwrap):
    def loss(model, batch):
        return unwrap(model(batch)).square().mean()

    found = gradilocks.audit(Nested(wrap), loss, [torch.ones(2, 3)])
    assert modules(found)[""].activations.values == 6


def test_a_module_that_is_called_several_times_counts_every_call():
    layer = nn.Linear(4, 4)

    def loss(model, batch):
        return model(model(model(batch))).square().mean()

    found = gradilocks.audit(layer, loss, [torch.randn(2, 4)])
    assert modules(found)[""].activations.values == 3 * 8
    assert modules(found)[""].parameters.values == 20


def test_a_parameter_that_two_modules_share_counts_once():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    found = gradilocks.audit(model, mean, [torch.arange(7)])
    assert found.parameters.values + found.parameters.zeros == 28


def test_outputs_without_gradients_are_left_out():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.shapes = nn.Flatten(0)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            self.shapes(x.argmax(-1))
            with torch.no_grad():
                self.head(x)
            return self.head(self.frozen(x))

    found = gradilocks.audit(Partly(), mean, [torch.randn(3, 4)])
    assert list(modules(found)) == ["head"]
    assert modules(found)["head"].activations.values == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_counted_once(reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = torch.randn(3, 4, requires_grad=True)

    def loss(model, batch):
        return checkpoint(model, batch, use_reentrant=reentrant).square().mean()

    assert gradilocks.audit(model, loss, [batch]).modules == (
        gradilocks.audit(model, mean, [batch]).modules
    )


def test_sparse_gradients_count_their_values():
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True), nn.Linear(4, 1))
    found = gradilocks.audit(model, mean, [torch.tensor([3, 3, 5])])
    assert modules(found)["0"].parameters.values == 8


def test_multi_head_attention_computes_with_its_projection_so_it_is_one_module():
    torch.manual_seed(0)

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    found = modules(gradilocks.audit(Attending(), mean, [torch.randn(2, 5, 8)]))
    assert found["attention"].activations.values == 80
    assert found["attention"].parameters.values + found["attention"].parameters.zeros == 288
    assert list(found) == ["attention"]


def test_a_parametrized_module_owns_the_parameters_of_its_parametrization():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(layer, nn.Linear(3, 1))
    found = modules(gradilocks.audit(model, mean, [torch.randn(6, 4)]))
    assert found["0"].parameters.values == 3 + 12 + 3
    assert found["0"].activations.values == 18


def test_an_lstm_and_its_tuple_of_outputs():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 5, batch_first=True)
            self.head = nn.Linear(5, 1)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    found = modules(gradilocks.audit(Reading(), mean, [torch.randn(2, 7, 3)]))
    assert found["lstm"].activations.values == 10
    assert found["lstm"].activations.zeros == 60


def test_the_precision_of_an_autocast_pass_is_told_and_its_zeros_are_explained():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().square().mean() * 1e-6

    found = gradilocks.audit(model, loss, [torch.randn(64, 8)])
    assert found.precision == "float16 autocast"
    assert modules(found)[""].activations.zeros > 0
    assert any("shows only as zeros" in sentence for sentence in found.recommendation.words)


def test_a_bfloat16_model_says_so():
    model = nn.Linear(8, 8).bfloat16()
    found = gradilocks.audit(model, mean, [torch.randn(4, 8).bfloat16()])
    assert found.precision == "bfloat16"
    assert not any("zeros" in sentence for sentence in found.recommendation.words)


def test_a_compiled_model_is_run_eagerly_so_that_its_modules_are_seen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    compiled = torch.compile(model, backend="eager")
    batch = torch.randn(5, 4)
    assert gradilocks.audit(compiled, mean, [batch]).modules == (
        gradilocks.audit(model, mean, [batch]).modules
    )


def test_gradients_that_are_not_finite_are_counted_and_named():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

    def loss(model, batch):
        return (model(batch) * torch.tensor([[1.0], [torch.inf]])).sum()

    found = gradilocks.audit(model, loss, [torch.ones(2, 4)])
    assert found.parameters.nonfinite > 0
    first = found.recommendation.words[0]
    assert "were NaN or Inf, in module 0 and module 1" in first
    assert "The loss itself was NaN or Inf in 1 of 1 backward passes" in first


def test_a_parameter_that_a_module_returns_as_it_is_counts_as_a_parameter_alone():
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self):
            return self.weight

    found = gradilocks.audit(Holding(), lambda m, x: (m() * x).sum(), [torch.ones(4)])
    assert found.modules[0].parameters.values == 4
    assert found.modules[0].activations is None


class Blocked(torch.autograd.Function):
    """A function that hands no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_backward_that_returns_none_is_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4))

    def loss(model, batch):
        return Blocked.apply(model(batch)).mean() + model[0].bias.sum()

    found = modules(gradilocks.audit(model, loss, [torch.ones(2, 4)]))
    assert (found["0"].parameters.values, found["0"].activations) == (4, None)


def test_a_part_that_is_called_module_is_told_from_a_wrapper():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x + self.gain * self.module(x)

    found = modules(gradilocks.audit(nn.Sequential(Residual()), mean, [torch.randn(8, 4)]))
    assert {name: each.parameters.values for name, each in found.items()} == {
        "0.module": 20,
        "0": 4,
    }
    assert all(each.activations.values == 32 for each in found.values())


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, lambda model: torch.compile(model, backend="eager"), torch.jit.script],
    ids=["DataParallel", "compile", "script"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_the_names_of_a_wrapped_model_are_those_that_it_takes_itself(wrap):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    found = gradilocks.audit(model, mean, [torch.randn(8, 4)])
    assert len(found.modules) == 2
    named = dict(model.named_modules())
    for module in found.modules:
        if isinstance(model, torch.jit.ScriptModule):  # It has no get_submodule.
            assert module.name in named
        else:
            assert isinstance(model.get_submodule(module.name), nn.Linear)


def test_a_module_under_vmap_is_counted_and_its_output_is_not_read():
    found = gradilocks.audit(
        nn.Linear(4, 4),
        lambda model, batch: torch.func.vmap(model)(batch).square().mean(),
        [torch.randn(8, 4)],
    )
    assert found.parameters.values == 20
    assert found.modules[0].outputs is None


def test_under_emulation_it_says_what_was_emulated():
    model = torch.nn.Linear(8, 4)

    def loss(model, batch):
        with gradilocks.emulate("fp16"):
            return model(batch).square().mean() * 1e-6

    found = gradilocks.audit(model, loss, [torch.randn(16, 8)])
    assert found.precision == "float16, emulated"
    assert "shows only as zeros" in " ".join(found.recommendation.words)
