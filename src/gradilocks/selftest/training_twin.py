"""A model as it lies on the ranks enters; whether it trains as in one process leaves.

At every step the whole gradients are brought together by torch's own means and given to a twin, a
GradientControl over plain tensors in this process alone. Norm, decision and scale must then be the
same, bit for bit, and so must the parameters at the end; and the norm that of torch in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradilocks
from gradilocks.ranks.layout import is_distributed
from gradilocks.selftest.check_result import Found
from gradilocks.selftest.collective_counter import CollectiveCounter
from gradilocks.selftest.world import World

__all__ = ["Spread", "Training", "adamw", "hexadecimal", "is_same", "train_beside_twin", "watching"]

STEPS = 4
OVERFLOW_AT = 2
LARGEST_ROW = 1024
"""Bytes that a rank may give to a step's collective: a few float64."""


@dataclass
class Spread:
    """A model as it lies on the ranks, seen from one of them."""

    model: nn.Module
    backward: Callable[[Any, int], None]
    """Runs forward and backward of one step under a control; handed the step's number."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """What the control is told: mesh=, distinct=, copies=, process_group=."""
    ranks: Sequence[int] = ()
    """Who hold the model together; all if empty."""
    key: Callable[[str], str] = str
    """What a parameter of this rank is called among those of all ranks."""
    parts: Any = None
    """The group whose ranks have different parameters; None if all have the same ones."""
    collectives: int | None = 1
    """How many a step may take; None if the optimizer has some of its own."""
    overflow: str = "shard"
    """Whether one rank's shard overflows, or one rank's "data"."""
    team: str = "all"
    """The ranks that decide alike."""


@dataclass(frozen=True)
class Training:
    """How the control trains."""

    clip: Any
    scale: Any = field(
        default_factory=lambda: gradilocks.DynamicScale(init_scale=64.0, growth_interval=2)
    )
    optimizer: Callable[[Any], Any] | None = None
    """Takes parameters; torch's AdamW if None."""
    alone: Callable[[Any], Any] | None = None
    """The twin's, where that needs another one."""
    counted: bool = False
    watched: bool = False
    exact: bool = True
    """Whether parameters must be the same bit for bit, or within rounding."""
    order: float | None = 2.0
    """Of the norm that is compared with torch's; None if it is no norm of the whole."""


def adamw(world: World) -> Callable[[Any], Any]:
    """torch's AdamW: on a GPU the one that needs no wait, elsewhere the one that rounds alike."""
    fused = world.device.type == "cuda"
    return lambda params: torch.optim.AdamW(params, lr=0.05, fused=fused, foreach=False)


def train_beside_twin(
    world: World, spread: Spread, training: Training, found: Found, name: str
) -> None:
    """A few steps with an overflow on one rank; what is wrong is noted in `found`."""
    make = training.optimizer or adamw(world)
    settings = {"scale": training.scale, "clip": training.clip}
    control = gradilocks.GradientControl(
        make(spread.model.parameters()), model=spread.model, **settings, **spread.told
    )
    twins = {
        key: nn.Parameter(value.clone().to(world.device))
        for key, value in _whole(spread, lambda param: param).items()
    }
    alone = (training.alone or make)(list(twins.values()))
    twin = gradilocks.GradientControl(alone, model=_Named(twins), **settings)
    last = world.rank == max(spread.ranks or range(world.size))
    seen = []
    for step in range(STEPS):
        overflows = step == OVERFLOW_AT
        where = f"{name}, step {step + 1}"
        spread.backward(control, step)
        if overflows and last and spread.overflow == "shard":
            _spoil(spread.model)
        gradients = _whole(spread, lambda param: param.grad)
        if overflows and spread.overflow == "shard":  # On all, whatever copies this rank reads.
            next(iter(gradients.values())).view(-1)[0] = math.inf
        scale = control.scale
        # The first step may compare settings and wait for it.
        watched = training.watched and step > 0
        with (
            CollectiveCounter() if training.counted and step > 0 else nullcontext() as counter,
            watching(world, where) if watched else nullcontext(),
        ):
            outcome = control.step()
        if counter is not None:
            _check_collectives(spread, counter, found, where)
        twin.scale_loss(torch.ones((), device=world.device, requires_grad=True))
        for key, param in twins.items():
            param.grad = gradients[key].clone().to(world.device) if key in gradients else None
        expected = twin.step()
        _compare(outcome, expected, overflows, found, where)
        if not overflows and training.order is not None:
            _check_norm(outcome.norm, gradients, scale, training.order, found, where)
        if control.scale != twin.scale:
            found.problem(f"{where}: the scale is {control.scale:g}, alone {twin.scale:g}")
        if overflows and spread.overflow == "shard":
            _check_culprit(outcome, spread.ranks or range(world.size), found, where)
        seen.append([hexadecimal(outcome.norm), outcome.skipped, outcome.clipped, control.scale])
        seen[-1].append(list(outcome.culprits) if spread.overflow == "shard" else [])
        control.zero_grad()
        twin.zero_grad()
    found.alike.setdefault(spread.team, []).append(seen)
    _check_parameters(spread, twins, training.exact, world, found, name)


class _Named(nn.Module):
    """Parameters by any names, for the twin's control."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for key, param in params.items():
            self.register_parameter(key.replace(".", " "), param)


def _whole(spread: Spread, of: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Parameters or gradients of all ranks, each whole, on the CPU."""
    mine: dict[str, Tensor] = {}
    for name, param in spread.model.named_parameters():
        tensor: Any = of(param)
        if tensor is not None:
            tensor = tensor.detach()
            if is_distributed(tensor):  # Offloaded, it lies where NCCL does not reach.
                tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
            mine[spread.key(name)] = tensor.cpu().clone()
    if spread.parts is None:
        return mine
    told: list[Any] = [None] * dist.get_world_size(spread.parts)
    dist.all_gather_object(told, mine, group=spread.parts)
    every: dict[str, Tensor] = {}
    for theirs in told:
        for key, tensor in theirs.items():
            every.setdefault(key, tensor)
    return every


def _spoil(model: nn.Module) -> None:
    """An overflow in this rank's elements of a gradient, and nowhere else."""
    for param in model.parameters():
        grad: Any = param.grad
        if is_distributed(grad) and any(placed.is_partial() for placed in grad.placements):
            continue  # Once it is summed up, all ranks have the overflow.
        local = grad.to_local() if is_distributed(grad) else grad
        if local is not None and local.numel():
            local[(0,) * local.dim()] = math.inf
            return
    raise AssertionError("the rank that is to overflow holds no elements")


@contextmanager
def watching(world: World, where: str) -> Iterator[None]:
    """Raises, and says where, if the host waits for the GPU inside."""
    if world.device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        at = "" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        raise RuntimeError(f"{where}: the host waits for the GPU, in {at}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _check_collectives(spread: Spread, counter: Any, found: Found, where: str) -> None:
    found.numbers["collectives"] = max(found.numbers.get("collectives", 0), counter.total)
    found.numbers["bytes"] = max(found.numbers.get("bytes", 0), counter.bytes_given)
    if spread.collectives is None:
        return
    if counter.total > spread.collectives:
        told = ", ".join(f"{number} {kind}" for kind, number in counter.calls.items())
        found.problem(
            f"{where}: {counter.total} collectives ({told}) where {spread.collectives} will do"
        )
    elif counter.bytes_given > LARGEST_ROW * max(spread.collectives, 1):
        found.problem(f"{where}: this rank gave {counter.bytes_given:,} bytes to the step")


def _compare(outcome: Any, expected: Any, overflows: bool, found: Found, where: str) -> None:
    if outcome.skipped != overflows:
        found.problem(f"{where}: skipped is {outcome.skipped}, expected {overflows}")
    for what in ("skipped", "clipped") if not overflows else ("skipped",):
        mine, alone = getattr(outcome, what), getattr(expected, what)
        if mine != alone:
            found.problem(f"{where}: {what} is {mine}, in one process {alone}")
    if not overflows and outcome.norm != expected.norm:
        found.problem(f"{where}: the norm is {outcome.norm!r}, in one process {expected.norm!r}")


def _check_norm(
    norm: float,
    gradients: Mapping[str, Tensor],
    scale: float,
    order: float,
    found: Found,
    where: str,
) -> None:
    every = torch.cat([grad.double().flatten() for grad in gradients.values()]) / scale
    exact = torch.linalg.vector_norm(every, order).item()
    if not math.isclose(norm, exact, rel_tol=1e-6):
        found.problem(f"{where}: the norm is {norm!r}, by torch in float64 {exact!r}")


def _check_culprit(outcome: Any, ranks: Sequence[int], found: Found, where: str) -> None:
    """One rank's overflow must be told on all, with the rank if there are several."""
    named = f"on rank {max(ranks)}" if len(ranks) > 1 else ""
    if not any(named in culprit for culprit in outcome.culprits):
        found.problem(f"{where}: rank {max(ranks)} overflowed, and culprits are {outcome.culprits}")


def _check_parameters(
    spread: Spread,
    twins: Mapping[str, Tensor],
    exact: bool,
    world: World,
    found: Found,
    name: str,
) -> None:
    for key, value in _whole(spread, lambda param: param).items():
        alone = twins[key].detach().cpu()
        if not is_same(value, alone, exact=exact and world.device.type == "cpu"):
            off = (value.double() - alone.double()).abs().max().item()
            found.problem(f"{name}: {key} ends {off:.3g} away from where one process leaves it")


def is_same(one: Tensor, other: Tensor, *, exact: bool) -> bool:
    """Whether two tensors are the same, bit for bit or within the rounding of a few operations."""
    if exact:
        return torch.equal(one, other)
    tolerance = {2: 2e-2, 4: 2e-6, 8: 1e-12}[one.dtype.itemsize]
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def hexadecimal(number: float) -> str:
    """A number with all of its bits; what is not finite needs none."""
    return number.hex() if math.isfinite(number) else "not finite"
