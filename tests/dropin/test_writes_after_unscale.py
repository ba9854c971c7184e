"""The clip that follows `unscale_` sees every write in between, also those that torch does not see.

The tests run twice: with Triton's interpreter on the CPU, which then counts as a device, and with
`-m gpu` on CUDA.
"""

from __future__ import annotations

import math

import pytest
import torch

import gradilocks
from gradilocks import GradScaler, clip_grad_norm_, clip_grad_value_

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks import kernels
from gradilocks.kernels import triton_backend

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

COMPILED = torch.cuda.is_available()
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(COMPILED, reason="with a GPU the kernels are compiled, not read"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SIZES = (5, 300, 1, 70)


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Where the Triton kernels serve."""
    monkeypatch.setitem(kernels.BACKENDS, request.param, triton_backend)
    return request.param


def parameters(device, sizes=SIZES):
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(size, generator=generator) for size in sizes]
    return [torch.nn.Parameter(values.to(device)) for values in made]


def unscaled(device, *, groups=1, sizes=SIZES):
    """Parameters whose gradients have just been unscaled, dealt out to so many optimizers."""
    params = parameters(device, sizes)
    scaler = GradScaler(device, init_scale=1024.0)
    scaler.scale(sum((p * p).sum() for p in params)).backward()
    optimizers = [torch.optim.SGD(params[k::groups], lr=0.1) for k in range(groups)]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    return params, scaler, optimizers


def norm_of(params):
    return torch.cat([p.grad.detach().flatten().double() for p in params]).norm().item()


def check_clip(params, *, max_norm=1.0):
    """Clips, and compares with the float64 norm of the gradients as they stand."""
    before = [p.grad.detach().clone() for p in params]
    expected = norm_of(params)
    norm = clip_grad_norm_(params, max_norm)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    coefficient = min(1.0, max_norm / (expected + 1e-6))
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, grad * coefficient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("order", [[3, 0, 2, 1], [3, 2, 1, 0]], ids=str)
def test_another_order_of_parameters_has_the_same_norm(device, order):
    params, _, _ = unscaled(device)
    check_clip([params[place] for place in order])


@pytest.mark.parametrize("some", [[0], [3], [1, 2], [2, 1], [0, 3], [3, 1], [0, 1, 3]], ids=str)
def test_some_of_the_parameters_have_their_own_norm(device, some):
    params, _, _ = unscaled(device)
    check_clip([params[place] for place in some])


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_several_optimizers_are_clipped_together(device, groups):
    params, _, _ = unscaled(device, groups=groups)
    check_clip(params)


def test_several_optimizers_are_clipped_one_by_one(device):
    params, scaler, optimizers = unscaled(device, groups=2)
    check_clip(params[0::2])
    check_clip(params[1::2], max_norm=0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def test_a_parameter_that_is_listed_twice_counts_once(device):
    params, _, _ = unscaled(device)
    expected = norm_of(params)
    assert clip_grad_norm_([*params, params[1]], 1.0).item() == pytest.approx(expected, rel=1e-6)


def test_a_parameter_that_was_not_unscaled_is_measured_with_all_the_others(device):
    params, _, _ = unscaled(device)
    (more,) = parameters(device, (9,))
    more.grad = torch.full((9,), 7.0, device=device)
    check_clip([*params, more])


@pytest.mark.parametrize("order", [1.0, math.inf, 3.0])
def test_another_norm_is_measured(device, order):
    params, _, _ = unscaled(device)
    flat = torch.cat([p.grad.flatten().double() for p in params])
    expected = torch.linalg.vector_norm(flat, order).item()
    norm = clip_grad_norm_(params, math.inf, norm_type=order)
    assert norm.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("first", [1.0, 1e9], ids=["clips", "changes nothing"])
def test_a_second_clip_does_not_use_the_norm_from_before_the_first(device, first):
    params, _, _ = unscaled(device)
    check_clip(params, max_norm=first)
    check_clip(params, max_norm=0.25)
    check_clip(params, max_norm=0.25)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_gradient_has_no_finite_norm_and_is_left_alone(device, value):
    params, _, _ = unscaled(device)
    params[2].grad.fill_(value)
    scaler, optimizer = GradScaler(device, init_scale=2.0), torch.optim.SGD(params, lr=0.1)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    before = [p.grad.clone() for p in params]
    norm = clip_grad_norm_(params, 1e-3).item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    scaler.step(optimizer)
    assert scaler.outcome.skipped
    assert len(scaler.outcome.culprits) == 1


@pytest.mark.parametrize("value", [math.nan, 1e200], ids=["nan", "huge"])
def test_float64_gradients_of_several_optimizers_are_clipped_together(device, value):
    params = [torch.nn.Parameter(torch.ones(4, dtype=torch.float64, device=device)) for _ in "ab"]
    params[0].grad, params[1].grad = (torch.full_like(p, 1e200) for p in params)
    params[1].grad.fill_(value)
    scaler = GradScaler(device, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))
    for param in params:
        scaler.unscale_(torch.optim.SGD([param], lr=0.1))
    norm = clip_grad_norm_(params, 1.0)
    assert norm.dtype == torch.float64
    if math.isnan(value):
        assert math.isnan(norm.item())
        assert params[0].grad.tolist() == [1e200] * 4
    else:
        assert norm.item() == pytest.approx(math.sqrt(8.0) * value, rel=1e-12)
        assert params[0].grad.tolist() == pytest.approx([math.sqrt(1 / 8)] * 4, rel=1e-6)


def _in_place(param):
    param.grad.mul_(0.5)


def _replaced(param):
    param.grad = param.grad * 0.5


def _replaced_by_a_copy_in_its_memory(param):
    scaled = param.grad * 0.5
    param.grad = None
    param.grad = scaled


_OLD = []


def _replaced_while_the_old_one_lives(param):
    _OLD.append(param.grad)
    param.grad = param.grad * 0.5


def _replaced_by_an_alias(param):
    param.grad = param.grad.detach()
    param.grad.mul_(0.5)


def _through_detach(param):
    param.grad.detach().mul_(0.5)


def _through_a_view(param):
    param.grad[: param.numel() // 2].zero_()


def _foreach(param):
    torch._foreach_mul_([param.grad], 0.5)


def _out(param):
    torch.mul(param.grad, 0.5, out=param.grad)


def _by_mask(param):
    param.grad[param.grad > 0] = 0.0


def _noise_added(param):
    param.grad.add_(torch.ones_like(param.grad))


def _cleared(param):
    param.grad.zero_()


def _in_inference_mode(param):
    with torch.inference_mode():
        param.grad.mul_(0.5)


def _storage_swapped(param):
    param.grad.data = param.grad.data * 0.5


def _accumulated(param):
    (param * 3.0).sum().backward()


def _clipped_by_value(param):
    clip_grad_value_([param], 0.1)


def _clipped_by_ours(param):
    clip_grad_norm_([param], 0.1)


def _clipped_by_torch(param):
    torch.nn.utils.clip_grad_norm_([param], 0.1)


def _through_data(param):
    param.grad.data.mul_(0.5)


def _averaged_by_hand(param):
    param.grad.data /= 4


def _one_element_through_data(param):
    param.grad.data[0] = 1000.0


def _through_dlpack(param):
    torch.from_dlpack(param.grad.detach()).mul_(0.5)


def _through_its_storage(param):
    alias = torch.empty(0, device=param.device).set_(param.grad.untyped_storage(), 0, param.shape)
    alias.mul_(0.5)


def _through_a_tensor_over_its_memory(param):
    with torch.autograd._unsafe_preserve_version_counter(param.grad):
        param.grad.mul_(0.5)


def _multiplied_by_our_kernel(param):
    half = torch.full((), 0.5, device=param.device)
    triton_backend.multiply_([param.grad], half)


WRITES = [
    _in_place,
    _replaced,
    _replaced_by_a_copy_in_its_memory,
    _replaced_while_the_old_one_lives,
    _replaced_by_an_alias,
    _through_detach,
    _through_a_view,
    _foreach,
    _out,
    _by_mask,
    _noise_added,
    _cleared,
    _in_inference_mode,
    _storage_swapped,
    _accumulated,
    _clipped_by_value,
    _clipped_by_ours,
    _clipped_by_torch,
    _through_data,
    _averaged_by_hand,
    _one_element_through_data,
    _through_dlpack,
    _through_its_storage,
    _through_a_tensor_over_its_memory,
    _multiplied_by_our_kernel,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.strip("_"))
def test_a_write_after_unscale_is_seen(device, write):
    params, _, _ = unscaled(device)
    write(params[1])
    check_clip(params)


def test_a_collective_on_the_gradient_or_its_data_is_seen(device):
    import torch.distributed as dist

    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device == "cpu":
        dist.init_process_group("gloo", **alone)
    else:
        dist.init_process_group("nccl", **alone, device_id=torch.device("cuda", 0))
    try:
        params, _, _ = unscaled(device)
        versions = [p.grad._version for p in params]
        for param in params:
            param.grad.data *= 3.0  # As a sum over three ranks would be.
            dist.all_reduce(param.grad)
            dist.all_reduce(param.grad.data)
        assert [p.grad._version for p in params] == versions
        check_clip(params)
    finally:
        dist.destroy_process_group()


def test_a_gradient_that_two_parameters_share_counts_twice(device):
    params, _, _ = unscaled(device, sizes=(6, 6))
    sharing = torch.nn.Parameter(torch.zeros(6, device=device))
    sharing.grad = params[0].grad
    expected = math.sqrt(2.0) * norm_of(params[:1])
    norm = clip_grad_norm_([params[0], sharing], math.inf)
    assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_sparse_gradients_are_measured(device):
    table = torch.nn.Embedding(10, 3, sparse=True, device=device)
    scaler, optimizer = GradScaler(device), torch.optim.SparseAdam(list(table.parameters()))
    scaler.scale(table(torch.tensor([1, 1, 7], device=device)).sum()).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(table.parameters(), 1.0)
    assert norm.item() == pytest.approx(math.sqrt(3 * 4 + 3), rel=1e-6)


def test_gradients_unscaled_again_after_another_backward_are_clipped_as_they_are_now(device):
    params = parameters(device)
    scaler = GradScaler(device, init_scale=1024.0)
    one, two = (torch.optim.SGD(params, lr=0.1) for _ in range(2))
    losses = scaler.scale([(p * p).sum() for p in params] + [(p * 3.0).sum() for p in params])
    sum(losses[: len(params)]).backward()
    scaler.unscale_(one)
    sum(losses[len(params) :]).backward()
    scaler.unscale_(two)
    check_clip(params)


def test_the_gradients_of_the_next_iteration_are_not_taken_for_the_last_ones(device):
    params, scaler, (optimizer,) = unscaled(device)
    check_clip(params)
    scaler.step(optimizer)
    scaler.update()
    for scale_of_loss in (2.0, 3.0):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(sum((p * p).sum() for p in params) * scale_of_loss).backward()
        check_clip(params, max_norm=math.inf)  # Still scaled, and so measured.
        scaler.unscale_(optimizer)
        check_clip(params)
        scaler.step(optimizer)
        scaler.update()


def test_a_loop_with_the_drop_ins_trains_as_torchs_does(device):
    trained = []
    for library, clip in ((torch.amp, torch.nn.utils), (gradilocks, gradilocks)):
        params = parameters(device)
        optimizer = torch.optim.SGD(params, lr=0.01)
        scaler = library.GradScaler(device, init_scale=2.0**14)
        for number in range(4):
            loss = sum((p * p).sum() for p in params) * (math.inf if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip.clip_grad_norm_(reversed(params), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        trained.append([*(p.detach() for p in params), torch.tensor(scaler.get_scale())])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-7)


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def no_wait():
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


quiet = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")


def steps(model, optimizers, scaler, number=1):
    for _ in range(number):
        loss = model(torch.ones(4, 16, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


@quiet
@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
def test_an_unchanged_loop_never_waits(groups, request):
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)).cuda()
    params = list(model.parameters())
    optimizers = [torch.optim.AdamW(params[k::groups], fused=True) for k in range(groups)]
    scaler = GradScaler()
    steps(model, optimizers, scaler, 3)  # These compile kernels and make tables.
    request.getfixturevalue("no_wait")
    steps(model, optimizers, scaler, 3)


@quiet
@pytest.mark.gpu
def test_no_clip_function_waits(request):
    params, _, _ = unscaled("cuda")

    def clip_all_ways():
        clip_grad_norm_(params[::-2], 1.0)
        clip_grad_norm_([params[0], params[3]], 1.0)
        clip_grad_norm_(params, 1.0)
        clip_grad_norm_(params, 1.0, norm_type=1.0)
        clip_grad_value_(params, 0.5)
        norm = gradilocks.get_total_norm([p.grad for p in params])
        gradilocks.clip_grads_with_norm_(params, 0.1, norm)
        gradilocks.clip_grads_with_norm_(params, 0.1, torch.tensor(3.0))
        gradilocks.clip_grads_with_norm_(params, 0.1, 3.0)

    clip_all_ways()
    request.getfixturevalue("no_wait")
    clip_all_ways()


@pytest.mark.gpu
def test_gradients_of_two_devices_are_clipped_together():
    here = [torch.nn.Parameter(torch.randn(70_000)) for _ in range(2)]
    there = parameters("cuda")
    params = [there[0], here[0], *there[1:], here[1]]
    scaler = GradScaler("cuda")
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler.scale(sum((p * p).sum().cuda() for p in params)).backward()
    scaler.unscale_(optimizer)
    expected = torch.cat([p.grad.flatten().double().cpu() for p in params]).norm().item()
    norm = clip_grad_norm_(params, 1.0)
    assert norm.device.type == "cuda"
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    after = torch.cat([p.grad.flatten().double().cpu() for p in params]).norm().item()
    assert after == pytest.approx(1.0, rel=1e-4)


@pytest.mark.gpu
def test_a_graph_that_is_captured_measures_at_every_replay():
    params, _, _ = unscaled("cuda")
    clip_grad_norm_(params, math.inf)  # Compiles the kernels and makes the tables.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, math.inf)
    for factor in (1.0, 3.0):
        for param in params:
            param.grad.mul_(factor)
        graph.replay()
        assert norm.item() == pytest.approx(norm_of(params), rel=1e-6)
