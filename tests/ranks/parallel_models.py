"""Small models under every parallelism of torch, each set up as its users do.

Each function takes a rank and returns that rank's TrainingCase, or None for an idle rank. `CASES` has them by name,
written for 4 or 8 ranks; those of `ANY_SIZE` also for 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from against_one_process import BAD_STEP, TrainingCase, loss_factor, optimizer_for
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import gradilocks

__all__ = ["ANY_SIZE", "CASES"]

Case = Callable[[int], TrainingCase | None]
SEQUENCES = (2, 8, 8)
"""Shape of the input of a FeedForward."""


class Net(nn.Module):
    """Rows that do not divide by the number of ranks, and a parameter with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 8))
        self.head = nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.body(x)) * self.gain  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A block over (batch, sequence, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def mesh_of(shape: Sequence[int], names: Sequence[str]) -> Any:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))


def line(name: str = "dp") -> Any:
    """All ranks along one dimension."""
    return mesh_of((dist.get_world_size(),), (name,))


def grid(*names: str) -> Any:
    """All ranks along two dimensions, the second of two ranks."""
    return mesh_of((dist.get_world_size() // 2, 2), names)


def batch(step: int, part: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 8)), generator=torch.Generator().manual_seed(1000 * step + part))


def loss_of(model: Any, step: int, part: int, *shape: int) -> Tensor:
    return model(batch(step, part, *shape)).square().mean() * loss_factor(step)  # type: ignore[no-any-return]


def is_last(rank: int) -> bool:
    return rank == dist.get_world_size() - 1


def local_of(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def writer_of_inf(model: Any, is_bad_rank: bool, name: str | None = None) -> Callable[[], None]:
    """Writes Inf into the first gradient with elements, or that of `name`, on the bad rank."""

    def write() -> None:
        for path, param in model.named_parameters():
            grad = local_of(param.grad)
            if is_bad_rank and grad is not None and grad.numel() and name in (None, path):
                with torch.no_grad():
                    grad.view(-1)[0] = math.inf
                return

    return write


def average(model: Any, group: Any) -> None:
    """Data parallelism by hand."""
    for param in model.parameters():
        if param.grad is not None:
            grad = local_of(param.grad)
            dist.all_reduce(grad, group=group)
            grad.div_(dist.get_world_size(group))


def case_of(
    model: Any, rank: int, backward: Any = None, *, part: int | None = None, shape: Sequence[int] = (), **given: Any
) -> TrainingCase:
    """A model with one optimizer. Ranks see different data, or those of one `part` the same."""

    def by_loss(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, rank if part is None else part, *shape))

    given.setdefault("write_inf", writer_of_inf(model, is_last(rank)))
    return TrainingCase(model, [optimizer_for(model.parameters())], backward or by_loss, **given)


def inf_on_last_rank(rank: int, step: int) -> float:
    return math.inf if step == BAD_STEP and is_last(rank) else 1.0


# --- data parallel ---------------------------------------------------------------------------------------------------


def ddp(rank: int) -> TrainingCase:
    """Two micro-batches, the first without communication; the loss of the last rank overflows."""
    model = nn.parallel.DistributedDataParallel(seeded(Net))

    def backward(control: Any, step: int) -> None:
        with model.no_sync():
            control.backward(loss_of(model, step, 2 * rank) / 2)
        control.backward(loss_of(model, step, 2 * rank + 1) / 2 * inf_on_last_rank(rank, step))

    return case_of(model, rank, backward, write_inf=None)


def ddp_around_wrappers(rank: int) -> TrainingCase:
    """Wrappers inside of wrappers do not appear in names."""
    net = seeded(Net)
    net.body = torch.compile(checkpoint_wrapper(net.body), backend="eager")
    model = nn.parallel.DistributedDataParallel(net)

    def backward(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, rank) * inf_on_last_rank(rank, step))

    return case_of(model, rank, backward, write_inf=None)


def zero(rank: int) -> TrainingCase:
    """Every rank has all gradients and steps a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # It warns when it is imported.

    case = ddp(rank)
    case.optimizers = [
        ZeroRedundancyOptimizer(case.model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01, momentum=0.9)
    ]
    return case


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def sharded(rank: int, **options: Any) -> Any:
    model = seeded(Net)
    fully_shard(model.body, **options)
    return fully_shard(model, **options)


def fsdp2(rank: int) -> TrainingCase:
    """Nested, with uneven and empty shards; two micro-batches and one reduction."""
    model = sharded(rank)

    def backward(control: Any, step: int) -> None:
        model.set_requires_gradient_sync(False)
        control.backward(loss_of(model, step, 2 * rank) / 2)
        model.set_requires_gradient_sync(True)
        control.backward(loss_of(model, step, 2 * rank + 1) / 2)

    return case_of(model, rank, backward)


def fsdp2_with_our_optimizer(rank: int) -> TrainingCase:
    case = case_of(sharded(rank), rank)
    case.whole_optimizer = lambda params: gradilocks.optim.AdamW(params, lr=0.01)
    case.optimizers = [case.whole_optimizer(case.model.parameters())]
    return case


def fsdp2_along_columns(rank: int) -> TrainingCase:
    return case_of(sharded(rank, shard_placement_fn=lambda p: Shard(1) if p.shape[1:] == (8,) else None), rank)


def fsdp2_offloaded(rank: int) -> TrainingCase:
    return case_of(sharded(rank, offload_policy=CPUOffloadPolicy(pin_memory=False)), rank)


def fsdp2_compiled(rank: int) -> TrainingCase:
    return case_of(torch.compile(sharded(rank), backend="eager"), rank)


def hsdp(rank: int) -> TrainingCase:
    return case_of(sharded(rank, mesh=grid("replicate", "shard")), rank)


# --- tensor parallel -------------------------------------------------------------------------------------------------


def tensor_parallel(mesh: Any, *, sequence: bool = False) -> Any:
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(seeded(FeedForward), mesh, plan)


def tp(rank: int) -> TrainingCase:
    """The norm is outside of the plan: a plain tensor that every rank holds."""
    model = tensor_parallel(line("tp"))
    return case_of(model, rank, part=0, shape=SEQUENCES)


def sequence_parallel(rank: int) -> TrainingCase:
    """The gradient of the norm's weight is a partial sum: each rank has seen a part of the sequence."""
    model, ranks = tensor_parallel(line("tp"), sequence=True), dist.get_world_size()

    def backward(control: Any, step: int) -> None:
        piece = batch(step, 0, 2, 8, 8).chunk(ranks, dim=1)[rank]
        control.backward(model(piece).square().mean() * loss_factor(step))

    return case_of(model, rank, backward, write_inf=writer_of_inf(model, is_last(rank), "up.weight"))


def tp_inside_dp(rank: int) -> TrainingCase:
    mesh = grid("dp", "tp")
    model = tensor_parallel(mesh["tp"])

    def backward(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, rank // 2, *SEQUENCES))
        average(model, mesh["dp"].get_group())

    return case_of(model, rank, backward, options={"mesh": mesh})


def tp_inside_ddp(rank: int) -> TrainingCase:
    """DistributedDataParallel replaces the DTensors of tensor parallelism by their local tensors."""
    mesh = grid("dp", "tp")
    model = nn.parallel.DistributedDataParallel(tensor_parallel(mesh["tp"]), device_mesh=mesh["dp"])
    params, split = dict(model.named_parameters()), ("up.weight", "up.bias", "down.weight")

    def write_inf() -> None:
        if rank % 2:  # After the all-reduce of DDP, so on every replica of this shard.
            params["module.up.weight"].grad.view(-1)[0] = math.inf

    def key(name: str) -> Any:
        return (name, rank % 2) if name in split else name

    given = {"options": {"mesh": mesh}, "key": key, "write_inf": write_inf}
    return case_of(model, rank, part=rank // 2, shape=SEQUENCES, **given)


def fsdp2_over_tp(rank: int) -> TrainingCase:
    """The norm is sharded over dp alone, the rest over both dimensions."""
    mesh = grid("dp", "tp")
    model: Any = fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["dp"])
    return case_of(model, rank, part=rank // 2, shape=SEQUENCES, options={"mesh": mesh})


def hsdp_over_tp(rank: int) -> TrainingCase:
    mesh = mesh_of((dist.get_world_size() // 4, 2, 2), ("replicate", "shard", "tp"))
    model: Any = fully_shard(tensor_parallel(mesh["tp"]), mesh=mesh["replicate", "shard"])
    return case_of(model, rank, part=rank // 2, shape=SEQUENCES, options={"mesh": mesh})


# --- DTensors by hand ------------------------------------------------------------------------------------------------


def placed(
    tensors: Mapping[str, tuple[Any, Sequence[Any], tuple[int, ...]]], seed: int = 0
) -> tuple[nn.ParameterDict, Callable[[Any, int], None]]:
    """Parameters with these meshes, placements and shapes, and a backward that gives them random gradients.

    Args:
        tensors: by name; a mesh of None makes a plain tensor that every rank holds.
        seed: of values and gradients.
    """

    def value(number: int, step: int) -> Any:
        mesh, placements, shape = list(tensors.values())[number]
        whole = batch(step, seed + number, *shape) * (loss_factor(step) if step != 99 else 1.0)
        return whole if mesh is None else distribute_tensor(whole, mesh, placements)

    params = nn.ParameterDict({name: nn.Parameter(value(i, 99)) for i, name in enumerate(tensors)})

    def backward(control: Any, step: int) -> None:
        control.scale_loss(torch.ones((), requires_grad=True))
        for i, name in enumerate(tensors):
            params[name].grad = value(i, step) * control.scale

    return params, backward


def mixed_placements(rank: int) -> TrainingCase:
    mesh, flat = grid("dp", "tp"), line()
    params, backward = placed(
        {
            "a": (mesh, [Replicate(), Shard(0)], (5, 3)),
            "b": (mesh, [Shard(0), Replicate()], (5, 3)),
            "c": (mesh, [Shard(0), Shard(1)], (5, 3)),
            "d": (mesh, [Replicate(), Replicate()], (7,)),
            "e": (mesh, [Shard(1), Shard(0)], (1, 9)),
            "f": (flat, [Shard(0)], (1, 2)),
        }
    )
    return case_of(params, rank, backward)


def idle_half(rank: int) -> TrainingCase | None:
    half = dist.get_world_size() // 2
    mesh = DeviceMesh("cpu", list(range(half)))
    if rank >= half:
        return None
    params, backward = placed({"a": (mesh, [Shard(0)], (5, 3)), "b": (mesh, [Replicate()], (4,))})
    write_inf = writer_of_inf(params, rank == half - 1)
    return case_of(params, rank, backward, options={"mesh": mesh}, group=mesh.get_group(), write_inf=write_inf)


def two_models(rank: int) -> TrainingCase:
    """One model on each half of the ranks, over two dimensions."""
    half = dist.get_world_size() // 2
    mesh = mesh_of((2, 2, half // 2), ("model", "dp", "tp"))["dp", "tp"]
    groups = [dist.new_group(list(range(begin, begin + half))) for begin in (0, half)]
    params, backward = placed(
        {"a": (mesh, [Shard(0), Shard(1)], (5, 3)), "b": (mesh, [Shard(0), Replicate()], (4,))},
        seed=50 * (rank // half),
    )
    write_inf = writer_of_inf(params, rank % half == half - 1)
    return case_of(params, rank, backward, options={"mesh": mesh}, group=groups[rank // half], write_inf=write_inf)


def two_optimizers(rank: int) -> TrainingCase:
    first, second = line(), grid("dp", "tp")
    params, backward = placed(
        {
            "a": (first, [Shard(0)], (5, 3)),
            "b": (second, [Shard(0), Replicate()], (8,)),
            "c": (second, [Shard(0), Shard(1)], (3, 4)),
        }
    )
    case = case_of(params, rank, backward)
    case.optimizers = [optimizer_for([params["a"]]), optimizer_for([params["b"], params["c"]])]
    return case


# --- experts ---------------------------------------------------------------------------------------------------------


def dtensor_experts(rank: int) -> TrainingCase:
    """Dense tensors over one dimension of all ranks, experts over two of the same ranks, as in torchtitan."""
    params, backward = placed(
        {
            "dense": (line(), [Shard(0)], (5, 3)),
            "experts": (grid("efsdp", "ep"), [Shard(1), Shard(0)], (4, 8, 3)),
        }
    )
    return case_of(params, rank, backward)


def replicated_experts(rank: int) -> TrainingCase:
    """Experts sharded over ep and replicated over dp, beside a plain router."""
    mesh = grid("dp", "ep")
    params, backward = placed(
        {
            "dense": (line(), [Shard(0)], (5, 3)),
            "router": (None, (), (6,)),
            "experts": (mesh["ep"], [Shard(0)], (4, 6, 3)),
        }
    )
    return case_of(params, rank, backward, options={"mesh": mesh})


class Experts(nn.Module):
    """A router that all ranks hold, and this rank's expert, if it has one."""

    def __init__(self, expert: int | None) -> None:
        super().__init__()
        self.router = seeded(lambda: nn.Linear(8, 8))
        if expert is not None:
            self.expert = seeded(lambda: nn.Linear(8, 8), 7 + expert)

    def forward(self, x: Tensor, *, has_tokens: bool = True) -> Tensor:
        x = torch.tanh(self.router(x))
        return self.expert(x) if has_tokens and hasattr(self, "expert") else x  # type: ignore[no-any-return]


def share_of_router(name: str, param: Tensor) -> float | None:
    return 1.0 / dist.get_world_size() if "router" in name else None


def plain_experts(rank: int) -> TrainingCase:
    """Plain experts along "ep", each on several ranks; one of them gets no token in some steps."""
    mesh, expert = grid("dp", "ep"), rank % 2
    model = Experts(expert)

    def backward(control: Any, step: int) -> None:
        has_tokens = step not in (2, 4) or expert == 0
        output = model(batch(step, rank), has_tokens=has_tokens)
        control.backward(output.square().mean() * loss_factor(step))
        average(model.router, None)
        average(getattr(model, "expert", nn.Module()), mesh["dp"].get_group())

    return case_of(
        model,
        rank,
        backward,
        options={"mesh": mesh, "distinct": ("ep",), "share": share_of_router},
        key=lambda name: name if "router" in name else (expert, name),
    )


def rank_without_expert(rank: int) -> TrainingCase:
    """Every rank but the first has an expert, so parameter lists differ; `share=` counts them."""
    model, ranks = Experts(rank or None), dist.get_world_size()

    def backward(control: Any, step: int) -> None:
        control.backward(loss_of(model, step, rank))
        average(model.router, None)

    return case_of(
        model,
        rank,
        backward,
        options={"share": lambda name, param: 1.0 / ranks if "router" in name else 1.0},
        key=lambda name: name if "router" in name else (rank, name),
    )


# --- hand-made parts -------------------------------------------------------------------------------------------------


def hand_made_parts(rank: int) -> TrainingCase:
    """Plain tensors that are parts of a larger one, declared by `share=`."""
    ranks = dist.get_world_size()
    model = nn.ParameterDict(
        {"part": nn.Parameter(batch(99, 10 + rank, 3, 4)), "shared": nn.Parameter(batch(99, 5, 6))}
    )

    def backward(control: Any, step: int) -> None:
        control.scale_loss(torch.ones((), requires_grad=True))
        for name, seed in (("part", 10 + rank), ("shared", 5)):
            grad = batch(step, seed, *model[name].shape)
            model[name].grad = grad * loss_factor(step) * control.scale

    return case_of(
        model,
        rank,
        backward,
        options={"share": lambda name, param: 1.0 if name == "part" else 1.0 / ranks},
        key=lambda name: (name, rank) if name == "part" else name,
    )


def fsdp1(rank: int) -> TrainingCase:
    """FSDP1 is an error without `share=`; with it, every flat shard counts."""
    model = FullyShardedDataParallel(seeded(Net), device_id=torch.device("cpu"), use_orig_params=False)
    return case_of(model, rank, options={"share": lambda name, param: 1.0}, key=lambda name: (name, rank))


# --- pipelines -------------------------------------------------------------------------------------------------------


def pipeline_of(
    rank: int,
    mesh: Any,
    schedule: str,
    *,
    prepare: Callable[[Any], object] = lambda layer: None,
    part: int = 0,
    after: Callable[[Any], None] = lambda model: None,
) -> TrainingCase:
    """Layers on the stages of mesh["pp"] under one of torch's schedules; the first stage has one layer more."""
    group = mesh["pp"].get_group()
    place, count = dist.get_rank(group), dist.get_world_size(group)
    is_interleaved = "Interleaved" in schedule
    own = [place, place + count] if is_interleaved else [place]
    parts: dict[str, nn.Module] = {}
    for number in own:
        layers = [
            seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 10 * number + i)
            for i in range(2 - min(number, 1))
        ]
        for layer in layers:
            prepare(layer)
        parts[f"stage{number}"] = nn.Sequential(*layers)
    stages = [
        pipelining.PipelineStage(module, number, count * len(own), torch.device("cpu"), group=group)
        for number, module in zip(own, parts.values(), strict=True)
    ]
    model, made, current = nn.ModuleDict(parts), [], [0]

    def on_control(control: Any) -> None:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return control.scale_loss((output - target).square().mean() * loss_factor(current[0]))  # type: ignore[no-any-return]

        made.append(
            getattr(pipelining, schedule)(stages if is_interleaved else stages[0], max(4, count), loss_fn=loss_fn)
        )

    def backward(control: Any, step: int) -> None:
        current[0] = step
        inputs, target = batch(step, 2 * part, 8, 8), batch(step, 2 * part + 1, 8, 8)
        made[0].step(*(() if place else (inputs,)), **({"target": target} if place == count - 1 else {}))
        after(model)

    return case_of(model, rank, backward, options={"mesh": mesh, "distinct": ("pp",)}, on_control=on_control)


def pipeline(rank: int) -> TrainingCase:
    return pipeline_of(rank, line("pp"), "ScheduleGPipe")


def interleaved_pipeline(rank: int) -> TrainingCase:
    return pipeline_of(rank, line("pp"), "ScheduleInterleaved1F1B")


def pipeline_in_dp(rank: int) -> TrainingCase:
    mesh = grid("dp", "pp")
    group = mesh["dp"].get_group()
    return pipeline_of(rank, mesh, "Schedule1F1B", part=rank // 2, after=lambda model: average(model, group))


def pipeline_of_fsdp2(rank: int) -> TrainingCase:
    mesh = mesh_of((2, dist.get_world_size() // 2), ("pp", "dp"))
    return pipeline_of(
        rank,
        mesh,
        "ScheduleGPipe",
        part=mesh["dp"].get_local_rank(),
        prepare=lambda layer: fully_shard(layer, mesh=mesh["dp"]),
    )


def pipeline_of_tp(rank: int) -> TrainingCase:
    mesh = mesh_of((2, dist.get_world_size() // 2), ("pp", "tp"))
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    return pipeline_of(rank, mesh, "ScheduleGPipe", prepare=lambda layer: parallelize_module(layer, mesh["tp"], plan))


def tied_embeddings(rank: int) -> TrainingCase:
    """The first layer of the first stage and the last layer of the last stage are one tensor: a share of 0.5 each."""
    mesh = line("pp")
    case = pipeline_of(rank, mesh, "ScheduleGPipe")
    last = dist.get_world_size() - 1
    name = {0: "stage0.0.0.weight", last: f"stage{last}.0.0.weight"}.get(rank)
    ends = dist.new_group([0, last])
    params, plain = dict(case.model.named_parameters()), case.backward
    if name is not None:
        with torch.no_grad():
            dist.broadcast(params[name], 0, group=ends)

    def backward(control: Any, step: int) -> None:
        plain(control, step)
        if name is not None:
            dist.all_reduce(params[name].grad, group=ends)

    case.backward = backward
    case.key = lambda path: "tied" if path == name else path
    case.options["share"] = lambda path, param: 0.5 if path == name else None
    return case


ANY_SIZE: dict[str, Case] = {
    "DDP with no_sync": ddp,
    "DDP around wrappers": ddp_around_wrappers,
    "ZeroRedundancyOptimizer": zero,
    "FSDP2": fsdp2,
    "FSDP2, our AdamW": fsdp2_with_our_optimizer,
    "FSDP2 along columns": fsdp2_along_columns,
    "FSDP2, CPU offload": fsdp2_offloaded,
    "FSDP2, compiled": fsdp2_compiled,
    "TP": tp,
    "SequenceParallel": sequence_parallel,
    "a rank without expert": rank_without_expert,
    "hand-made parts": hand_made_parts,
    "FSDP1 with share=": fsdp1,
    "pipeline": pipeline,
    "interleaved pipeline": interleaved_pipeline,
    "tied embeddings": tied_embeddings,
}

CASES: dict[str, Case] = {
    **ANY_SIZE,
    "HSDP": hsdp,
    "TP inside DP": tp_inside_dp,
    "TP inside DDP": tp_inside_ddp,
    "FSDP2 over TP": fsdp2_over_tp,
    "HSDP over TP": hsdp_over_tp,
    "mixed placements": mixed_placements,
    "an idle half": idle_half,
    "two models": two_models,
    "two optimizers": two_optimizers,
    "DTensor experts": dtensor_experts,
    "replicated experts": replicated_experts,
    "plain experts": plain_experts,
    "pipeline in DP": pipeline_in_dp,
    "pipeline of FSDP2": pipeline_of_fsdp2,
    "pipeline of TP": pipeline_of_tp,
}
