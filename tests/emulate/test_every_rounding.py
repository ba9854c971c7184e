"""Attention and recurrent steps with every rounding written out, and no other.

With two mantissa bits for values and three for gradients a rounding too many or too few shows in
most of the numbers, so that nearly all being equal bit for bit leaves no doubt. A few are not:
where the order of float32 sums differs, a number near a midpoint goes to the neighbour.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradilocks
from gradilocks.lab.emulate.rounding import rounding_to
from gradilocks.lab.formats import format_named

FORWARD, BACKWARD = (rounding_to(format_named(name)) for name in ("e5m2", "e4m3"))


class Store(torch.autograd.Function):
    """Rounds forward, backward, or both; apart from what is tested."""

    @staticmethod
    def forward(ctx, values, forward, backward):
        ctx.backward_too = backward
        return FORWARD(values) if forward else values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return BACKWARD(gradient) if ctx.backward_too else gradient, None, None


def store(values):
    return Store.apply(values, True, True)


def numbers(*shape, seed=0, size=1.0):
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=source) * size).requires_grad_()


def emulated():
    return gradilocks.emulate("e5m2", backward="e4m3")


def assert_nearly_all_equal(found, expected):
    for mine, meant in zip(found, expected, strict=True):
        assert mine.shape == meant.shape
        assert (mine != meant).float().mean() <= 0.02


# --- attention -----------------------------------------------------------------------------------


def attended(query, key, value, upstream, added):
    """Forward and backward by their formulas, in float32, with the roundings of a fused kernel."""
    query, key, value, added = (FORWARD(each.detach()) for each in (query, key, value, added))
    scale = 1.0 / math.sqrt(query.shape[-1])
    weights = ((query * scale) @ key.mT + added).softmax(-1)
    stored = FORWARD(weights)
    upstream = BACKWARD(upstream)
    to_weights = upstream @ value.mT
    to_scores = weights * (to_weights - (to_weights * weights).sum(-1, keepdim=True))
    stored_to_scores = BACKWARD(to_scores)
    return [
        FORWARD(stored @ value),
        BACKWARD((stored_to_scores @ key) * scale),
        BACKWARD(stored_to_scores.mT @ (query * scale)),
        BACKWARD(stored.mT @ upstream),
        BACKWARD(to_scores_of_mask(stored_to_scores)),
    ]


def to_scores_of_mask(to_scores):
    """The mask is one for all: its gradient is the sum."""
    return to_scores.sum((0, 1))


def test_attention_has_the_roundings_of_a_fused_kernel_and_no_other():
    query, key, value = (numbers(3, 4, 24, 12, seed=seed, size=4.0) for seed in range(3))
    added = numbers(24, 24, seed=3)
    upstream = numbers(3, 4, 24, 12, seed=4, size=20.0).detach()
    with emulated():
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=added)
    gradients = torch.autograd.grad(result, [query, key, value], upstream)
    expected = attended(query, key, value, upstream, added)
    assert_nearly_all_equal([result, *gradients], expected[:4])


def test_the_gradient_of_a_mask_that_is_learned_is_stored():
    query, key, value = (numbers(1, 1, 24, 12, seed=seed, size=4.0) for seed in range(3))
    added = numbers(24, 24, seed=3)
    upstream = numbers(1, 1, 24, 12, seed=4, size=20.0).detach()
    with emulated():
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=added)
    (gradient,) = torch.autograd.grad(result, [added], upstream)
    expected = attended(query, key, value, upstream, added)[4]
    # Of what is no product float32 is left: the gradient of the scores on its way to the mask.
    apart = (gradient - expected).abs() / expected.abs().clamp(min=2.0**-9)
    assert torch.equal(gradient, BACKWARD(gradient))
    assert apart.median() <= 2.0**-3


def test_a_mask_is_stored_so_that_the_least_float_is_minus_infinity():
    query, key, value = (numbers(1, 1, 4, 8, seed=seed).detach() for seed in range(3))
    mask = torch.zeros(4, 4)
    mask[0] = torch.finfo(torch.float32).min
    with gradilocks.emulate("fp16"):
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert result[0, 0, 0].eq(0).all()
    assert result[0, 0, 1:].ne(0).all()


def test_weights_are_stored_after_dropout():
    """Weights of 1/17, of which 0.4 are dropped: what is stored is 1/17/0.6, rounded once."""
    query, value = torch.zeros(1, 1, 17, 4), torch.eye(17)[None, None]
    torch.manual_seed(0)
    with emulated():
        result = F.scaled_dot_product_attention(query, query, value, dropout_p=0.4)
    weight = torch.tensor(1 / 17)
    assert result[result != 0].unique().tolist() == [FORWARD(weight / 0.6).item()]
    assert FORWARD(FORWARD(weight) / 0.6) != FORWARD(weight / 0.6)


def test_a_causal_mask_begins_at_the_first_key_whatever_the_lengths():
    query, key = numbers(1, 1, 3, 8).detach(), numbers(1, 1, 7, 8, seed=1).detach()
    with gradilocks.emulate("bf16"):
        found = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    real = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    torch.testing.assert_close(found, real, rtol=0.05, atol=0.05)


def test_a_query_that_mask_and_order_leave_nothing_gets_nothing():
    query = numbers(1, 1, 4, 8).detach()
    allowed = (torch.arange(4) > 0).expand(4, 4)
    with gradilocks.emulate("fp16"):
        result = F.scaled_dot_product_attention(
            query, query, query, attn_mask=allowed, is_causal=True
        )
    assert result[0, 0, 0].eq(0).all()
    assert result.isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.ones(4, 4, dtype=torch.int64)}, "bool or floating"),
        ({"dropout_p": -0.5}, "dropout probability"),
        ({"enable_gqa": True}, "must divide"),
    ],
    ids=["mask", "dropout", "heads"],
)
def test_what_torch_refuses_is_refused(options, words):
    heads = 3 if "enable_gqa" in options else 2
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, heads, 4, 8)
    with gradilocks.emulate("fp16"), pytest.raises(RuntimeError, match=words):
        F.scaled_dot_product_attention(query, key, key, **options)


# --- recurrent layers ----------------------------------------------------------------------------


def by_hand(layer, rows, hidden, cell):
    """One layer, step by step, each product and each state stored; weights once."""
    w_ih, w_hh, b_ih, b_hh = (store(getattr(layer, f"{name}_l0")) for name in NAMES)
    entered = store(F.linear(store(rows), w_ih, b_ih))
    hidden, cell = store(hidden), store(cell)
    outputs = []
    for step in entered:
        recurrent = store(F.linear(hidden, w_hh, b_hh))
        if isinstance(layer, nn.LSTM):
            i, f, g, o = (step + recurrent).chunk(4, -1)
            new = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden, cell = store(o.sigmoid() * new.tanh()), store(new)
        elif isinstance(layer, nn.GRU):
            r, z, n = step.chunk(3, -1)
            hr, hz, hn = recurrent.chunk(3, -1)
            kept, made = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
            hidden = store((hidden - made) * kept + made)
        else:
            hidden = store((step + recurrent).tanh())
        outputs.append(hidden)
    return torch.stack(outputs), cell


NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_stores_states_products_weights_and_their_gradients(kind):
    torch.manual_seed(0)
    layer = kind(24, 32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    rows = numbers(6, 16, 24, seed=1)
    hidden, cell = numbers(1, 16, 32, seed=2), numbers(1, 16, 32, seed=3)
    upstream = numbers(6, 16, 32, seed=4, size=8.0).detach()
    leaves = [rows, hidden, *layer.parameters()]
    state = (hidden, cell) if kind is nn.LSTM else hidden
    leaves += [cell] if kind is nn.LSTM else []
    with emulated():
        outputs, last = layer(rows, state)
    found = torch.autograd.grad(outputs, leaves, upstream)
    expected, last_cell = by_hand(layer, rows, hidden[0], cell[0])
    meant = torch.autograd.grad(expected, leaves, upstream)
    assert_nearly_all_equal([outputs, *found], [expected, *meant])
    if kind is nn.LSTM:
        assert_nearly_all_equal([last[1][0]], [last_cell])


def test_packed_rows_are_not_dropped_in_evaluation():
    torch.manual_seed(0)
    layer = nn.GRU(6, 5, num_layers=2, dropout=0.9).eval()
    rows = nn.utils.rnn.pack_padded_sequence(torch.randn(7, 2, 6), [7, 4])
    with gradilocks.emulate("fp16"):
        assert torch.equal(layer(rows)[0].data, layer(rows)[0].data)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_an_empty_batch_and_an_empty_sequence_are_what_they_are_to_torch(kind):
    layer = kind(4, 5)
    with gradilocks.emulate("fp16"):
        assert layer(torch.randn(6, 0, 4))[0].shape == (6, 0, 5)
        with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
            layer(torch.randn(0, 2, 4))


def test_arguments_may_be_given_by_name():
    cell = nn.GRUCell(4, 5)
    rows, state = torch.randn(2, 4), torch.randn(2, 5)
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    layer = nn.GRU(4, 5)
    settings = {
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": True,
        "bidirectional": False,
        "batch_first": False,
    }
    with gradilocks.emulate("fp16"):
        named = dict(zip(("w_ih", "w_hh", "b_ih", "b_hh"), weights, strict=True))
        assert torch.equal(torch.gru_cell(input=rows, hx=state, **named), cell(rows, state))
        found = torch.gru(rows[None], state[None], params=list(layer.parameters()), **settings)
        assert torch.equal(found[0], layer(rows[None], state[None])[0])
