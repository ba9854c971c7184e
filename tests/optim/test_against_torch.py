"""Results of the optimizers beside torch's."""

from __future__ import annotations

import copy

import pytest
import torch

from gradilocks import kernels, optim
from optim import twins

each_kernel_case = pytest.mark.parametrize(("name", "options"), twins.KERNEL_CASES, ids=twins.ids(twins.KERNEL_CASES))
HALF = [torch.float16, torch.bfloat16]


@each_kernel_case
def test_float32_trajectories_are_torchs(name, options, device):
    own, other = twins.pair(name, options, device, foreach=False)
    for optimizer in (own, other):
        twins.run(optimizer, 4)
    assert twins.uses_kernels(own)
    twins.assert_close(own, other, rtol=2e-6, atol=2e-7)
    for state, expected in zip(twins.state_of(own), twins.state_of(other), strict=True):
        assert state.keys() == {key for key, value in expected.items() if value is not None}
        expected = {key: expected[key] for key in state}
        # Rounding of sums of gradients of size 4.
        torch.testing.assert_close(state, expected, rtol=2e-6, atol=1e-6, check_device=False)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@each_kernel_case
def test_half_precision_is_rounded_once_per_step(name, options, dtype, device):
    """One step from the same state in float64, rounded to the storage format, is at most one unit away."""
    if dtype is torch.bfloat16 and kernels.has_recorded_step(device) and device == "cpu":
        pytest.skip("Triton's interpreter truncates bfloat16 instead of rounding; `-m gpu` tests it")
    if name == "SGD" and dtype not in kernels.backend_for(device).TYPES:
        pytest.skip("no kernel for this dtype: torch's unfused SGD rounds several times")
    own = getattr(optim, name)(twins.parameters(dtype=dtype, device=device), **options)
    twins.run(own, 2)
    exact_params = [torch.nn.Parameter(param.detach().double()) for param in twins.params_of(own)]
    exact = getattr(torch.optim, name)(exact_params, **options, foreach=False)
    exact.load_state_dict(copy.deepcopy(own.state_dict()))
    for group in exact.param_groups:
        group["fused"] = False
    twins.fill_gradients(twins.params_of(own), 2)
    for param, half in zip(exact_params, twins.params_of(own), strict=True):
        param.grad = half.grad.double()
    own.step()
    exact.step()
    expected = [param.detach().to(dtype) for param in exact_params]
    torch.testing.assert_close(
        [param.detach() for param in twins.params_of(own)], expected, rtol=torch.finfo(dtype).eps, atol=1e-7
    )


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [*((*case, torch.float64) for case in twins.KERNEL_CASES), *((*case, torch.float32) for case in twins.TORCH_CASES)],
    ids=str,
)
def test_torchs_own_step_serves_float64_and_other_options(name, options, dtype, device):
    own, other = twins.pair(name, options, device, dtype, fused=True)
    for optimizer in (own, other):
        twins.run(optimizer, 3)
    assert not twins.uses_kernels(own)
    assert twins.have_same_bits(twins.snapshot(own), twins.snapshot(other))


def test_without_kernels_torchs_own_step_runs(monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, "cpu", None)
    own, other = twins.pair("AdamW", {}, "cpu", fused=True)
    for optimizer in (own, other):
        twins.run(optimizer, 3)
    assert twins.have_same_bits(twins.snapshot(own), twins.snapshot(other))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_complex_parameters_take_torchs_step(name, extension):
    own, other = ([torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))] for _ in range(2))
    optimizers = getattr(optim, name)(own, lr=0.1), getattr(torch.optim, name)(other, lr=0.1)
    for optimizer, params in zip(optimizers, (own, other), strict=True):
        params[0].grad = torch.tensor([0.5 - 1j, 2j])
        optimizer.step()
    assert torch.equal(own[0], other[0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_take_torchs_step(momentum, device):
    results = []
    for namespace in (optim, torch.optim):
        embedding = torch.nn.Embedding(10, 3, sparse=True, device=device, _weight=torch.ones(10, 3, device=device))
        linear = torch.nn.Linear(3, 1, bias=False, device=device)
        torch.nn.init.ones_(linear.weight)
        params = [*embedding.parameters(), *linear.parameters()]
        optimizer = namespace.SGD(params, lr=0.1, momentum=momentum)
        for _ in range(2):
            optimizer.zero_grad()
            linear(embedding(torch.tensor([1, 3, 3], device=device))).sum().backward()
            optimizer.step()
        results.append([param.detach() for param in params])
        assert optimizer.param_groups[0]["fused"] is (True if namespace is optim else None)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_sparse_gradients_are_unscaled_and_skipped(found_inf, extension):
    embedding = torch.nn.Embedding(10, 3, sparse=True, _weight=torch.ones(10, 3))
    optimizer = optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().mul(8.0).backward()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
    optimizer.step()
    expected = torch.ones(10, 3)
    if not found_inf:
        expected[1] -= 0.1
    torch.testing.assert_close(embedding.weight.detach(), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_the_argument_fused_is_torchs(fused, extension):
    own, other = twins.pair("AdamW", {"fused": fused}, extension)
    for optimizer in (own, other):
        twins.run(optimizer, 2)
    assert twins.uses_kernels(own) is fused
    twins.assert_close(own, other, rtol=2e-6, atol=2e-7)


def test_parameters_with_other_strides_are_updated_in_place(device):
    """channels_last and transposed parameters; state that was saved in another layout is copied."""
    base = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    layouts = [base.contiguous(memory_format=torch.channels_last), base.permute(3, 2, 0, 1), base[:, :2]]
    own, other = ([torch.nn.Parameter(layout.to(device, copy=True)) for layout in layouts] for _ in "ab")
    optimizers = optim.AdamW(own, lr=0.01), torch.optim.AdamW(other, lr=0.01, foreach=False)
    for optimizer in optimizers:
        twins.run(optimizer, 2)
        # Contiguous state, as a checkpoint of a contiguous model contains.
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].contiguous()
        twins.run(optimizer, 2, first=2)
    twins.assert_close(*optimizers, rtol=2e-6, atol=2e-7)


def test_gradients_with_other_strides_take_torchs_step(device):
    own, other = ([torch.nn.Parameter(torch.ones(4, 6, device=device))] for _ in "ab")
    optimizers = optim.AdamW(own, lr=0.01), torch.optim.AdamW(other, lr=0.01)
    for params, optimizer in zip((own, other), optimizers, strict=True):
        for step in range(2):
            grad = torch.arange(24.0, device=device).view(6, 4).t() + step
            params[0].grad = grad if step else grad.contiguous()
            optimizer.step()
    twins.assert_close(*optimizers, rtol=2e-6, atol=2e-7)


def test_momentum_that_has_the_strides_of_an_earlier_gradient_is_read_in_order(device):
    """torch's unfused SGD copies the strides of the first gradient; its fused one ignores them."""
    own, other = (torch.nn.Parameter(torch.ones(4, 6, device=device)) for _ in "ab")
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}
    optimizers = optim.SGD([own], **settings), torch.optim.SGD([other], **settings, foreach=False)
    for param, optimizer in zip((own, other), optimizers, strict=True):
        for step in range(3):
            grad = torch.arange(24.0, device=device).view(6, 4).t() + step
            param.grad = grad.contiguous() if step else grad
            optimizer.step()
    torch.testing.assert_close(own, other)


def test_parameters_that_are_not_dense_take_torchs_step(extension):
    base = torch.ones(6, 6)
    params = [torch.nn.Parameter(base[:, ::2])]
    optimizer = optim.SGD(params, lr=0.1)
    params[0].grad = torch.ones(6, 3)
    optimizer.step()
    assert not twins.uses_kernels(optimizer)
    assert base[:, ::2].eq(torch.tensor(1.0) - 0.1).all()
    assert base[:, 1::2].eq(1).all()


def test_two_optimizers_of_one_kind_and_groups_keep_their_settings(device):
    """Groups with their own learning rate, weight decay and betas, one of them frozen for a while."""
    own, other = (twins.parameters([(3,)] * 3, device=device) for _ in "ab")
    optimizers = []
    for namespace, params in ((optim, own), (torch.optim, other)):
        groups = [
            {"params": params[:1], "lr": 0.1, "weight_decay": 0.5},
            {"params": params[1:2], "betas": (0.5, 0.5)},
            {"params": params[2:], "eps": 1.0},
        ]
        optimizers.append(namespace.AdamW(groups, lr=0.01))
    for step in range(3):
        for optimizer in optimizers:
            params = twins.params_of(optimizer)
            twins.fill_gradients(params, step)
            if step == 1:
                params[1].grad = None
            optimizer.step()
    twins.assert_close(*optimizers, rtol=2e-6, atol=2e-7)
    assert [state["step"].item() for state in twins.state_of(optimizers[0])] == [3, 2, 3]


def test_a_deep_copy_continues_on_its_own(device):
    optimizer = optim.AdamW(twins.parameters(device=device), lr=0.01)
    twins.run(optimizer, 2)
    copied = copy.deepcopy(optimizer)
    twins.run(copied, 1, first=2)
    assert not twins.have_same_bits(twins.snapshot(copied)[0], twins.snapshot(optimizer)[0])
    twins.run(optimizer, 1, first=2)
    assert twins.have_same_bits(twins.snapshot(copied), twins.snapshot(optimizer))


def test_a_lazily_negated_gradient_keeps_its_sign(device):
    param = torch.nn.Parameter(torch.ones((), device=device))
    torch.complex(torch.zeros_like(param), param).conj().mul(2.0).imag.backward()
    assert param.grad.is_neg()
    assert param.grad == -2.0
    optim.SGD([param], lr=0.1).step()
    assert param.item() == pytest.approx(1.2)
