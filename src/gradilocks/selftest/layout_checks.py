"""The ways in which models are laid out over ranks, each trained beside one process.

Each function makes a small model in one such way, by torch's own wrappers, as its users do. Sizes
are odd where torch allows it, so that shards are uneven and some are empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradilocks
from gradilocks.selftest.check_result import Found
from gradilocks.selftest.collective_counter import CollectiveCounter
from gradilocks.selftest.training_twin import (
    OVERFLOW_AT,
    STEPS,
    Spread,
    Training,
    is_same,
    train_beside_twin,
)
from gradilocks.selftest.world import World

__all__ = ["LAYOUT_CHECKS", "Needs"]

ORDERS = (2.0, 1.0, math.inf)
LIMIT = 0.05
"""Of the norm: small enough that every step is clipped."""
WIDTH = 6


@dataclass(frozen=True)
class Needs:
    """What a check needs to be run."""

    ranks: int = 1
    even: bool = False
    cuda: bool = False


class Block(nn.Module):
    """A norm and two layers, as a transformer's feed-forward part has."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, hidden)
        self.outer = nn.Linear(hidden, WIDTH)

    def forward(self, data: Tensor) -> Tensor:
        """As long as it is wide."""
        out: Tensor = self.outer(torch.tanh(self.inner(self.norm(data))))
        return out


def _uneven(ranks: int) -> int:
    """How many rows give the last of so many ranks one row, and all others two."""
    return 2 * ranks - 1


def _block(world: World, hidden: int | None = None, seed: int = 1) -> Block:
    torch.manual_seed(seed)
    return Block(hidden or _uneven(world.size)).to(world.device)


def _data(world: World, step: int, share: int = 0, *, batch: int = 2, rows: int = 4) -> Tensor:
    """The batch of one step; another for each share of a data-parallel batch."""
    generator = torch.Generator().manual_seed(1000 * step + share)
    return torch.randn(batch, rows, WIDTH, generator=generator).to(world.device)


def _backward(world: World, model: nn.Module, share: int = 0, rows: int = 4) -> Any:
    def run(control: Any, step: int) -> None:
        control.backward(model(_data(world, step, share, rows=rows)).square().mean())

    return run


# --- data parallel, and shards of one model -------------------------------------------------------


def _ddp(world: World) -> Spread:
    model = nn.parallel.DistributedDataParallel(_block(world))

    def run(control: Any, step: int) -> None:
        data = _data(world, step, world.rank)
        if step == OVERFLOW_AT and world.rank == world.size - 1:
            data = data * math.inf
        control.backward(model(data).square().mean())

    return Spread(model, run, overflow="data", collectives=0)


def _fsdp2(world: World, **how: Any) -> Spread:
    from torch.distributed.fsdp import fully_shard

    model = _block(world)
    fully_shard(model, mesh=world.mesh(("all", world.size)), **how)
    return Spread(model, _backward(world, model, world.rank))


def _offloaded(world: World) -> Spread:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp2(world, offload_policy=CPUOffloadPolicy())


def _hsdp(world: World) -> Spread:
    from torch.distributed.fsdp import fully_shard

    model = _block(world)
    fully_shard(model, mesh=world.mesh(("dp", 2), ("tp", world.size // 2)))
    return Spread(model, _backward(world, model, world.rank))


def _fsdp1(world: World) -> Spread:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(_block(world), device_id=world.device, use_orig_params=False)
    return Spread(
        model,
        _backward(world, model, world.rank),
        told={"process_group": model.process_group},
        key=lambda name: f"{name} of rank {world.rank}",
        parts=dist.group.WORLD,
    )


def _zero(world: World) -> Spread:
    """The optimizer is what is sharded, and tells the others what it has moved."""
    return replace(_ddp(world), collectives=None)


def _either_order(world: World) -> Spread:
    """DTensors whose dimensions are copied and sharded in either order."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = world.mesh(("dp", 2), ("tp", world.size // 2))
    placed: list[Any] = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)]]
    model, rows = nn.ParameterList(), _uneven(world.size)
    for seed, placements in enumerate(placed):
        values = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
        model.append(nn.Parameter(distribute_tensor(values.to(world.device), mesh, placements)))

    def run(control: Any, step: int) -> None:
        control.scale_loss(torch.ones((), device=world.device, requires_grad=True))
        for number, param in enumerate(model):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = torch.randn(rows, 3, generator=generator).to(world.device) * control.scale
            param.grad = distribute_tensor(grad, mesh, placed[number])

    return Spread(model, run)


# --- tensor parallel ------------------------------------------------------------------------------


def _split(block: Block, mesh: Any, *, sequence: bool = False) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    if sequence:
        plan["norm"] = SequenceParallel()
        plan["inner"] = ColwiseParallel(input_layouts=Shard(1))
        entrance = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)
        )
        parallelize_module(block, mesh, entrance)
    parallelize_module(block, mesh, plan)


def _tp(world: World, *, sequence: bool = False) -> Spread:
    model, mesh = _block(world, hidden=2 * world.size), world.mesh(("all", world.size))
    _split(model, mesh, sequence=sequence)
    # The norm's two gradients are summands on each rank, and are summed up first, after a flag that
    # says who has them.
    return Spread(model, _backward(world, model, rows=world.size), collectives=4 if sequence else 1)


def _tp_in_dp(world: World) -> Spread:
    mesh = world.mesh(("dp", 2), ("tp", world.size // 2))
    model = _block(world, hidden=world.size)
    _split(model, mesh["tp"])
    return Spread(model, _backward(world, model), told={"mesh": mesh})


def _fsdp2_tp(world: World) -> Spread:
    """The norm is outside the plan: it lies on the data-parallel ranks alone."""
    from torch.distributed.fsdp import fully_shard

    mesh = world.mesh(("dp", world.size // 2), ("tp", 2))
    model = _block(world, hidden=2 * _uneven(world.size // 2))
    _split(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return Spread(model, _backward(world, model, share=world.rank // 2), told={"mesh": mesh})


# --- a part of the ranks --------------------------------------------------------------------------


def _some_idle(world: World) -> Spread | None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    ranks = list(range(world.size - 1))
    mesh = DeviceMesh(world.device.type, ranks)
    if world.rank not in ranks:
        return None
    model = _block(world, hidden=_uneven(len(ranks)))
    fully_shard(model, mesh=mesh)
    return Spread(
        model,
        _backward(world, model, world.rank),
        told={"process_group": mesh.get_group()},
        ranks=ranks,
    )


def _two_models(world: World) -> Spread:
    from torch.distributed.fsdp import fully_shard

    mesh = world.mesh(("dp", 2), ("tp", world.size // 2))["tp"]
    half = world.rank // (world.size // 2)
    model = _block(world, seed=half)
    fully_shard(model, mesh=mesh)
    return Spread(
        model,
        _backward(world, model, world.rank),
        told={"process_group": mesh.get_group()},
        ranks=[rank for rank in range(world.size) if rank // (world.size // 2) == half],
        team=f"half {half}",
    )


# --- pipelines ------------------------------------------------------------------------------------


def _stage(world: World, stage: int, stages: int, group: Any, schedule: str) -> tuple[Any, Any]:
    """The layer of one stage, and what runs forward and backward through the pipeline."""
    from torch.distributed import pipelining

    torch.manual_seed(stage)
    hidden = _uneven(world.size)
    layers = nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH)
    model = nn.Sequential(*layers).to(world.device)
    made: dict[int, Any] = {}

    def run(control: Any, step: int) -> None:
        if id(control) not in made:
            part = pipelining.PipelineStage(model, stage, stages, world.device, group=group)
            loss = control.loss_fn(lambda output, target: (output - target).square().mean())
            made[id(control)] = getattr(pipelining, schedule)(part, stages, loss_fn=loss)
        data, target = (_data(world, step, share, batch=stages) for share in (0, 99))
        given = {"target": target} if stage == stages - 1 else {}
        made[id(control)].step(*([data] if stage == 0 else []), **given)

    return model, run


def _pp(world: World) -> Spread:
    group = dist.group.WORLD
    model, run = _stage(world, world.rank, world.size, group, "ScheduleGPipe")
    return Spread(
        model,
        run,
        told={"process_group": group},
        key=lambda name: f"stage {world.rank} {name}",
        parts=group,
    )


def _pp_dp(world: World) -> Spread:
    mesh = world.mesh(("dp", 2), ("pp", world.size // 2))
    stage, stages = mesh["pp"].get_local_rank(), world.size // 2
    model, run = _stage(world, stage, stages, mesh["pp"].get_group(), "Schedule1F1B")
    return Spread(
        model,
        run,
        told={"mesh": mesh, "distinct": ("pp",)},
        key=lambda name: f"stage {stage} {name}",
        parts=dist.group.WORLD,
    )


def _pp_fsdp2(world: World) -> Spread:
    from torch.distributed.fsdp import fully_shard

    mesh = world.mesh(("pp", 2), ("dp", world.size // 2))
    stage = mesh["pp"].get_local_rank()
    model, run = _stage(world, stage, 2, mesh["pp"].get_group(), "ScheduleGPipe")
    fully_shard(model, mesh=mesh["dp"])
    return Spread(
        model,
        run,
        told={"mesh": mesh, "distinct": ("pp",)},
        key=lambda name: f"stage {stage} {name}",
        parts=dist.group.WORLD,
    )


# --- experts --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A router that every rank has, and an expert."""

    def __init__(self, seed: int, *, has_expert: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(10 + seed)
        self.expert = nn.Linear(WIDTH, WIDTH) if has_expert else None

    def forward(self, data: Tensor) -> Tensor:
        """Through both; without an expert through the router alone."""
        out: Tensor = self.router(data)
        return out if self.expert is None else self.expert(out)


def _experts_backward(world: World, model: Experts, share: int) -> Any:
    """As a mixture of experts trains: the router's gradient is the mean over all ranks."""

    def run(control: Any, step: int) -> None:
        control.backward(model(_data(world, step, share)).square().mean())
        for param in model.router.parameters():
            dist.all_reduce(param.grad)

    return run


def _experts(world: World, *, each: int = 1, without: int = 0) -> Spread:
    """Plain experts, each on so many ranks; the last ranks may have none."""
    number = world.rank // each
    model = Experts(number, has_expert=world.rank < world.size - without).to(world.device)
    return Spread(
        model,
        _experts_backward(world, model, number),
        told={"copies": lambda name, param: world.size if "router" in name else each},
        key=lambda name: name if "router" in name else f"{name} {number}",
        parts=dist.group.WORLD,
    )


def _experts_on_a_mesh(world: World) -> Spread:
    """Experts sharded over a part of the ranks, which hold them twice, beside dense tensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = world.mesh(("dp", 2), ("ep", world.size // 2))
    model = nn.ParameterDict()
    homes: dict[str, Any] = {
        "dense": (mesh, [Replicate(), Replicate()]),
        "experts": (mesh["ep"], [Shard(0)]),
    }
    for seed, (name, (home, placements)) in enumerate(homes.items()):
        values = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
        model[name] = nn.Parameter(distribute_tensor(values.to(world.device), home, placements))

    def run(control: Any, step: int) -> None:
        control.scale_loss(torch.ones((), device=world.device, requires_grad=True))
        for number, (name, (home, placements)) in enumerate(homes.items()):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = torch.randn(5, WIDTH, generator=generator).to(world.device) * control.scale
            model[name].grad = distribute_tensor(grad, home, placements)

    return Spread(model, run, told={"mesh": mesh})


# --- what is checked ------------------------------------------------------------------------------


def _every_order(make: Callable[[World], Spread | None], world: World) -> Found:
    """Trained with the norms of order 2, 1 and inf: the first is counted, the second watched."""
    found = Found()
    for order in ORDERS:
        spread = make(world)
        if spread is None:
            continue
        training = Training(
            gradilocks.ClipByNorm(LIMIT, order=order),
            counted=order == 2.0,
            watched=order == 1.0,
            order=order,
        )
        train_beside_twin(world, spread, training, found, f"p = {order:g}")
    return found


def _once(
    make: Callable[[World], Spread | None],
    training: Callable[[World], Training],
    world: World,
    *,
    collectives: int | None = 1,
) -> Found:
    found = Found()
    spread = make(world)
    if spread is not None:
        if spread.collectives is not None:
            spread = replace(spread, collectives=collectives)
        train_beside_twin(world, spread, training(world), found, "p = 2")
    return found


def _per_tensor(world: World) -> Training:
    return Training(gradilocks.ClipPerTensor(LIMIT), counted=True)


def _by_zero(world: World) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return Training(
        LIMIT,
        optimizer=lambda params: ZeroRedundancyOptimizer(
            params, torch.optim.AdamW, lr=0.05, foreach=False
        ),
        alone=lambda params: torch.optim.AdamW(params, lr=0.05, foreach=False),
    )


def _by_the_host(world: World) -> Training:
    """Where the optimizer runs on the host, the one wait for the decision is due."""
    return Training(
        LIMIT, optimizer=lambda params: torch.optim.AdamW(params, lr=0.05, foreach=False)
    )


def _headroom(world: World) -> Training:
    return Training(LIMIT, scale=gradilocks.HeadroomScale(init_scale=4.0), counted=True)


def _own_adamw(world: World) -> Training:
    return Training(
        LIMIT,
        optimizer=lambda params: gradilocks.optim.AdamW(params, lr=0.05),
        exact=False,
        counted=True,
        watched=True,
    )


def _recipe(world: World) -> Found:
    """torch's loop over FSDP2 with our names in it, beside torch's own on the whole model."""
    from torch.distributed.fsdp import fully_shard

    found = Found()
    model, whole = _block(world), _block(world)
    fully_shard(model, mesh=world.mesh(("all", world.size)))
    fused = world.device.type == "cuda"
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.05, fused=fused) for each in (model, whole)
    ]
    kind = world.device.type
    ours = gradilocks.GradScaler(kind, init_scale=64.0, growth_interval=2)
    theirs = torch.amp.GradScaler(kind, init_scale=64.0, growth_interval=2)
    seen = []
    for step in range(STEPS):
        ours.scale(model(_data(world, step)).square().mean()).backward()
        theirs.scale(whole(_data(world, step)).square().mean()).backward()
        if step == OVERFLOW_AT:
            _spoil_both(world, model, whole)
        with CollectiveCounter() as counter:
            ours.unscale_(optimizers[0])
            norm: Any = gradilocks.clip_grad_norm_(model.parameters(), LIMIT)
            ours.step(optimizers[0])
            ours.update()
        norm = norm.full_tensor().item()
        theirs.unscale_(optimizers[1])
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), LIMIT).item()
        theirs.step(optimizers[1])
        theirs.update()
        _compare_recipes(step, norm, expected, ours.get_scale(), theirs.get_scale(), found)
        found.numbers["collectives"] = max(found.numbers.get("collectives", 0), counter.total)
        found.numbers["bytes"] = max(found.numbers.get("bytes", 0), counter.bytes_given)
        if counter.total > 2:
            found.problem(f"step {step + 1}: {counter.total} collectives where 2 will do")
        seen.append([norm.hex() if math.isfinite(norm) else "", ours.get_scale()])
        for optimizer in optimizers:
            optimizer.zero_grad()
    for (name, param), alone in zip(model.named_parameters(), whole.parameters(), strict=True):
        mine: Any = param
        if not is_same(mine.full_tensor().detach(), alone.detach(), exact=False):
            found.problem(f"{name} does not end where torch leaves it in one process")
    found.alike["all"] = seen
    return found


def _spoil_both(world: World, model: nn.Module, whole: nn.Module) -> None:
    grad: Any = next(model.parameters()).grad
    if world.rank == 0:  # No empty shard there.
        grad.to_local()[0] = math.inf
    alone: Any = next(whole.parameters()).grad
    alone[0] = math.inf


def _compare_recipes(
    step: int, norm: float, expected: float, scale: float, alone: float, found: Found
) -> None:
    close = math.isclose(norm, expected, rel_tol=1e-5) or not math.isfinite(norm + expected)
    if not close:
        found.problem(f"step {step + 1}: the norm is {norm!r}, by torch {expected!r}")
    if scale != alone:
        found.problem(f"step {step + 1}: the scale is {scale:g}, torch's {alone:g}")


LayoutCheck = tuple[Needs, Callable[[World], Found]]
_FOUR = Needs(4, even=True)


def _laid_out(needs: Needs, make: Callable[..., Spread | None], **how: Any) -> LayoutCheck:
    return needs, partial(_every_order, partial(make, **how))


def _trained(
    needs: Needs, make: Callable[..., Spread | None], training: Any, collectives: int | None = 1
) -> LayoutCheck:
    return needs, partial(_once, make, training, collectives=collectives)


LAYOUT_CHECKS: dict[str, LayoutCheck] = {
    "DDP": _laid_out(Needs(), _ddp),
    "DDP, ZeroRedundancyOptimizer": _trained(Needs(2), _zero, _by_zero),
    "FSDP2": _laid_out(Needs(), _fsdp2),
    "FSDP2, drop-ins": (Needs(), _recipe),
    "FSDP2, per tensor": _trained(Needs(), _fsdp2, _per_tensor, 2),
    "FSDP2, headroom": _trained(Needs(), _fsdp2, _headroom),
    "FSDP2, gradilocks.optim": _trained(Needs(), _fsdp2, _own_adamw),
    "FSDP2, offloaded": _trained(Needs(cuda=True), _offloaded, _by_the_host),
    "HSDP": _laid_out(_FOUR, _hsdp),
    "copies and shards": _laid_out(_FOUR, _either_order),
    "FSDP1": _laid_out(Needs(2), _fsdp1),
    "TP": _laid_out(Needs(2), _tp),
    "TP, sequence parallel": _laid_out(Needs(2), _tp, sequence=True),
    "TP in DP": _laid_out(_FOUR, _tp_in_dp),
    "FSDP2 x TP": _laid_out(_FOUR, _fsdp2_tp),
    "FSDP2, a rank idle": _laid_out(Needs(2), _some_idle),
    "two models": _laid_out(_FOUR, _two_models),
    "PP, process_group=": _laid_out(Needs(2), _pp),
    "PP x DP, distinct=": _laid_out(_FOUR, _pp_dp),
    "PP x FSDP2, distinct=": _laid_out(_FOUR, _pp_fsdp2),
    "experts, copies=": _laid_out(Needs(2), _experts),
    "experts twice, copies=": _laid_out(_FOUR, _experts, each=2),
    "a rank without experts": _laid_out(Needs(2), _experts, without=1),
    "experts on a mesh": _laid_out(_FOUR, _experts_on_a_mesh),
}
"""What it needs, and what runs it, by name."""
