"""Every policy on every layout, in a control and in a scaler: what one process does, bit for bit.

The gradients are given, so that layouts differ in nothing else. Of each layout's placements the
tensors take one after the other, so that a few layouts have all of them, uneven and empty shards
among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradilocks
from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    HeadroomScale,
    QuantileClip,
    SkipSpikes,
    StaticScale,
    ZScoreClip,
    chain,
)
from gradilocks.ranks.layout import global_rows
from tests.ranks.rank_programs import run_all

SHAPES = {
    "a.number": (),
    "a.weight": (9, 6),
    "a.bias": (7,),
    "b.weight": (5, 3),
    "b.kernel": (3, 4, 2),
    "b.bias": (1,),
    "c.weight": (2, 8),
    "c.bias": (3,),
    "head.weight": (33, 5),
}
STEPS, BAD_STEP = 5, 3
ORDERS = (1.0, 2.0, 3.0, math.inf)

SCALES: dict[str, Any] = {
    "dynamic": DynamicScale(init_scale=4.0, growth_interval=2),
    "torch's": DynamicScale.torch(),
    "Megatron's": DynamicScale.megatron(init_scale=8.0, growth_interval=2, hysteresis=1),
    "DeepSpeed's": DynamicScale.deepspeed(init_scale=8.0, growth_interval=2),
    "fairseq's": DynamicScale.fairseq(init_scale=8.0, growth_interval=2),
    "headroom": HeadroomScale(init_scale=4.0, growth_interval=2),
    "static": StaticScale(2.0),
}
CLIPS: dict[str, Any] = {
    **{f"norm {p:g}": ClipByNorm(1.5, order=p) for p in ORDERS},
    **{f"per tensor {p:g}": ClipPerTensor(2.0, order=p) for p in ORDERS},
    **{
        f"per group {p:g}": ClipPerGroup({"*.bias": 0.5, 1: 3.0}, otherwise=2.0, order=p)
        for p in ORDERS
    },
    "value": ClipByValue(1.5),
    "AdaGC": AdaGC(warmup=2),
    "quantile": QuantileClip(0.5, window=4),
    "z-score": ZScoreClip(0.1, warmup=2),
    "spikes": chain(SkipSpikes(0.5, window=4, at_least=2), ClipByNorm(4.0)),
    "adaptive": AdaptiveClip(0.5),
    "adaptive but": AdaptiveClip(0.5, exclude=("head.*", "*.number")),
    "adaptive, norm": chain(AdaptiveClip(0.5, exclude=("head.*",)), ClipByNorm(2.0)),
    "adaptive, per tensor": chain(AdaptiveClip(0.5, exclude=("a.*",)), ClipPerTensor(0.7)),
    "adaptive, AdaGC": chain(AdaptiveClip(2.0), AdaGC(warmup=2), ClipByNorm(2.0)),
    "adaptive, value": chain(AdaptiveClip(0.5), ClipByValue(0.3)),
    "per tensor, norm": chain(ClipPerTensor(1.0), ClipByNorm(2.0)),
    "per group, z-score": chain(ClipPerGroup({"*.bias": 0.5}), ZScoreClip(0.1, warmup=2)),
    "AdaGC, quantile": chain(AdaGC(warmup=2), QuantileClip(0.5, window=4)),
}
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"clip": clip, "policy": SCALES["dynamic"]} for name, clip in CLIPS.items()},
    **{f"{name} scale": {"clip": 4.0, "policy": scale} for name, scale in SCALES.items()},
}


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _gradients(step: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Finite ones; one tensor has none at the second step."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if step == 1:
        del made["c.weight"]
    return made


Placed = Callable[[str, Tensor], Tensor]


def _trained(
    how: str,
    settings: dict[str, Any],
    placed: Placed,
    *,
    names: Sequence[str] = tuple(SHAPES),
    spoil: Callable[[dict[str, Tensor]], None],
    steps: int = STEPS,
    seed: int = 0,
    **told: Any,
) -> list[Any]:
    """What each step came to, and the parameters that it left, as they lie here."""
    model = nn.Module()
    for name, value in _weights().items():
        if name in names:
            first, last = name.split(".")
            if not hasattr(model, first):
                model.add_module(first, nn.Module())
            getattr(model, first).register_parameter(last, nn.Parameter(placed(name, value)))
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in params.items() if name.startswith("head") is late]}
        for late in (False, True)
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, foreach=False)
    made: Any
    if how == "control":
        policies = {"scale": settings["policy"], "clip": settings["clip"]}
        made = gradilocks.GradientControl(optimizer, model=model, **policies, **told)
    else:
        made = gradilocks.GradScaler("cpu", model=model, **settings)
    seen: list[Any] = []
    for step in range(steps):
        loss = torch.ones((), requires_grad=True)
        made.scale_loss(loss) if how == "control" else made.scale(loss)
        scale = made.scale if how == "control" else made.get_scale()
        grads = {name: grad * scale for name, grad in _gradients(step, seed=seed).items()}
        for name, param in params.items():
            grad = grads.get(name)
            param.grad = None if grad is None else placed(name, grad)
        if step == BAD_STEP:
            spoil({name: p.grad for name, p in params.items() if p.grad is not None})
        if how == "control":
            outcome, after = made.step(), made.scale
        else:
            if how == "unscaling":
                made.unscale_(optimizer)
            made.step(optimizer)
            made.update()
            outcome, after = made.outcome, made.get_scale()
        norm = outcome.norm if math.isfinite(outcome.norm) else 0.0
        seen.append(
            (outcome.skipped, outcome.rejected, outcome.clipped, norm, outcome.limit, after)
        )
        (made if how == "control" else optimizer).zero_grad()
    return [seen, {name: param.detach() for name, param in params.items()}]


def _on(mesh: Any, every: list[Any]) -> Placed:
    """Lays the tensors out by the placements of `every`, one after the other."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    order = list(SHAPES)

    def placed(name: str, value: Tensor) -> Tensor:
        wanted = [
            Replicate() if isinstance(each, Shard) and each.dim >= value.dim() else each
            for each in every[order.index(name) % len(every)]
        ]
        local, where = value, mesh.get_coordinate()
        for at, each in enumerate(wanted):  # Not by distribute_tensor: 5,000 of them take long.
            if isinstance(each, Shard):
                parts = torch.chunk(local, mesh.size(at), dim=each.dim)
                empty = local.narrow(each.dim, 0, 0)
                local = parts[where[at]] if where[at] < len(parts) else empty
        return DTensor.from_local(
            local.clone(),
            mesh,
            wanted,
            run_check=False,
            shape=value.shape,
            stride=value.contiguous().stride(),
        )

    return placed


def _spoil_last(grads: dict[str, Tensor]) -> None:
    """An Inf on the last rank alone, wherever it has elements."""
    if dist.get_rank() == dist.get_world_size() - 1:
        _spoil_here(grads)


def _spoil_last_of_mesh(grads: dict[str, Tensor]) -> None:
    """As `_spoil_last`, on the last rank of each mesh."""
    mesh: Any = grads["head.weight"].device_mesh  # type: ignore[attr-defined]
    if dist.get_rank() == int(mesh.mesh.flatten()[-1]):
        _spoil_here(grads)


def _spoil_here(grads: dict[str, Tensor]) -> None:
    head: Any = grads["head.weight"]
    (head.to_local() if hasattr(head, "to_local") else head).reshape(-1)[:1] = math.inf


def _spoil_one(grads: dict[str, Tensor]) -> None:
    grads["head.weight"][-1, 0] = math.inf


def _full(found: list[Any]) -> list[Any]:
    from torch.distributed.tensor import DTensor

    seen, params = found
    return [
        seen,
        {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in params.items()},
    ]


def layouts(rank: int) -> dict[str, Any]:
    """By layout, driver and policy, what the ranks made of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    every = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)]]
    ways: dict[str, tuple[Placed, tuple[str, ...], dict[str, Any]]] = {
        "FSDP2": (_on(line, [[Shard(0)]]), ("scaler", "unscaling"), {}),
        "line": (_on(line, every), ("control", "scaler"), {}),
        "copies": (_as_it_is, ("control",), {"copies": ranks}),
    }
    if ranks > 2:
        grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
        one = (Shard(0), Shard(1), Replicate())
        pairs = [[a, b] for a in one for b in one]
        halves = _on(grid["tp"], every)
        ways = {
            "grid": (_on(grid, pairs), ("control", "scaler"), {}),
            "tp inside dp": (halves, ("control",), {"mesh": grid}),
            "tp alone": (halves, ("scaler",), {}),  # The others hold copies, and are not asked.
        }
    found = {}
    for way, (placed, drivers, told) in ways.items():
        for how in drivers:
            for policy in POLICIES if (way, how) in _WITH_ALL else APART:
                spoil = _spoil_last if how == "control" else _spoil_last_of_mesh
                came = _trained(how, POLICIES[policy], placed, spoil=spoil, **told)
                found[way, how, policy] = _full(came)
    return found


_WITH_ALL = ("line", "control"), ("line", "scaler"), ("grid", "scaler")
APART = [name for name, clip in CLIPS.items() if clip.apart]
"""Those that need more than the norm of all: they are tried on every layout."""


def stages(rank: int) -> dict[str, Any]:
    """Pipeline stages that hold different numbers of parameters, plain or sharded, by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    first = rank < ranks // 2
    names = [name for name in SHAPES if name.startswith("a.") is first]
    told: dict[str, Any] = {"mesh": mesh, "distinct": ("pp",)}
    sharded = _on(mesh["dp"], [[Shard(0)], [Shard(1)], [Replicate()]])
    ways: dict[str, tuple[Placed, dict[str, Any]]] = {"plain": (_as_it_is, told)}
    if ranks > 2:
        ways["sharded"] = sharded, told
        ways["by a group"] = sharded, {"process_group": mesh["pp"].get_group()}
    found = {}
    for way, (placed, options) in ways.items():
        for policy in APART[:: 4 if way == "by a group" else 1]:
            found[way, policy] = _full(
                _trained(
                    "control",
                    POLICIES[policy],
                    placed,
                    names=names,
                    spoil=_spoil_last,
                    **options,
                )
            )
    return found


def patterns_that_fit_nobody(rank: int) -> str:
    """One that fits a parameter of another stage is fine (`stages`); one that fits none is not."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    names = [name for name in SHAPES if name.startswith("a.") is (rank == 0)]
    settings = {"policy": StaticScale(1.0), "clip": AdaptiveClip(exclude=("haed.*",))}
    told: dict[str, Any] = {"mesh": mesh, "distinct": ("pp",)}

    def own(_: str, value: Tensor) -> Tensor:  # Stages that were copies would be refused for that.
        return value + rank

    try:
        _trained("control", settings, own, names=names, spoil=_spoil_last, **told)
    except ValueError as error:
        return str(error)
    return ""


def _as_it_is(_: str, value: Tensor) -> Tensor:
    return value.clone()


def two_models(rank: int) -> dict[str, Any]:
    """A model on each half of the ranks, with other gradients, and one half takes more steps."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    half = dist.get_world_size() // 2
    meshes = [DeviceMesh("cpu", list(range(at, at + half))) for at in (0, half)]
    number = rank // half
    placed = _on(meshes[number], [[Shard(0)], [Shard(1)]])
    return {
        policy: _full(
            _trained(
                "scaler",
                POLICIES[policy],
                placed,
                spoil=_spoil_last_of_mesh,
                seed=number,
                steps=STEPS - number,
            )
        )
        for policy in ("per tensor 2", "per group 2", "AdaGC", "adaptive, norm", "headroom scale")
    }


# What real wrappers make.


class _Layers(nn.Module):
    """Rows that two and four ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.up, self.norm = nn.Linear(6, 10), nn.LayerNorm(10)
        self.down, self.head = nn.Linear(10, 6), nn.Linear(6, 7)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(torch.tanh(self.norm(self.up(inputs)))))
        return out


def _inputs(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def wrapped(rank: int) -> dict[str, Any]:
    """FSDP2 over tensor parallelism, whose rows lie in strides, and a norm outside the plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}
    for how in ("control", "scaler"):
        model = _Layers()
        plan: Any = {
            "up": ColwiseParallel(output_layouts=Replicate()),
            "down": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        whole = dict(_Layers().named_parameters())
        found["rows"] = {
            name: torch.equal(whole[name][global_rows(param, name)], param.to_local())  # type: ignore[operator]
            for name, param in model.named_parameters()
            if name in ("up.weight", "head.weight")
        }
        found["strided"] = [
            str(placement)
            for placement in model.up.weight.placements  # type: ignore[union-attr]
            if hasattr(placement, "split_factor")
        ]
        found[how] = _stepped(how, model, {"mesh": mesh} if how == "control" else {})
    return found


def _stepped(how: str, model: nn.Module, told: dict[str, Any]) -> list[Any]:
    """Two steps on the same batch everywhere: what they came to, and the parameters after."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scale, clip = StaticScale(4.0), AdaptiveClip(0.1, exclude=("norm.*",))
    made: Any = (
        gradilocks.GradientControl(optimizer, model=model, scale=scale, clip=clip, **told)
        if how == "control"
        else gradilocks.GradScaler("cpu", model=model, policy=scale, clip=clip)
    )
    seen: list[Any] = []
    for step in range(2):
        loss = model(_inputs(step)).square().mean()
        if how == "control":
            made.backward(loss)
            outcome = made.step()
            made.zero_grad()
        else:
            made.scale(loss).backward()
            made.step(optimizer)
            made.update()
            outcome = made.outcome
            optimizer.zero_grad()
        seen.append((outcome.clipped, outcome.norm))
    return _full([seen, dict(model.named_parameters())])


def headroom_of_fsdp2(rank: int) -> dict[str, Any]:
    """Of RANKS.md: the gradients' largest magnitude is 4 on the last rank and 1 on the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    found = {}
    for how in ("step", "unscale_ first", "with a clip"):
        model = nn.Linear(2, ranks, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        found[how] = _headroom(model, how, ranks)
    return found


def _headroom(model: nn.Module, how: str, rows: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = AdaptiveClip(0.01) if how == "with a clip" else None
    scaler = gradilocks.GradScaler("cpu", policy=HeadroomScale(), clip=clip)
    factors = torch.ones(rows)
    factors[-1] = 4.0
    scales = []
    for _ in range(3):
        scaler.scale((model(torch.ones(1, 2)) * factors).sum()).backward()
        if how == "unscale_ first":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def only_one_rank_is_clipped(rank: int) -> dict[str, Any]:
    """Rank 0 has all that passes a bound, and every rank says that the step was clipped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    sharded = _on(mesh, [[Shard(0)]])
    value = torch.full((9, 6), 0.1)
    value[0] = 5.0
    found: dict[str, Any] = {}
    for name, clip in {
        "value": ClipByValue(1.0),
        "rows": AdaptiveClip(0.5),
        "tensors": ClipPerTensor(4.0),
        "nobody": ClipByValue(6.0),
    }.items():
        for how in ("control", "scaler", "stages"):
            param = nn.Parameter(sharded("a.weight", torch.ones(9, 6)))
            param.grad = sharded("a.weight", value)
            told: dict[str, Any] = {}
            if how == "stages":
                param = nn.Parameter(torch.ones(9, 6))
                param.grad = (value if rank == 0 else value[1:2].expand(9, 6)).clone()
                told = {"mesh": mesh, "distinct": ("pp",)}
            optimizer = torch.optim.SGD([param], lr=0.0)
            outcome: Any
            if how == "scaler":
                scaler = gradilocks.GradScaler("cpu", init_scale=1.0, clip=clip)
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
                outcome = scaler.outcome
            else:
                control = gradilocks.GradientControl(optimizer, scale=None, clip=clip, **told)
                outcome = control.step()
            found[f"{how}, {name}"] = outcome.clipped
    return found


def summands_and_copies(rank: int) -> dict[str, Any]:
    """Partial gradients, plain copies beside shards, sparse rows of a copy, a gradient laid out
    otherwise than its parameter, and a rank that lacks one: the units of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    weights, grads = _weights(), _gradients(0)
    params = {
        name: nn.Parameter(_on(mesh, [placement])(name, weights[name]))
        for name, placement in (
            ("a.weight", [Shard(0)]),
            ("b.weight", [Replicate()]),
            ("c.weight", [Shard(0)]),
            ("head.weight", [Shard(0)]),
        )
    }
    params["b.kernel"] = nn.Parameter(weights["b.kernel"].clone())
    params["plain"] = nn.Parameter(weights["a.weight"].clone())
    for name in ("a.weight", "b.weight"):
        params[name].grad = DTensor.from_local(grads[name] / ranks, mesh, [Partial()])
    params["c.weight"].grad = _on(mesh, [[Shard(1)]])("c.weight", grads["c.weight"])
    params["head.weight"].grad = _on(mesh, [[Shard(0)]])("head.weight", grads["head.weight"])
    if rank == ranks - 1:  # Its rows have no gradient, and other ranks' rows are as they were.
        params["head.weight"].grad = None
    params["b.kernel"].grad = grads["b.kernel"].clone()
    rows = torch.tensor([[4, 1]])
    params["plain"].grad = torch.sparse_coo_tensor(
        rows, grads["a.weight"][rows[0]], (9, 6), check_invariants=False
    )
    control = gradilocks.GradientControl(
        _Still(list(params.values()), lr=1.0), scale=None, clip=AdaptiveClip(0.3)
    )
    outcome = control.step()
    left: dict[str, Any] = {}
    for name, param in params.items():
        grad: Any = param.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:
            left[name] = grad.to_dense()
        elif name == "head.weight":
            left[name] = grad.to_local()
        else:
            left[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return {"clipped": outcome.clipped, "left": left}


class _Still(torch.optim.SGD):
    """Leaves the parameters alone: torch cannot add a gradient that lies otherwise than they do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def _clipped_by_rows(weights: Tensor, grads: Tensor, clipping: float) -> Tensor:
    """As the paper has it, in float64."""
    dims = tuple(range(1, grads.dim()))
    lengths = grads.double().square().sum(dims, keepdim=True).sqrt()
    bound = clipping * weights.double().square().sum(dims, keepdim=True).sqrt().clamp(min=1e-3)
    factor = torch.where(lengths > bound, bound / lengths, 1.0)
    return (grads.double() * factor).float()


def how_often_ranks_meet(rank: int) -> dict[str, list[str]]:
    """The collectives of a second step, with how many numbers each rank gives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    placed = _on(mesh, [[Shard(0)], [Shard(1)]])
    found: dict[str, list[str]] = {}
    for how in ("control", "scaler"):
        for policy in ("per tensor 2", "AdaGC", "adaptive", "adaptive, AdaGC"):
            counted: list[str] = []
            with pytest.MonkeyPatch.context() as patch:
                for name in ("all_gather", "all_reduce", "broadcast", "all_gather_object"):
                    patch.setattr(dist, name, _counting(name, getattr(dist, name), counted))

                def forget(_: dict[str, Tensor], counted: list[str] = counted) -> None:
                    counted.clear()  # Before the step that is looked at.

                _trained(how, POLICIES[policy], placed, spoil=forget, steps=BAD_STEP + 1)
            found[f"{how}, {policy}"] = counted
    return found


def _counting(name: str, real: Any, counted: list[str]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        given = args[1] if name == "all_gather" else args[0]
        counted.append(f"{name} of {given.numel()}" if isinstance(given, Tensor) else name)
        return real(*args, **kwargs)

    return counting


def _added_to(placed: Callable[[Tensor], Tensor], come_by: str) -> list[Any]:
    """What AdaGC knows of two parameters, and of one that is added after they were loaded, or bound
    anew: before its first step, and after."""

    def made() -> tuple[Any, Any]:
        model = nn.Module()
        for name in "abc":
            model.register_parameter(name, nn.Parameter(placed(torch.ones(4, 2))))
        clip = AdaGC(warmup=1, warmup_norm=1e9)
        optimizer = torch.optim.SGD([model.a, model.b], lr=0.0, foreach=False)
        return model, gradilocks.GradientControl(optimizer, model=model, scale=None, clip=clip)

    def step(model: Any, control: Any, factor: float) -> None:
        for number, param in enumerate(model.parameters()):
            param.grad = placed(torch.full((4, 2), factor * 10.0**number))
        control.step()

    def told(control: Any) -> dict[str, float]:
        saved = control.state_dict()["gradilocks"]
        names = [name for name, _ in saved["clip_parameters"]]
        usual = [math.inf if each is None else each for each in saved["clip_state"]["usual"]]
        return dict(zip(names, usual, strict=True))

    model, control = made()
    for _ in range(3):
        step(model, control, 1.0)
    if come_by == "loaded":
        saved = control.state_dict()
        model, control = made()
        control.load_state_dict(saved)
    if come_by == "bound":
        control.bind(torch.optim.SGD([model.b, model.a], lr=0.0, foreach=False))
    control.optimizers[0].add_param_group({"params": [model.c]})
    between = told(control)
    step(model, control, 2.0)
    return [between, told(control)]


COME_BY = ("as it is", "loaded", "bound")


def added_later(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        come_by: _added_to(lambda value: distribute_tensor(value, mesh, [Shard(0)]), come_by)
        for come_by in COME_BY
    }


@pytest.fixture(scope="module", params=[2, 4])
def returned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    programs: list[Any] = [layouts, stages, summands_and_copies, how_often_ranks_meet]
    programs += [patterns_that_fit_nobody, headroom_of_fsdp2, only_one_rank_is_clipped]
    programs += [added_later]
    if request.param == 4:
        programs += [two_models, wrapped]
    return run_all(programs, tmp_path_factory.mktemp("policies"), ranks=request.param)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], list[Any]]:
    """What one process does, by driver and policy."""
    return {
        (how, policy): _trained(how, settings, _as_it_is, spoil=_spoil_one)
        for how in ("control", "scaler", "unscaling")
        for policy, settings in POLICIES.items()
        if how != "unscaling" or policy in APART
    }


def test_a_pattern_that_fits_no_ranks_parameters_is_refused_by_all(
    returned: dict[str, list[Any]],
) -> None:
    for told in returned["patterns_that_fit_nobody"]:
        assert told.startswith("exclude: 'haed.*' fits no parameter")


def test_a_parameter_that_is_added_later_starts_afresh_and_the_others_go_on(
    returned: dict[str, list[Any]],
) -> None:
    for come_by in COME_BY:
        expected = _added_to(lambda value: value, come_by)
        assert set(expected[0]) == set(expected[1]) == set("abc")
        for found in returned["added_later"]:
            for mine, one in zip(found[come_by], expected, strict=True):
                assert mine == pytest.approx(one, rel=1e-6)


def test_a_scaler_over_fsdp2_finds_one_headroom(returned: dict[str, list[Any]]) -> None:
    every = returned["headroom_of_fsdp2"]
    for found in every:
        for how, scales in found.items():
            assert scales == [512.0] * 3  # Of 1 alone it would be 2048.
            assert scales == _headroom(nn.Linear(2, len(every), bias=False), how, len(every))


def test_every_rank_says_whether_a_step_was_clipped_on_any(
    returned: dict[str, list[Any]],
) -> None:
    for found in returned["only_one_rank_is_clipped"]:
        assert found == {case: not case.endswith("nobody") for case in found}


def _assert_same(found: list[Any], expected: list[Any], policy: str, where: object) -> None:
    order = getattr(POLICIES[policy]["clip"], "order", 2.0)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        if order == 3.0:  # Cubes are added in another order.
            assert mine == pytest.approx(theirs, rel=1e-12), where
        else:
            assert mine == theirs, where
    for name, value in found[1].items():
        if order == 3.0:
            torch.testing.assert_close(value, expected[1][name], rtol=1e-6, atol=0.0)
        else:
            assert torch.equal(value, expected[1][name]), (where, name)


def test_every_policy_does_what_it_does_in_one_process(
    returned: dict[str, list[Any]], alone: dict[tuple[str, str], list[Any]]
) -> None:
    for rank, found in enumerate(returned["layouts"]):
        for (way, how, policy), came in found.items():
            _assert_same(came, alone[how, policy], policy, (rank, way, how, policy))


def test_stages_of_a_pipeline_do_together_what_one_process_does(
    returned: dict[str, list[Any]], alone: dict[tuple[str, str], list[Any]]
) -> None:
    for rank, found in enumerate(returned["stages"]):
        for (way, policy), came in found.items():
            assert len(came[1]) in (3, 6)
            _assert_same(came, alone["control", policy], policy, (rank, way, policy))


def test_in_one_process_every_policy_has_something_to_do(
    alone: dict[tuple[str, str], list[Any]],
) -> None:
    for where, (seen, _) in alone.items():
        assert [skipped and not rejected for skipped, rejected, *_ in seen][BAD_STEP], where
        assert any(clipped for _, _, clipped, *_ in seen), where
        assert not all(skipped for skipped, *_ in seen), where


def test_two_models_on_two_halves_wait_for_nobody_else(returned: dict[str, list[Any]]) -> None:
    for rank, found in enumerate(returned.get("two_models", [])):
        for policy, came in found.items():
            number = rank // 2
            steps = {"steps": STEPS - number, "seed": number}
            settings = POLICIES[policy]
            expected = _trained("scaler", settings, _as_it_is, spoil=_spoil_one, **steps)
            _assert_same(came, expected, policy, (rank, policy))


def test_rows_that_lie_in_strides_are_known_and_clipped(returned: dict[str, list[Any]]) -> None:
    alone = {how: _stepped(how, _Layers(), {}) for how in ("control", "scaler")}
    assert all(clipped for seen, _ in alone.values() for clipped, _ in seen)
    for found in returned.get("wrapped", []):
        assert len(found["strided"]) == 1
        assert found["rows"] == {"up.weight": True, "head.weight": True}
        for how, (seen, params) in alone.items():
            assert found[how][0] == [pytest.approx(each, rel=1e-6) for each in seen]
            for name, value in params.items():  # The products of the layers are rounded otherwise.
                torch.testing.assert_close(found[how][1][name], value, rtol=1e-5, atol=1e-6)


def test_units_of_summands_copies_and_sparse_rows_are_whole(
    returned: dict[str, list[Any]],
) -> None:
    every = returned["summands_and_copies"]
    weights, grads = _weights(), _gradients(0)
    rows = math.ceil(33 / len(every))
    for rank, found in enumerate(every):
        assert found["clipped"]
        for name in ("a.weight", "b.weight", "b.kernel", "c.weight"):
            expected = _clipped_by_rows(weights[name], grads[name], 0.3)
            torch.testing.assert_close(found["left"][name], expected, rtol=1e-6, atol=0.0)
        head = _clipped_by_rows(weights["head.weight"], grads["head.weight"], 0.3)
        if rank < len(every) - 1:
            mine = head[rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(found["left"]["head.weight"], mine, rtol=1e-6, atol=0.0)
        sparse = torch.zeros(9, 6)
        at = torch.tensor([1, 4])
        sparse[at] = _clipped_by_rows(weights["a.weight"][at], grads["a.weight"][at], 0.3)
        torch.testing.assert_close(found["left"]["plain"], sparse, rtol=1e-6, atol=0.0)


def test_one_further_collective_for_policies_that_bound_tensors_or_rows_apart(
    returned: dict[str, list[Any]],
) -> None:
    units = sum(shape[0] if len(shape) > 1 else 1 for shape in SHAPES.values())
    for found in returned["how_often_ranks_meet"]:
        for how in ("control", "scaler"):
            assert [each.split()[0] for each in found[f"{how}, per tensor 2"]] == ["all_gather"] * 2
            assert found[f"{how}, per tensor 2"][1] == f"all_gather of {2 * len(SHAPES)}"
            assert found[f"{how}, AdaGC"][1:] == [f"all_gather of {3 * len(SHAPES)}"]
            assert found[f"{how}, adaptive"][1:] == [f"all_reduce of {2 * units}"]
            both = 2 * units + len(SHAPES)
            assert found[f"{how}, adaptive, AdaGC"][1:] == [f"all_reduce of {both}"]
