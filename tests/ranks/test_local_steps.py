"""torch's fused Adam and AdamW under a scaler or a control go by the local tensors of DTensors.

The bits are those of their own step on the DTensors; whoever would see the difference sees none.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradilocks
from gradilocks.kernels import native
from gradilocks.ranks.layout import is_distributed
from gradilocks.step import update

SHAPES = [(6, 4), (5,), (0, 3), (8, 2), (3,)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request):
    from torch.distributed.device_mesh import init_device_mesh

    kind = request.param
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if kind == "cuda":
        torch.zeros(1, device="cuda")
        alone["device_id"] = torch.device("cuda", 0)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", **alone)
    yield init_device_mesh(kind, (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def placed(mesh, tensor, placements=None):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = placements or [Replicate(), Shard(0)]
    return DTensor.from_local(tensor.to(mesh.device_type), mesh, placements, run_check=False)


def parameters(mesh):
    torch.manual_seed(0)
    return [nn.Parameter(placed(mesh, torch.randn(shape))) for shape in SHAPES]


def give_gradients(mesh, params, step, scale=1.0, placements=None):
    torch.manual_seed(step)
    for place, param in enumerate(params):
        grad = torch.randn(param.shape) * scale
        if place == 3 and step == 2:
            grad[0] = math.inf
        param.grad = None if place == 4 and step == 1 else placed(mesh, grad, placements)


def by_torch(mesh, make, steps=4, placements=None):
    """Stepped on the DTensors; a step with an Inf is left out."""
    params = parameters(mesh)
    optimizer = make(params)
    for step in range(steps):
        give_gradients(mesh, params, step, placements=placements)
        if step != 2:
            optimizer.step()
    return params, optimizer


def by_scaler(mesh, make, steps=4, placements=None, unscale=False):
    params = parameters(mesh)
    optimizer = make(params)
    scaler = gradilocks.GradScaler(mesh.device_type, init_scale=8.0, growth_interval=10**6)
    for step in range(steps):
        scaler.update(8.0) if step else None
        scaler.scale(torch.ones((), device=mesh.device_type))
        give_gradients(mesh, params, step, scale=8.0, placements=placements)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    return params, optimizer


def by_control(mesh, make, steps=4, placements=None):
    params = parameters(mesh)
    optimizer = make(params)
    control = gradilocks.GradientControl(optimizer, scale=None, clip=None)
    for step in range(steps):
        give_gradients(mesh, params, step, placements=placements)
        control.step()
    return params, optimizer


WAYS = {
    "scaler": by_scaler,
    "scaler, unscaled": lambda *given, **more: by_scaler(*given, unscale=True, **more),
    "control": by_control,
}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, fused=True, amsgrad=True),
    "AdamW, two groups, a tensor as lr": lambda params: torch.optim.AdamW(
        [{"params": params[:2], "lr": torch.tensor(0.1)}, {"params": params[2:]}], fused=True
    ),
}


def same_bits(one, other):
    (params, optimizer), (expected, torchs) = one, other
    for param, wanted in zip(params, expected, strict=True):
        assert torch.equal(param.to_local(), wanted.to_local())
        state, known = optimizer.state[param], torchs.state[wanted]
        assert state.keys() == known.keys()
        for name, value in state.items():
            assert is_distributed(value) == is_distributed(known[name])
            local, there = (t.to_local() if is_distributed(t) else t for t in (value, known[name]))
            assert torch.equal(local, there)
            if is_distributed(value):
                assert value.placements == param.placements
    assert {id(param) for param in optimizer.state} <= {id(param) for param in params}


@pytest.fixture(params=["C++", "Python"])
def walk(request, monkeypatch):
    """Who goes through the lists."""
    if request.param == "Python":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("the native library cannot be built here")
    return request.param


@pytest.fixture
def localized(walk, monkeypatch):
    """Whether local tensors were put in the place of DTensors, group by group."""
    seen, localize = [], update._localized

    def localized(lists):
        found = localize(lists)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(update, "_localized", localized)
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_bits_are_those_of_a_step_on_the_dtensors(mesh, localized, way, make):
    same_bits(WAYS[way](mesh, OPTIMIZERS[make]), by_torch(mesh, OPTIMIZERS[make]))
    assert localized
    assert all(localized)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_lie_otherwise_are_left_to_torch(mesh, localized, way):
    from torch.distributed.tensor import Replicate

    given = mesh, OPTIMIZERS["AdamW"], 2, [Replicate(), Replicate()]
    try:
        expected = by_torch(*given)
    except RuntimeError:  # Of torch 2.13, which cannot bring them there.
        with pytest.raises(RuntimeError, match="placement"):
            WAYS[way](*given)
    else:
        same_bits(WAYS[way](*given), expected)
    assert localized
    assert not any(localized)


def test_a_mode_sees_the_operators_that_it_always_saw(mesh, localized):
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_fused_adamw_" in str(func):
                seen.append(is_distributed(args[0][0]))
            return func(*args, **(kwargs or {}))

    seen = []
    params = parameters(mesh)
    optimizer = torch.optim.AdamW(params, fused=True)
    control = gradilocks.GradientControl(optimizer, scale=None, clip=None)
    for step in range(2):
        give_gradients(mesh, params, step)
        with Seeing():
            control.step()
    assert seen[0]
    assert not localized


def test_who_begins_a_group_by_himself_does(mesh, localized):
    class Counting(torch.optim.AdamW):
        begun = 0

        def _init_group(self, *args, **kwargs):
            Counting.begun += 1
            return super()._init_group(*args, **kwargs)

    make = lambda params: Counting(params, lr=0.1, fused=True)  # noqa: E731
    same_bits(by_control(mesh, make), by_torch(mesh, OPTIMIZERS["AdamW"]))
    assert Counting.begun
    assert not localized


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_optimizer(mesh, localized, fails):
    params = parameters(mesh)
    optimizer = torch.optim.AdamW(params, fused=True)
    control = gradilocks.GradientControl(optimizer, scale=None, clip=None)
    give_gradients(mesh, params, 0)
    control.step()
    before = set(vars(optimizer))
    give_gradients(mesh, params, 1)
    if fails:
        optimizer.param_groups[0]["betas"] = ("no number", 0.9)
        with pytest.raises((TypeError, RuntimeError)):
            control.step()
    else:
        control.step()
    assert set(vars(optimizer)) == before
    assert all(map(is_distributed, optimizer.param_groups[0]["params"]))
    assert len(localized) == 2


@pytest.mark.parametrize("plain_first", [False, True])
def test_plain_parameters_may_lie_beside_dtensors(mesh, plain_first):
    """Which torch's own step refuses."""

    def trained(spread):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, device=mesh.device_type)) for _ in range(4)]
        for place in spread:
            params[place] = nn.Parameter(placed(mesh, params[place].detach()))
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
        control = gradilocks.GradientControl(optimizer, scale=None, clip=1.0)
        for step in range(3):
            for place, param in enumerate(params):
                grad = torch.full((4,), 1.0 + step + place)
                param.grad = placed(mesh, grad) if place in spread else grad.to(param.device)
            control.step()
        return [p.to_local() if is_distributed(p) else p for p in params]

    spread = (1, 3) if plain_first else (0, 1)
    for one, other in zip(trained(spread), trained(()), strict=True):
        assert torch.equal(one, other)


def test_lists_that_do_not_belong_together_stay_as_they_are(mesh, walk):
    from torch.distributed.tensor import Partial, Replicate

    localize = update._localized
    params = parameters(mesh)
    moments = [torch.zeros_like(param) for param in params]
    steps = [torch.zeros(()) for _ in params]
    (first, second, none, third), layouts = localize([params, moments, [], steps])
    assert list(map(id, first)) == [id(param._local_tensor) for param in params]
    assert list(map(id, second)) == [id(moment._local_tensor) for moment in moments]
    assert none == []
    assert list(map(id, third)) == list(map(id, steps))
    assert layouts == [(mesh, params[0].placements)]
    plain = [torch.zeros(param.shape) for param in params]
    mixed, (shown,) = [plain[0], params[1]], [(mesh, params[1].placements)]
    (first, second), layouts = localize([mixed, [plain[0], moments[1]]])
    assert first[0] is second[0] is plain[0]
    assert first[1] is params[1]._local_tensor
    assert layouts == [shown]
    assert localize([plain, plain]) == ([plain, plain], [])
    elsewhere = [placed(mesh, each, [Replicate(), Replicate()]) for each in plain]
    for wrong in (
        [plain, moments],
        [mixed, moments[:2]],
        [params, plain],
        [params, elsewhere],
        [params, moments[:-1]],
        [params, [*moments, moments[0]]],
        [params, [*moments[:-1], None]],
    ):
        assert localize(wrong) is None
    summand = placed(mesh, torch.ones(2), [Partial(), Replicate()])
    found = localize([[summand]])
    assert found is None or update._is_elsewhere(*found[1][0])


def test_what_torch_compile_wraps_is_looked_through(mesh, localized, monkeypatch):
    wrapped = torch.compiler.disable(inspect.unwrap(torch.optim.AdamW._init_group))
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", wrapped)
    make = OPTIMIZERS["AdamW"]
    same_bits(WAYS["control"](mesh, make), by_torch(mesh, make))
    assert all(localized)
    assert localized
