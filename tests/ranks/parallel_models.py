"""Small models in the hands of every parallelism of torch, each as its users set it up.

Each function takes this rank and returns a `Run`, or None on a rank that has nothing to do. `CASES`
lists them by name. They are written for four ranks, and those of `ANY_NUMBER` for 2 and 8 as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks.against_one_process import BAD_STEP, Run, adamw, factor

__all__ = ["ANY_NUMBER", "CASES"]

Case = Callable[[int], Run | None]
CPU = torch.device("cpu")


class Block(nn.Module):
    """Rows that do not divide by the number of ranks, and fewer of them than there are ranks."""

    def __init__(self, width: int = 8, hidden: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Block()
        self.head = nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.gain  # type: ignore[no-any-return]


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def mesh_of(shape: Sequence[int], names: Sequence[str]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))


def line() -> Any:
    return mesh_of((dist.get_world_size(),), ("dp",))


def grid(*names: str) -> Any:
    """Two dimensions, the second of two ranks."""
    return mesh_of((dist.get_world_size() // 2, 2), names)


def batch(step: int, part: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(*(shape or (4, 8)), generator=generator)


def loss_of(model: Any, step: int, part: int, *shape: int) -> Tensor:
    return model(batch(step, part, *shape)).square().mean() * factor(step)


def by_loss(model: Any, part: int, *shape: int) -> Callable[[Any, int], None]:
    """The backward pass of a model whose ranks see different data."""

    def backward(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, part, *shape))

    return backward


def spoiler(model: Any, bad: bool, name: str | None = None) -> Callable[[], None]:
    """Writes Inf into the first gradient, or that of `name`, that has elements on a bad rank."""

    def spoil() -> None:
        named = model.named if isinstance(model, Run) else model.named_parameters()
        for path, param in named:
            grad: Any = param.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            if bad and local is not None and local.numel() and name in (None, path):
                with torch.no_grad():
                    local.view(-1)[0] = math.inf
                return

    return spoil


def is_last(rank: int) -> bool:
    return rank == dist.get_world_size() - 1


def over(model: Any, rank: int, backward: Any = None, **given: Any) -> Run:
    """One model under one optimizer, whose ranks see different data."""
    return Run(
        model,
        [adamw(model.parameters())],
        backward or by_loss(model, rank),
        overflow=spoiler(model, is_last(rank)),
        **given,
    )


# Data parallel.


def ddp(rank: int) -> Run:
    """Two micro-batches, the first without communication; the last rank's loss overflows."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(seeded(Net))

    def backward(control: Any, step: int) -> None:
        bad = math.inf if step == BAD_STEP and is_last(rank) else 1.0
        with model.no_sync():
            control.backward(loss_of(model, step, 2 * rank) / 2)
        control.backward(loss_of(model, step, 2 * rank + 1) / 2 * bad)

    return Run(model, [adamw(model.parameters())], backward)


def ddp_compiled_and_checkpointed(rank: int) -> Run:
    """Wrappers inside wrappers: none of them is in a culprit's name."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.nn.parallel import DistributedDataParallel

    net = seeded(Net)
    net.body = torch.compile(checkpoint_wrapper(net.body), backend="eager")
    model = DistributedDataParallel(net)

    def backward(control: Any, step: int) -> None:
        bad = math.inf if step == BAD_STEP and is_last(rank) else 1.0
        control.backward(loss_of(model, step, rank) * bad)

    return Run(model, [adamw(model.parameters())], backward)


def zero(rank: int) -> Run:
    """Every rank has all gradients, and steps its share of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(seeded(Net))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )

    def backward(control: Any, step: int) -> None:
        bad = math.inf if step == BAD_STEP and is_last(rank) else 1.0
        control.backward(loss_of(model, step, rank) * bad)

    return Run(model, [optimizer], backward)


# FSDP2.


def fsdp2(rank: int) -> Run:
    """Nested; most shards are uneven, some empty. Two micro-batches, one reduction."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = seeded(Net), line()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def backward(control: Any, step: int) -> None:
        model.set_requires_gradient_sync(False)
        control.backward(loss_of(model, step, 2 * rank) / 2)
        model.set_requires_gradient_sync(True)
        control.backward(loss_of(model, step, 2 * rank + 1) / 2)

    return over(model, rank, backward)


def fsdp2_that_stays_whole(rank: int) -> Run:
    """Parameters are not cut again after forward, nor after backward."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = seeded(Net), line()
    fully_shard(model.body, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    run = over(model, rank)
    run.overflow = spoiler(run, is_last(rank))  # The model names other tensors now.
    return run


def fsdp2_along_columns(rank: int) -> Run:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model = seeded(Net)
    fully_shard(
        model,
        mesh=line(),
        shard_placement_fn=lambda p: Shard(1) if p.shape[1:] == (8,) else None,
    )
    return over(model, rank)


def hsdp(rank: int) -> Run:
    from torch.distributed.fsdp import fully_shard

    model, mesh = seeded(Net), grid("replicate", "shard")
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return over(model, rank)


def fsdp2_offloaded(rank: int) -> Run:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = seeded(Net)
    fully_shard(model, mesh=line(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return over(model, rank)


def fsdp2_compiled(rank: int) -> Run:
    from torch.distributed.fsdp import fully_shard

    model, mesh = seeded(Net), line()
    fully_shard(model, mesh=mesh)
    model = torch.compile(model, backend="eager")
    return over(model, rank)


# Tensor parallel.


def _tensor_plan(sequence: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    if not sequence:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }


class Feed(nn.Module):
    """A block over (batch, sequence, width) without a residual, and a norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _tensor_parallel(mesh: Any, *, sequence: bool, seed: int = 0) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    model: nn.Module = seeded(Feed, seed)
    return parallelize_module(model, mesh, _tensor_plan(sequence))


def tp(rank: int) -> Run:
    """The norm is outside the plan: a plain tensor that every rank holds."""
    model = _tensor_parallel(mesh_of((dist.get_world_size(),), ("tp",)), sequence=False)
    return over(model, rank, by_loss(model, 0, 2, 8, 8))


def sequence_parallel(rank: int) -> Run:
    """The norm's weight gets a Partial gradient: each rank has seen a piece of the sequence."""
    world = dist.get_world_size()
    model = _tensor_parallel(mesh_of((world,), ("tp",)), sequence=True)

    def backward(control: Any, step: int) -> None:
        piece = batch(step, 0, 2, 8, 8).chunk(world, dim=1)[rank]
        control.backward(model(piece).square().mean() * factor(step))

    return Run(
        model,
        [adamw(model.parameters())],
        backward,
        overflow=spoiler(model, is_last(rank), "up.weight"),
    )


def _average(model: Any, group: Any) -> None:
    """Data parallel by hand, on whatever of the gradients is here."""
    for param in model.parameters():
        if param.grad is not None:
            grad: Any = param.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            dist.all_reduce(local, group=group)
            local.div_(dist.get_world_size(group))


def tp_inside_dp(rank: int) -> Run:
    mesh = grid("dp", "tp")
    model = _tensor_parallel(mesh["tp"], sequence=False)

    def backward(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, rank // 2, 2, 8, 8))
        _average(model, mesh["dp"].get_group())

    return over(model, rank, backward, told={"mesh": mesh})


def fsdp2_over_tp(rank: int) -> Run:
    """The norm lies along dp alone, the rest along both: by _StridedShard where rows meet rows."""
    from torch.distributed.fsdp import fully_shard

    mesh = grid("dp", "tp")
    model = _tensor_parallel(mesh["tp"], sequence=False)
    fully_shard(model, mesh=mesh["dp"])
    return over(model, rank, by_loss(model, rank // 2, 2, 8, 8), told={"mesh": mesh})


def hsdp_over_tp(rank: int) -> Run:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((dist.get_world_size() // 4, 2, 2), ("replicate", "shard", "tp"))
    model = _tensor_parallel(mesh["tp"], sequence=False)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return over(model, rank, by_loss(model, rank // 2, 2, 8, 8), told={"mesh": mesh})


# Gradients laid out by hand.


def _given(
    placed: Mapping[str, tuple[Any, Sequence[Any], tuple[int, ...]]], seed: int = 0
) -> tuple[nn.ParameterDict, Callable[[Any, int], None]]:
    """Parameters by name: a mesh, placements and a shape; the same random gradients everywhere."""
    from torch.distributed.tensor import distribute_tensor

    def made(number: int, step: int, shape: tuple[int, ...]) -> Tensor:
        return batch(step, seed + number, *shape)

    params = nn.ParameterDict()
    for number, (name, (mesh, placements, shape)) in enumerate(placed.items()):
        value = made(number, 99, shape)
        params[name] = nn.Parameter(
            value if mesh is None else distribute_tensor(value, mesh, placements)
        )

    def backward(control: Any, step: int) -> None:
        control.scale_loss(torch.ones((), requires_grad=True))
        for number, (name, (mesh, placements, shape)) in enumerate(placed.items()):
            grad = made(number, step, shape) * factor(step) * control.scale
            params[name].grad = grad if mesh is None else distribute_tensor(grad, mesh, placements)

    return params, backward


def both_orders_of_a_grid(rank: int) -> Run:
    from torch.distributed.tensor import Replicate, Shard

    mesh = grid("dp", "tp")
    params, backward = _given(
        {
            "a": (mesh, [Replicate(), Shard(0)], (5, 3)),
            "b": (mesh, [Shard(0), Replicate()], (5, 3)),
            "c": (mesh, [Shard(0), Shard(1)], (5, 3)),
            "d": (mesh, [Replicate(), Replicate()], (7,)),
            "e": (mesh, [Shard(1), Shard(0)], (1, 9)),
        }
    )
    return over(params, rank, backward)


def a_half_with_the_rest_idle(rank: int) -> Run | None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    half = dist.get_world_size() // 2
    mesh = DeviceMesh("cpu", list(range(half)))
    if rank >= half:
        return None
    params, backward = _given({"a": (mesh, [Shard(0)], (5, 3)), "b": (mesh, [Replicate()], (4,))})
    run = over(params, rank, backward, told={"mesh": mesh}, group=mesh.get_group())
    run.overflow = spoiler(params, rank == half - 1)
    return run


def two_models_on_two_halves(rank: int) -> Run:
    from torch.distributed.tensor import Shard

    world = dist.get_world_size()
    mesh = mesh_of((2, world // 2), ("model", "part"))
    half, group = rank // (world // 2), mesh["part"].get_group()
    params, backward = _given(
        {"a": (mesh["part"], [Shard(0)], (5, 3)), "b": (mesh["part"], [Shard(0)], (4,))},
        seed=50 * half,
    )
    run = over(params, rank, backward, told={"process_group": group}, group=group)
    run.overflow = spoiler(params, rank % (world // 2) == world // 2 - 1)
    return run


def two_optimizers_on_two_meshes(rank: int) -> Run:
    from torch.distributed.tensor import Replicate, Shard

    first, second = line(), grid("dp", "tp")
    params, backward = _given(
        {
            "a": (first, [Shard(0)], (5, 3)),
            "b": (second, [Shard(0), Replicate()], (8,)),
            "c": (second, [Shard(0), Shard(1)], (3, 4)),
        }
    )
    run = over(params, rank, backward)
    run.optimizers = [adamw([params["a"]]), adamw([params["b"], params["c"]])]
    return run


# Experts.


def experts_on_all_ranks(rank: int) -> Run:
    """Dense tensors along one dimension of all ranks, experts along two of the same ranks."""
    from torch.distributed.tensor import Shard

    dense, experts = line(), grid("efsdp", "ep")
    params, backward = _given(
        {
            "dense": (dense, [Shard(0)], (5, 3)),
            "experts": (experts, [Shard(1), Shard(0)], (4, 8, 3)),
        }
    )
    return over(params, rank, backward)


def experts_on_stripes(rank: int) -> Run:
    """Experts along ep, the same ones on every stripe; dense tensors along all ranks."""
    from torch.distributed.tensor import Shard

    world = grid("dp", "ep")
    params, backward = _given(
        {
            "dense": (line(), [Shard(0)], (5, 3)),
            "router": (None, (), (6,)),
            "experts": (world["ep"], [Shard(0)], (4, 6, 3)),
        }
    )
    return over(params, rank, backward, told={"mesh": world})


class Experts(nn.Module):
    """A router that all ranks hold, and this rank's expert, if it has one."""

    def __init__(self, expert: int | None) -> None:
        super().__init__()
        self.router = seeded(lambda: nn.Linear(8, 8))
        if expert is not None:
            self.expert = seeded(lambda: nn.Linear(8, 8), 7 + expert)

    def forward(self, x: Tensor, *, tokens: bool = True) -> Tensor:
        x = torch.tanh(self.router(x))
        return self.expert(x) if tokens and hasattr(self, "expert") else x  # type: ignore[no-any-return]


def plain_experts(rank: int) -> Run:
    """An expert on two ranks each, which get no token in two of the steps."""
    pairs, world = grid("dp", "ep"), dist.get_world_size()
    expert = rank % 2
    model = Experts(expert)

    def backward(control: Any, step: int) -> None:
        tokens = step not in (2, 5) or expert == 0
        control.backward(model(batch(step, rank), tokens=tokens).square().mean() * factor(step))
        _average(model.router, None)
        _average(model.expert, pairs["dp"].get_group())

    return over(
        model,
        rank,
        backward,
        told={"copies": lambda name, param: world if "router" in name else world // 2},
        key=lambda name: name if "router" in name else (expert, name),
    )


def plain_experts_told_by_a_mesh(rank: int) -> Run:
    """The same, by mesh= and distinct=, with copies= for what all hold."""
    run, world = plain_experts(rank), dist.get_world_size()
    run.told = {
        "mesh": grid("dp", "ep"),
        "distinct": ("ep",),
        "copies": lambda name, param: world if "router" in name else None,
    }
    return run


def a_rank_without_experts(rank: int) -> Run:
    """Every rank but the first has an expert of its own."""
    world = dist.get_world_size()
    model = Experts(rank if rank else None)

    def backward(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, rank))
        _average(model.router, None)

    return over(
        model,
        rank,
        backward,
        told={"copies": lambda name, param: world if "router" in name else 1},
        key=lambda name: name if "router" in name else (rank, name),
    )


# Pipelines.


def _layer(number: int) -> nn.Module:
    module: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), number)
    return module


def _pipeline(
    rank: int,
    mesh: Any,
    schedule: str,
    *,
    prepare: Callable[[nn.Module], object] = lambda layer: None,
    part: int = 0,
    after: Callable[[Any], None] = lambda model: None,
    layers: int = 4,
) -> Run:
    """Layers on the stages of mesh["pp"], by one of torch's schedules."""
    from torch.distributed import pipelining

    group = mesh["pp"].get_group()
    place, count = dist.get_rank(group), dist.get_world_size(group)
    interleaved = schedule not in ("ScheduleGPipe", "Schedule1F1B")
    total = 2 * count if interleaved else count
    share = max(layers // total, 1)
    mine = [place, place + count] if interleaved else [place]
    parts = {}
    for stage in mine:
        module = nn.Sequential(*map(_layer, range(stage * share, (stage + 1) * share)))
        for each in module:
            prepare(each)
        parts[f"stage{stage}"] = module
    stages = [
        pipelining.PipelineStage(module, stage, total, CPU, group=group)
        for stage, module in zip(mine, parts.values(), strict=True)
    ]
    model = nn.ModuleDict(parts)
    made: list[Any] = []
    now = [0]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() * factor(now[0])

    def begun(control: Any) -> None:
        kind = getattr(pipelining, schedule)
        given = stages if interleaved else stages[0]
        made.append(kind(given, max(4, count), loss_fn=control.loss_fn(loss_fn)))

    def backward(control: Any, step: int) -> None:
        now[0] = step
        inputs, targets = batch(step, 2 * part, 8, 8), batch(step, 2 * part + 1, 8, 8)
        last = place == count - 1
        made[0].step(*([] if place else [inputs]), **({"target": targets} if last else {}))
        after(model)

    return Run(
        parts,
        [adamw(model.parameters())],
        backward,
        overflow=spoiler(model, is_last(rank)),
        begun=begun,
        told={"mesh": mesh, "distinct": ("pp",)},
    )


def pipeline(rank: int) -> Run:
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    return _pipeline(rank, mesh, "ScheduleGPipe", layers=dist.get_world_size())


def pipeline_by_group(rank: int) -> Run:
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    run = _pipeline(rank, mesh, "Schedule1F1B", layers=dist.get_world_size())
    run.told = {"process_group": mesh["pp"].get_group()}
    return run


def interleaved_pipeline(rank: int) -> Run:
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    return _pipeline(rank, mesh, "ScheduleInterleaved1F1B", layers=2 * dist.get_world_size())


def looped_pipeline(rank: int) -> Run:
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    return _pipeline(rank, mesh, "ScheduleLoopedBFS", layers=2 * dist.get_world_size())


def zero_bubble_pipeline(rank: int) -> Run:
    """The schedule computes gradients of inputs first and those of weights later."""
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    return _pipeline(rank, mesh, "ScheduleInterleavedZeroBubble", layers=2 * dist.get_world_size())


def pipeline_in_dp(rank: int) -> Run:
    mesh = grid("dp", "pp")
    return _pipeline(
        rank,
        mesh,
        "Schedule1F1B",
        part=rank // 2,
        after=lambda model: _average(model, mesh["dp"].get_group()),
    )


def pipeline_of_fsdp2(rank: int) -> Run:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, dist.get_world_size() // 2), ("pp", "dp"))
    return _pipeline(
        rank,
        mesh,
        "Schedule1F1B",
        part=mesh["dp"].get_local_rank(),
        prepare=lambda layer: fully_shard(layer, mesh=mesh["dp"]),
    )


def interleaved_pipeline_of_fsdp2(rank: int) -> Run:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, dist.get_world_size() // 2), ("pp", "dp"))
    run = _pipeline(
        rank,
        mesh,
        "ScheduleInterleaved1F1B",
        part=mesh["dp"].get_local_rank(),
        prepare=lambda layer: fully_shard(layer, mesh=mesh["dp"]),
    )
    run.told = {"process_group": mesh["pp"].get_group()}
    return run


def pipeline_of_tp(rank: int) -> Run:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = mesh_of((2, dist.get_world_size() // 2), ("pp", "tp"))
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    return _pipeline(
        rank,
        mesh,
        "ScheduleGPipe",
        prepare=lambda layer: parallelize_module(layer, mesh["tp"], plan),  # type: ignore[arg-type]
    )


def _tied(rank: int, run: Run, mesh: Any) -> Run:
    """The first layer of the first stage and the last of the last are one tensor."""
    group = mesh["pp"].get_group()
    place, count = dist.get_rank(group), dist.get_world_size(group)
    mine = place in (0, count - 1)
    (module,) = run.model.values()
    weight = module[0 if place == 0 else -1][0].weight
    name = next(name for name, param in run.named if param is weight) if mine else ""
    ends: Any = None
    for pipe in _pipes(mesh):  # All ranks make all groups, as torch demands.
        made = dist.new_group([pipe[0], pipe[-1]])
        ends = made if rank in pipe else ends
    local: Any = weight.to_local() if hasattr(weight, "to_local") else weight
    if mine:
        with torch.no_grad():
            dist.broadcast(local, dist.get_process_group_ranks(group)[0], group=ends)
    plain = run.backward

    def backward(control: Any, step: int) -> None:
        plain(control, step)
        if mine:
            grad: Any = weight.grad
            dist.all_reduce(grad.to_local() if hasattr(grad, "to_local") else grad, group=ends)

    run.backward = backward
    run.key = lambda each: "tied" if mine and each == name else each
    run.told["copies"] = lambda each, param: 0 if place == count - 1 and each == name else None
    return run


def _pipes(mesh: Any) -> list[list[int]]:
    """The ranks of every pipeline of a mesh whose first or only dimension is pp."""
    ranks = mesh.mesh.reshape(mesh.mesh.shape[0], -1)
    return ranks.T.tolist()  # type: ignore[no-any-return]


def tied_embeddings(rank: int) -> Run:
    mesh = mesh_of((dist.get_world_size(),), ("pp",))
    run = _pipeline(rank, mesh, "Schedule1F1B", layers=2 * dist.get_world_size())
    return _tied(rank, run, mesh)


def tied_embeddings_of_fsdp2(rank: int) -> Run:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, dist.get_world_size() // 2), ("pp", "dp"))
    run = _pipeline(
        rank,
        mesh,
        "Schedule1F1B",
        part=mesh["dp"].get_local_rank(),
        prepare=lambda layer: fully_shard(layer, mesh=mesh["dp"]),
    )
    return _tied(rank, run, mesh)


# FSDP1.


def _fsdp1(rank: int, strategy: str, *, original: bool, ignored: bool = False) -> Run:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    net = seeded(Net)
    given: dict[str, Any] = {}
    hybrid = strategy.startswith("HYBRID")
    if hybrid:
        given["device_mesh"] = grid("replicate", "shard")
    if ignored:
        given["ignored_modules"] = [net.body.norm]
    if not ignored:
        net.body = FullyShardedDataParallel(
            net.body,
            device_id=CPU,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original,
            **given,
        )
    model: Any = FullyShardedDataParallel(
        net,
        device_id=CPU,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        **given,
    )
    shard = dist.get_rank(model.process_group)

    def is_ignored(name: str) -> bool:
        return ignored and name.startswith("body.norm.")

    def backward(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, rank))
        if ignored:
            _average(net.body.norm, None)

    told: dict[str, Any] = {"process_group": model.process_group}
    whole, world = strategy == "NO_SHARD", dist.get_world_size()
    if ignored:
        told["copies"] = lambda name, param: world if is_ignored(name) else 1
    elif whole:
        told["copies"] = world
    run = over(model, rank, backward, told=told)
    if hybrid:  # A copy decides by itself, on what the reduction has made the same in all of them.
        run.group = model.process_group
        run.overflow = spoiler(model, shard == dist.get_world_size(run.group) - 1)
    run.key = lambda name: name if whole or is_ignored(name) else (name, shard)
    return run


def _fsdp1_case(strategy: str, *, original: bool, ignored: bool = False) -> Case:
    def case(rank: int) -> Run:
        return _fsdp1(rank, strategy, original=original, ignored=ignored)

    return case


ANY_NUMBER: dict[str, Case] = {
    "DDP with no_sync": ddp,
    "DDP around other wrappers": ddp_compiled_and_checkpointed,
    "ZeroRedundancyOptimizer": zero,
    "FSDP2": fsdp2,
    "FSDP2 that stays whole": fsdp2_that_stays_whole,
    "FSDP2 along columns": fsdp2_along_columns,
    "FSDP2 offloaded": fsdp2_offloaded,
    "FSDP2 compiled": fsdp2_compiled,
    "TP": tp,
    "SequenceParallel": sequence_parallel,
    "a rank without experts": a_rank_without_experts,
    "pipeline": pipeline,
    "pipeline by group": pipeline_by_group,
    "interleaved pipeline": interleaved_pipeline,
    "looped pipeline": looped_pipeline,
    "zero-bubble pipeline": zero_bubble_pipeline,
    "tied embeddings": tied_embeddings,
    **{
        f"FSDP1 {strategy}{'' if original else ', flat'}": _fsdp1_case(strategy, original=original)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        for original in (True, False)
    },
    "FSDP1 with ignored modules": _fsdp1_case("FULL_SHARD", original=True, ignored=True),
}

CASES: dict[str, Case] = {
    **ANY_NUMBER,
    "HSDP": hsdp,
    "TP inside DP": tp_inside_dp,
    "FSDP2 over TP": fsdp2_over_tp,
    "HSDP over TP": hsdp_over_tp,
    "both orders of a grid": both_orders_of_a_grid,
    "a half with the rest idle": a_half_with_the_rest_idle,
    "two models on two halves": two_models_on_two_halves,
    "two optimizers on two meshes": two_optimizers_on_two_meshes,
    "experts on all ranks": experts_on_all_ranks,
    "experts on stripes": experts_on_stripes,
    "plain experts": plain_experts,
    "plain experts told by a mesh": plain_experts_told_by_a_mesh,
    "pipeline in DP": pipeline_in_dp,
    "pipeline of FSDP2": pipeline_of_fsdp2,
    "interleaved pipeline of FSDP2": interleaved_pipeline_of_fsdp2,
    "pipeline of TP": pipeline_of_tp,
    "tied embeddings of FSDP2": tied_embeddings_of_fsdp2,
    "FSDP1 HYBRID_SHARD": _fsdp1_case("HYBRID_SHARD", original=True),
    "FSDP1 HYBRID_SHARD, flat": _fsdp1_case("HYBRID_SHARD", original=False),
}
