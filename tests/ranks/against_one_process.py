"""A model spread over ranks in, beside it one process on the whole gradients; what differs out.

A `Run` is a model in the hands of some parallelism: its real backward, and which of a rank's
tensors are the same as another rank's. `train` steps it ten times under a control. Before each step
the ranks show each other their gradients, whole, and each steps a copy of the whole model on them
by itself, as one process would. What is not the same comes back in words, with what each step sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradilocks

__all__ = ["BAD_STEP", "FACTORS", "ORDERS", "STEPS", "Run", "Traffic", "factor", "train"]

ORDERS = (1.0, 2.0, 3.0, math.inf)
STEPS, BAD_STEP = 10, 6
FACTORS = (1.0, 1e3, 1e-4)
"""What the losses are multiplied by in turn, so that some steps are clipped and others are not."""


def factor(step: int) -> float:
    return FACTORS[step % len(FACTORS)]


@dataclass
class Run:
    """What one rank trains."""

    model: Any
    """A module, or modules by their prefix, that name the parameters."""
    optimizers: Sequence[Any]
    backward: Callable[[gradilocks.GradientControl, int], None]
    """Runs the backward pass of a step, as a user would."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the control is told of the ranks."""
    key: Callable[[str], Hashable] = lambda name: name
    """Of a parameter's name: what tells the tensor from those of other ranks with that name."""
    group: Any = None
    """The ranks that hold the model together, and its copies; None for all."""
    overflow: Callable[[], None] | None = None
    """Writes Inf into a gradient of the last rank, if not the backward pass does by itself."""
    begun: Callable[[gradilocks.GradientControl], None] = lambda control: None
    """Is called when the control has been made."""

    named: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    """The parameters by the names that a culprit should have."""

    def __post_init__(self) -> None:
        models = self.model if isinstance(self.model, dict) else {"": self.model}
        for prefix, model in models.items():
            for path, param in model.named_parameters():
                self.named.append((f"{prefix}.{plain_name(path)}".lstrip("."), param))


_WRAPPERS = {"_fsdp_wrapped_module", "module", "_orig_mod", "_checkpoint_wrapped_module"}


def plain_name(path: str) -> str:
    """No model here has a part of its own that is called as a wrapper's."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _is_a_wait(name: str) -> bool:
    return name.startswith(("wait", "_wrap"))


class Traffic(TorchDispatchMode):
    """Inside, takes note of every collective: its name, and the bytes that this rank gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not _is_a_wait(func.__name__):
            name = func.__name__.split(".")[0]
            given = args[1] if name.startswith(("allgather", "_allgather")) else args[0]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            self.seen.append((name.strip("_"), sum(each.nbytes for each in tensors)))
        return func(*args, **(kwargs or {}))


class _OneProcess:
    """The whole model, stepped by one process."""

    def __init__(self, values: dict[Hashable, Tensor], **given: Any) -> None:
        self.params = {key: nn.Parameter(value.clone()) for key, value in values.items()}
        self.control = gradilocks.GradientControl(
            torch.optim.AdamW(list(self.params.values()), lr=0.01, fused=False), **given
        )

    def step(self, grads: dict[Hashable, Tensor]) -> gradilocks.Outcome:
        self.control.scale_loss(torch.ones((), requires_grad=True))
        for key, param in self.params.items():
            grad = grads.get(key)
            param.grad = None if grad is None else grad.to(param.dtype)
        outcome = self.control.step()
        self.control.zero_grad()
        return outcome


def adamw(params: Any, **given: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=False, **given)


def train(run: Run, clip: Any, *, steps: int = STEPS, scale: float = 4.0) -> dict[str, Any]:
    """Ten steps with one overflow, beside one process; what differs, and what was sent."""
    given = {
        "scale": gradilocks.DynamicScale(init_scale=scale, growth_interval=3),
        "clip": clip,
    }
    alone = _OneProcess(_whole(run, lambda param: param.detach()), **given)
    control = gradilocks.GradientControl(*run.optimizers, model=run.model, **given, **run.told)
    run.begun(control)
    wrong: list[str] = []
    sent, culprits, clipped = [], (), 0
    exact = getattr(clip, "order", 2.0) != 3.0
    for step in range(steps):
        run.backward(control, step)
        if step == BAD_STEP and run.overflow is not None:
            run.overflow()
        grads = _whole(run, lambda param: param.grad)
        with Traffic() as traffic:
            outcome = control.step()
        sent.append(traffic.seen)
        expected = alone.step(grads)
        pulled = outcome.clipped
        if clip.apart:  # Then a rank tells of the tensors that it holds.
            flags: list[Any] = [None] * dist.get_world_size(run.group)
            dist.all_gather_object(flags, pulled, group=run.group)
            pulled = any(flags)
        mine = [outcome.skipped, pulled, control.scale, outcome.step]
        theirs = [expected.skipped, expected.clipped, alone.control.scale, expected.step]
        if mine != theirs or outcome.skipped != (step == BAD_STEP):
            wrong.append(f"step {step}: decided {mine}, one process {theirs}")
        if not outcome.skipped and not (
            outcome.norm == expected.norm
            if exact
            else math.isclose(outcome.norm, expected.norm, rel_tol=2e-7)
        ):
            wrong.append(f"step {step}: norm {outcome.norm!r}, one process {expected.norm!r}")
        clipped += pulled
        if outcome.skipped:
            culprits = outcome.culprits
        control.zero_grad()
    for key, value in _whole(run, lambda param: param.detach()).items():
        other = alone.params[key].detach()
        same = torch.equal(value, other) if exact else torch.allclose(value, other, rtol=1e-6)
        if not same:
            worst = (value - other).abs().max().item()
            wrong.append(f"{key} is off by {worst:g} from that of one process")
    if not 0 < clipped < steps - 1:
        wrong.append(f"{clipped} steps were clipped: the case shows nothing")
    return {"wrong": wrong, "sent": sent, "culprits": culprits}


def _whole(run: Run, of: Callable[[nn.Parameter], Tensor | None]) -> dict[Hashable, Tensor]:
    """Every tensor of the model, whole, by its key; copies must be the same bit for bit."""
    mine: dict[Hashable, Tensor] = {}
    for name, param in run.named:
        tensor: Any = of(param)
        if tensor is not None:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            mine[run.key(name)] = whole.clone()
    told: list[Any] = [None] * dist.get_world_size(run.group)
    dist.all_gather_object(told, mine, group=run.group)
    found: dict[Hashable, Tensor] = {}
    for theirs in told:
        for key, tensor in theirs.items():
            known = found.setdefault(key, tensor)
            if not torch.isfinite(tensor).all():
                found[key] = tensor
            elif torch.isfinite(known).all() and not torch.equal(known, tensor):
                raise AssertionError(f"the copies of {key} differ: the case itself is wrong")
    return dict(sorted(found.items(), key=lambda item: repr(item[0])))
