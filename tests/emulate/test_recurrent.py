"""LSTM, GRU and RNN: layers and cells, padded and packed, as torch has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import gradilocks
from tests.emulate.calls import taken_apart

KINDS = {
    "RNN": (nn.RNN, {}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu"}),
    "GRU": (nn.GRU, {}),
    "LSTM": (nn.LSTM, {}),
    "LSTM, projected": (nn.LSTM, {"proj_size": 3}),
}
SHAPES = {
    "one layer": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
}


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    return [tensor for each in value for tensor in tensors(each)]


def run(module, *args):
    """Outputs, states and gradients of everything."""
    module.zero_grad()
    found = tensors(module(*args))
    sum(each.float().sin().sum() for each in found).backward()
    return [*(each.detach().float() for each in found), *(p.grad for p in module.parameters())]


@pytest.fixture(params=["padded", "packed"])
def rows(request):
    values = torch.randn(7, 4, 6, generator=torch.Generator().manual_seed(0))
    if request.param == "padded":
        return values
    return pack_padded_sequence(values, [7, 3, 5, 1], enforce_sorted=False)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("kind", list(KINDS))
def test_in_fp32_a_layer_is_torchs_own(kind, shape, rows):
    make, options = KINDS[kind]
    torch.manual_seed(0)
    module = make(6, 5, **options, **SHAPES[shape])
    with taken_apart():
        found = run(module, rows)
    for mine, real in zip(found, run(module, rows), strict=True):
        torch.testing.assert_close(mine, real, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["RNN", "RNN, relu", "GRU"])
def test_in_fp16_a_layer_is_near_autocast(kind, rows):
    """An LSTM in fp16 asks for more of a CPU than most have; on a GPU it is tested."""
    make, options = KINDS[kind]
    torch.manual_seed(0)
    module = make(6, 5, **options)
    with gradilocks.emulate("fp16"):
        found = torch.cat([each.flatten() for each in run(module, rows)])
    with torch.autocast("cpu", torch.float16):
        real = torch.cat([each.flatten() for each in run(module, rows)])
    plain = torch.cat([each.flatten() for each in run(module, rows)])
    assert (found - real).norm() <= 2**-10 * real.norm()
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_outputs_and_states_are_values_of_the_format(kind, rows):
    make, options = KINDS[kind]
    module = make(6, 5, **options)
    with gradilocks.emulate("fp16"):
        found = tensors(module(rows))
    for each in found:
        assert torch.equal(each, each.half().float())


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_is_torchs_own_in_fp32_and_stored_in_fp16(kind, bias):
    torch.manual_seed(0)
    cell, inputs = kind(6, 5, bias=bias), torch.randn(4, 6)
    with taken_apart():
        found = run(cell, inputs)
    for mine, real in zip(found, run(cell, inputs), strict=True):
        torch.testing.assert_close(mine, real, rtol=1e-6, atol=1e-7)
    with gradilocks.emulate("fp16"):
        for each in tensors(cell(inputs)):
            assert torch.equal(each, each.half().float())


def test_a_cell_steps_as_its_layer_does():
    torch.manual_seed(0)
    layer, cell = nn.LSTM(6, 5), nn.LSTMCell(6, 5)
    with torch.no_grad():
        for mine, other in zip(cell.parameters(), layer.parameters(), strict=True):
            mine.copy_(other)
    inputs = torch.randn(7, 4, 6)
    with gradilocks.emulate("fp16"):
        outputs, (hidden, state) = layer(inputs)
        step = (torch.zeros(4, 5), torch.zeros(4, 5))
        steps = []
        for row in inputs:
            step = cell(row, step)
            steps.append(step[0])
    assert torch.equal(torch.stack(steps), outputs)
    assert torch.equal(step[0], hidden[0])
    assert torch.equal(step[1], state[0])


def test_dropout_is_between_layers_and_only_in_training():
    torch.manual_seed(0)
    module = nn.GRU(6, 5, num_layers=2, dropout=0.5)
    inputs = torch.randn(7, 4, 6)
    with gradilocks.emulate("fp16"):
        assert not torch.equal(module(inputs)[0], module(inputs)[0])
        module.eval()
        assert torch.equal(module(inputs)[0], module(inputs)[0])
