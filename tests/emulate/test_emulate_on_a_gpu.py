"""Emulated fp16 and bf16 beside real tensor cores, and emulation without a wait for the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradilocks
from tests.emulate.calls import biased_convolutions, calls, exactly, forward_and_backward, places

pytestmark = pytest.mark.gpu
CASTS = sorted(set(calls()) - {"addbmm"})
"""torch adds up the products of `addbmm` in half precision itself."""


@pytest.fixture(autouse=True)
def _sums_in_float32(monkeypatch):
    """By default torch lets a long sum of fp16 be split and its parts be added in fp16."""
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_fp16_reduced_precision_reduction", False)
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operation", CASTS)
def test_an_operation_is_what_the_tensor_core_makes_of_it_within_one_place(operation, dtype):
    call = calls("cuda")[operation]
    with gradilocks.emulate(dtype):
        result, gradients = forward_and_backward(call)
    with torch.autocast("cuda", dtype):
        real, real_gradients = forward_and_backward(call)
    assert real.dtype == dtype
    _, (terms, gradient_terms) = exactly(call, dtype)
    assert places(result, real, dtype, terms) <= 1.0
    for found, theirs, sums in zip(gradients, real_gradients, gradient_terms, strict=True):
        assert places(found, theirs, dtype, sums) <= 1.0


@pytest.mark.parametrize("operation", list(biased_convolutions()))
def test_the_bias_of_a_convolution_is_added_as_cudnn_adds_it(operation):
    function, (inputs, weight, bias) = biased_convolutions("cuda")[operation]
    with gradilocks.emulate("fp16"):
        mine = function(inputs, weight, bias)
        before = function(inputs, weight)
    with torch.autocast("cuda", torch.float16):
        real = function(inputs, weight, bias).float()
    assert (mine != real).float().mean() < 0.01
    channels = bias.view(-1, *[1] * (weight.dim() - 2))
    assert ((mine - real).abs() <= 2**-10 * torch.maximum(before.abs(), channels.abs())).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_large_product_is_bit_for_bit_the_same_but_for_the_order_of_sums(dtype):
    torch.manual_seed(0)
    call = (F.linear, [torch.randn(512, 1024).cuda(), torch.randn(768, 1024).cuda()])
    with gradilocks.emulate(dtype):
        result, gradients = forward_and_backward(call)
    with torch.autocast("cuda", dtype):
        real, real_gradients = forward_and_backward(call)
    _, (terms, gradient_terms) = exactly(call, dtype)
    for found, theirs, sums in zip(
        (result, *gradients), (real, *real_gradients), (terms, *gradient_terms), strict=True
    ):
        assert places(found, theirs, dtype, sums) <= 1.0
        assert (found != theirs.float()).float().mean() < 0.01


def test_tf32_inside_changes_nothing_that_is_stored():
    """Values of fp16 are values of tf32: the product may run on tensor cores."""
    torch.manual_seed(0)
    call = (F.linear, [torch.randn(512, 1024).cuda(), torch.randn(768, 1024).cuda()])
    found = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            with gradilocks.emulate("fp16"):
                found.append(forward_and_backward(call))
        finally:
            torch.set_float32_matmul_precision("highest")
    _, (terms, gradient_terms) = exactly(call, torch.float16)
    (result, gradients), (fast, fast_gradients) = found
    assert places(fast, result, torch.float16, terms) <= 1.0
    for mine, theirs, sums in zip(gradients, fast_gradients, gradient_terms, strict=True):
        assert places(mine, theirs, torch.float16, sums) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_what_a_flash_kernel_makes_of_it(dtype, causal):
    """Within one unit in the last place of the norm: the kernel's blocks add up in their order."""
    source = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(2, 4, 256, 64, device="cuda", generator=source).requires_grad_()
        for _ in range(3)
    ]

    def run():
        result = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        upstream = torch.ones_like(result).cumsum(-1).sin()
        return [result, *torch.autograd.grad(result, leaves, upstream.to(result.dtype))]

    with gradilocks.emulate(dtype):
        mine = run()
    with torch.autocast("cuda", dtype), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        real = run()
    plain = run()
    epsilon = torch.finfo(dtype).eps
    for found, theirs, exact in zip(mine, real, plain, strict=True):
        apart = (found - theirs.float()).norm()
        assert apart <= epsilon * theirs.float().norm()
        assert apart <= 2 * (theirs.float() - exact).norm()


@pytest.mark.parametrize(
    ("kind", "cudnn"), [(nn.LSTM, False), (nn.GRU, False), (nn.GRU, True), (nn.RNN, True)]
)
def test_a_recurrent_layer_is_near_what_the_gpu_makes_of_it(kind, cudnn, monkeypatch):
    """Not cuDNN's LSTM: on an H200 with torch 2.11 its fp16 is off from fp32 by a fifth and more.

    torch's own kernels, its fp32 and this agree with each other.
    """
    monkeypatch.setattr(torch.backends.cudnn, "enabled", cudnn)
    torch.manual_seed(0)
    layer = kind(32, 48, num_layers=2, bidirectional=True).cuda()
    rows = torch.randn(12, 8, 32, device="cuda")

    def run():
        layer.zero_grad()
        output = layer(rows)[0].float()
        output.sin().sum().backward()
        return torch.cat(
            [output.detach().flatten(), *(p.grad.flatten() for p in layer.parameters())]
        )

    with gradilocks.emulate("fp16"):
        mine = run()
    with torch.autocast("cuda", torch.float16):
        real = run()
    assert (mine - real).norm() <= 2**-10 * real.norm()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        rows, length, width = stream.shape
        qkv = self.qkv(self.first(stream)).view(rows, length, 3, self.heads, -1)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return stream + self.down(F.gelu(self.up(self.second(stream))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_transformer_trains_as_under_autocast(dtype):
    """Twenty steps of Adam: nearer to autocast's losses than those are to fp32's, or as near."""
    codes = torch.randint(0, 64, (8, 65), generator=torch.Generator().manual_seed(0)).cuda()

    def train(context):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(64, 128),
            Block(128, 4),
            Block(128, 4),
            nn.LayerNorm(128),
            nn.Linear(128, 64),
        ).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            with context():
                logits = model(codes[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), codes[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return torch.tensor(losses)

    mine = train(lambda: gradilocks.emulate(dtype))
    real = train(lambda: torch.autocast("cuda", dtype))
    assert real[-1] < real[0] - 1.0
    assert ((mine - real).abs() / real).max() < torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_it_never_waits_for_the_device():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 16)).cuda()
    attention = nn.MultiheadAttention(16, 2).cuda()
    rows, images = torch.randn(4, 2, 16).cuda(), torch.randn(2, 3, 8, 8).cuda()
    for name in ("fp16", "bf16", "tf32", "fp8 e4m3", "fp8 e5m2", "fp4"):
        with gradilocks.emulate(name):
            model(images)
            torch.cuda.set_sync_debug_mode("error")
            try:
                loss = model(images).sum() + attention(rows, rows, rows)[0].sum()
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
