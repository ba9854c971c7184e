"""FSDP2 on a mesh of one device trains as the whole model does.

NCCL has no backend for the CPU, so nothing that ranks tell each other may lie there when they meet.
On a machine without a GPU the same runs over gloo, which has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradilocks
from gradilocks.ranks import layout as ranks
from gradilocks.ranks.model_ranks import RankOptions, model_ranks_of

STEPS = 5
OVERFLOW_AT = 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh of one device, over the backend that this device usually has."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = request.param
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if kind == "cuda":
        torch.zeros(1, device="cuda")  # A mesh warns if nobody has chosen the device before it.
        alone["device_id"] = torch.device("cuda", 0)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", **alone)
    try:
        yield init_device_mesh(kind, (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("mesh")
def test_all_ranks_are_known_also_where_torch_asks_for_their_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {dist.group.WORLD: [0]}  # As in torch 2.6.
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: known[group])
    assert ranks.ranks_in(None) == ranks.ranks_in(dist.group.WORLD) == (0,)


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh()
    return nn.Sequential(*layers).to(device)


def _loss(model: nn.Module, step: int, device: str) -> Tensor:
    data = torch.linspace(-1.0, 1.0, 32, device=device).reshape(4, 8) + step
    return (model(data) * 3.0).square().sum()  # type: ignore[no-any-return]


def _spoil(model: nn.Module, step: int) -> None:
    if step == OVERFLOW_AT:
        grad: Any = next(model.parameters()).grad
        (grad.to_local() if ranks.is_distributed(grad) else grad).view(-1)[0] = math.inf


def _by_control(model: nn.Module, device: str, *, backward: bool, **given: Any) -> list[float]:
    """The norms and scales of a few steps under a control."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    control = gradilocks.GradientControl(optimizer, model=model, **given)
    seen = []
    for step in range(STEPS):
        loss = _loss(model, step, device)
        control.backward(loss) if backward else loss.backward()  # type: ignore[no-untyped-call]
        _spoil(model, step)
        outcome = control.step()
        seen += [outcome.norm, control.scale, float(outcome.skipped)]
        control.zero_grad()
    return seen


def _by_scaler(
    model: nn.Module, device: str, *, max_norm: float | None, fused: bool = False, **given: Any
) -> list[float]:
    """The norms and scales of a few steps in torch's loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = gradilocks.GradScaler(device, model=model, **given)
    seen = []
    for step in range(STEPS):
        scaler.scale(_loss(model, step, device)).backward()
        _spoil(model, step)
        if max_norm is not None:
            scaler.unscale_(optimizer)
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            seen.append(gradilocks.get_total_norm(grads).item())
            seen.append(gradilocks.clip_grad_norm_(model.parameters(), max_norm).item())
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad()
    return seen


WAYS: dict[str, Callable[[nn.Module, str], list[float]]] = {
    "a control, the user's backward": lambda model, device: _by_control(
        model, device, backward=False, scale=None, clip=1.0
    ),
    "a control without a scale": lambda model, device: _by_control(
        model, device, backward=True, scale=None, clip=1.0
    ),
    "a control": lambda model, device: _by_control(model, device, backward=True, clip=1.0),
    "a control, headroom": lambda model, device: _by_control(
        model, device, backward=True, scale=gradilocks.HeadroomScale(), clip=1.0
    ),
    "a control, tensors apart": lambda model, device: _by_control(
        model, device, backward=False, scale=None, clip=gradilocks.ClipPerTensor(0.1)
    ),
    "a scaler": lambda model, device: _by_scaler(model, device, max_norm=1.0),
    "a scaler, fused": lambda model, device: _by_scaler(model, device, max_norm=1.0, fused=True),
    "a scaler, unscaled in the step": lambda model, device: _by_scaler(
        model, device, max_norm=None, fused=True
    ),
    "a scaler, headroom": lambda model, device: _by_scaler(
        model, device, max_norm=1.0, policy=gradilocks.HeadroomScale()
    ),
    "a scaler, its own clip": lambda model, device: _by_scaler(
        model, device, max_norm=None, clip=gradilocks.ClipByNorm(1.0)
    ),
}


def _whole(param: Tensor) -> Tensor:
    local: Any = param.detach()
    return (local.to_local() if ranks.is_distributed(local) else local).cpu()


def _compare(mesh: Any, way: str, **how: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    device = mesh.device_type
    whole, sharded = _model(device), _model(device)
    fully_shard(sharded, mesh=mesh, **how)
    expected, found = WAYS[way](whole, device), WAYS[way](sharded, device)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(_whole(ours), _whole(theirs), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_model_trains_as_the_whole_one(mesh: Any, way: str) -> None:
    _compare(mesh, way)


@pytest.mark.gpu
@pytest.mark.parametrize("mesh", ["cuda"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_model_that_is_offloaded_trains_as_the_whole_one(mesh: Any, way: str) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    _compare(mesh, way, offload_policy=CPUOffloadPolicy())


def test_plain_gradients_on_the_host_are_measured_over_a_group_of_devices(mesh: Any) -> None:
    param = nn.Parameter(torch.zeros(2))
    control = gradilocks.GradientControl(
        torch.optim.SGD([param], lr=1.0), scale=None, clip=1.0, process_group=dist.group.WORLD
    )
    param.sum().mul(3.0).backward()
    assert control.step().norm == pytest.approx(math.sqrt(18.0))
    scaler = gradilocks.GradScaler("cpu", process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad = None
    scaler.scale(param.sum()).backward()
    param.grad[0] = math.nan  # type: ignore[index]
    before = param.tolist()
    scaler.step(optimizer)
    scaler.update()
    assert (param.tolist(), scaler.get_scale()) == (before, 2.0**15)


class _Group:
    """A process group as far as anybody asks here: for which devices it has backends."""

    def __init__(self, *kinds: str) -> None:
        self._device_types = [torch.device(kind) for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "wanted", "chosen"),
    [
        (("cpu",), "cpu", "cpu"),
        (("cuda", "cpu"), "cpu", "cpu"),
        (("cpu", "cuda"), "cuda:1", "cuda:1"),
        (("cuda",), "cuda:1", "cuda:1"),
        (("cuda",), "cpu", "cuda:3"),
        (("cpu",), "cuda:1", "cpu"),
        ((), "cuda:1", "cuda:1"),
    ],
)
def test_a_collective_runs_where_its_group_has_a_backend(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], wanted: str, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    near = torch.device(wanted)
    assert ranks.device_for(_Group(*kinds), near.type, near) == torch.device(chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a group for CUDA is made, and not used")
def test_a_group_for_cuda_alone_is_never_handed_numbers_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NCCL under CPU offload: the parameters are on the CPU, and the group is not."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        param = nn.Parameter(torch.zeros(2))
        model_ranks = model_ranks_of(
            [param], name=str, options=RankOptions(process_group=dist.group.WORLD)
        )
        (rank_group,) = ranks.rank_groups_of([param], group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert model_ranks is not None
    assert model_ranks.rank_group.device == rank_group.device == torch.device("cuda:0")


OPTIMIZERS: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "AdamW": (lambda params: gradilocks.optim.AdamW(params, lr=0.01, amsgrad=True), torch.float32),
    "SGD": (lambda params: gradilocks.optim.SGD(params, lr=0.01, momentum=0.9), torch.float32),
    "masters": (
        lambda params: gradilocks.optim.AdamW(params, lr=0.01, master_weights=True),
        torch.float16,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_our_optimizers_step_the_shards_by_their_kernels(
    mesh: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they step the whole model, with state that is distributed as the parameters are."""
    from torch.distributed.fsdp import fully_shard

    from tests.engine.backends import serve

    pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels")
    device = serve(mesh.device_type, monkeypatch)
    make, dtype = OPTIMIZERS[name]
    seen = []
    for spread in (False, True):
        model = _model(device).to(dtype)
        if spread:
            fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters())
        control = gradilocks.GradientControl(optimizer, model=model, scale=8.0, clip=1.0)
        found: list[Any] = []
        for step in range(STEPS):
            data = torch.linspace(-1.0, 1.0, 32, device=device).reshape(4, 8).to(dtype) + step
            control.backward(model(data).float().square().sum())
            _spoil(model, step)
            outcome = control.step()
            found += [outcome.norm if not outcome.skipped else 0.0, outcome.skipped]
            control.zero_grad()
        assert optimizer._plan is not None, "the kernels were not used"
        for param in model.parameters():
            state = optimizer.state[param]
            kept = [state[key] for key in (*optimizer.columns, "master") if key in state]
            assert kept
            for tensor in (param, *kept):
                assert ranks.is_distributed(tensor) == spread
                found.append(ranks.local_of(tensor).float().flatten().tolist())
        seen.append(found)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_our_kernels_step_gradients_that_lie_otherwise_than_their_parameters(
    mesh: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summands, as sequence parallel leaves them, are added up first; by one plan for all steps."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    from tests.engine.backends import serve

    pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels")
    device = serve(mesh.device_type, monkeypatch)
    make, dtype = OPTIMIZERS[name]
    weights = torch.linspace(-1.0, 1.0, 24, device=device).reshape(4, 6).to(dtype)
    seen = []
    for spread in (False, True):
        param = nn.Parameter(distribute_tensor(weights.clone(), mesh, [Replicate()]))
        optimizer, plans = make([param]), []
        for step in range(3):
            grad = weights.flip(0) * (step + 1)
            placement = Partial() if spread else Replicate()
            param.grad = DTensor.from_local(grad.clone(), mesh, [placement])
            optimizer.step()
            plans.append(optimizer._plan)
        assert None not in plans, "the kernels were not used"
        assert plans[1] is plans[2]
        seen.append(param.detach().to_local())  # type: ignore[attr-defined]
    assert torch.equal(*seen)


def _offloaded(mesh: Any, values: Tensor) -> Any:
    """As FSDP2 leaves what it offloads: elements on the host, a mesh of another kind."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    kind = "meta" if mesh.device_type == "cpu" else "cuda"  # Without a GPU no other has elements.
    meta = TensorMeta(values.size(), values.stride(), values.dtype)
    spec = DTensorSpec(DeviceMesh(kind, [0]), (Shard(0),), tensor_meta=meta)
    return DTensor(values, spec, requires_grad=False)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_offloaded_stays_on_the_host(mesh: Any, kind: str, dtype: torch.dtype) -> None:
    optimizers: Any = gradilocks.optim
    given = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1}
    values, stepped = torch.linspace(-1.0, 1.0, 6).to(dtype), []
    for offloaded in (True, False):
        value = values.clone()
        param = nn.Parameter(_offloaded(mesh, value) if offloaded else value)
        optimizer = getattr(optimizers, kind)([param], **given)
        control = gradilocks.GradientControl(optimizer, scale=None, clip=1.0)
        for _ in range(3):
            grad = torch.full_like(values, 2.0)
            param.grad = _offloaded(mesh, grad) if offloaded else grad
            assert control.step().norm == pytest.approx(math.sqrt(24.0), rel=1e-6)
        for each in optimizer.state[param].values():
            if isinstance(each, Tensor):
                assert ranks.local_of(each).device.type == "cpu"
        stepped.append(value)
        if offloaded:  # The norm is where the mesh is, so that `.full_tensor()` works there.
            clipped: Any = gradilocks.clip_grad_norm_([param], 1.0)
            assert ranks.is_distributed(clipped)
    torch.testing.assert_close(stepped[0], stepped[1], rtol=0.0, atol=0.0)
