"""scaled_dot_product_attention, with all that it takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradilocks
from tests.emulate.calls import taken_apart

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.rand(9, 9, generator=torch.Generator().manual_seed(2)) > 0.4},
    "float mask": {"attn_mask": torch.randn(9, 9, generator=torch.Generator().manual_seed(2))},
    "mask for each row": {"attn_mask": (torch.arange(9) < 5).expand(2, 1, 9, 9)},
    "scale": {"scale": 0.3},
    "blind queries": {"attn_mask": torch.arange(9)[:, None].expand(9, 9) > 4},
}


def three(*, keys: int = 4) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 9, 16), (2, keys, 9, 16), (2, keys, 9, 16)]
    return [torch.randn(shape, generator=source).requires_grad_() for shape in shapes]


def attended(tensors, **options):
    result = F.scaled_dot_product_attention(*tensors, **options)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    return [result.detach(), *torch.autograd.grad(result, tensors, upstream.to(result.dtype))]


@pytest.mark.parametrize("name", list(OPTIONS))
def test_in_fp32_it_is_torchs_own_up_to_the_order_of_sums(name):
    with taken_apart():
        found = attended(three(), **OPTIONS[name])
    for mine, real in zip(found, attended(three(), **OPTIONS[name]), strict=True):
        torch.testing.assert_close(mine, real, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_in_fp16_it_is_as_far_from_fp32_as_autocast_is(name):
    with gradilocks.emulate("fp16"):
        found = attended(three(), **OPTIONS[name])
    with torch.autocast("cpu", torch.float16):
        real = attended(three(), **OPTIONS[name])
    for mine, theirs in zip(found, real, strict=True):
        assert (mine - theirs).norm() <= 2**-10 * theirs.float().norm()
        assert torch.equal(mine, mine.half().float())


def test_heads_of_queries_may_share_keys_and_values():
    with gradilocks.emulate("fp16"):
        shared = attended(three(keys=2), enable_gqa=True)
        query, key, value = three(keys=2)
        apart = F.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        )
    assert torch.equal(shared[0], apart)


def test_dropout_drops_weights_and_scales_the_rest():
    value = torch.ones(1, 1, 512, 1)
    query = torch.zeros(1, 1, 512, 4)
    torch.manual_seed(0)
    with gradilocks.emulate("fp16"):
        result = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    assert result.mean().item() == pytest.approx(1.0, abs=0.02)
    assert result.std().item() == pytest.approx(1 / math.sqrt(512), rel=0.2)


def test_the_gradient_of_the_scores_is_lost_where_fp16_cannot_hold_it():
    """Values that are nearly the same: what the weights are hardly matters, so it is tiny."""
    query, key, value = three()
    value = (1.0 + value.detach() * 2.0**-9).requires_grad_()
    upstream = torch.full((2, 4, 9, 16), 2.0**-20)
    lost = {}
    for name in ("fp32", "fp16"):
        with gradilocks.emulate(name):
            result = F.scaled_dot_product_attention(query, key, value)
        (gradient,) = torch.autograd.grad(result, query, upstream)
        lost[name] = gradient.eq(0).float().mean().item()
    assert lost == {"fp32": 0.0, "fp16": 1.0}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_modules_made_of_it_are_seen_through(kind, weights):
    torch.manual_seed(0)
    rows = torch.randn(5, 3, 16)
    if kind is nn.MultiheadAttention:
        module, args, kwargs = kind(16, 2), (rows, rows, rows), {"need_weights": weights}
    else:
        module, args, kwargs = kind(16, 2, 32, dropout=0.0, norm_first=weights), (rows,), {}

    def run():
        module.zero_grad()
        result = module(*args, **kwargs)
        result = result[0] if isinstance(result, tuple) else result
        result.float().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in module.parameters()])

    with gradilocks.emulate("fp16"):
        mine = run()
    with torch.autocast("cpu", torch.float16):
        real = run()
    plain = run()
    assert (mine - real).norm() <= 2**-9 * real.norm()
    assert (mine - plain).norm() > 2**-14 * plain.norm()


def test_a_transformer_layer_that_only_infers_is_stored_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    rows = torch.randn(3, 5, 16)
    with torch.no_grad():
        with gradilocks.emulate("fp16"):
            mine = layer(rows)
        plain = layer(rows)
    apart = (mine - plain).abs().max()
    assert 0.0 < apart < 0.02
