"""Trains a distributed model and, beside it, the whole model as one process would; reports every difference.

Before each step the ranks gather their gradients into whole tensors, and each rank steps its own copy of the whole
model on them with a second control. Norms, decisions, scales, parameters and culprits must agree.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradilocks

__all__ = ["BAD_STEP", "STEPS", "CollectiveCounter", "TrainingCase", "loss_factor", "optimizer_for", "train"]

STEPS, BAD_STEP = 8, 5


def loss_factor(step: int) -> float:
    """A factor of the loss, so that some steps are clipped and others are not."""
    return (1.0, 1e3, 1e-4)[step % 3]


def optimizer_for(params: Any) -> torch.optim.Optimizer:
    """SGD, because its step is proportional to the gradient: a wrong clip factor shows in the parameters."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


@dataclass
class TrainingCase:
    """One rank's part of a distributed training."""

    model: Any
    """A module, or a mapping from a prefix to a module."""
    optimizers: Sequence[Any]
    backward: Callable[[gradilocks.GradientControl, int], None]
    """Runs the backward pass of a step, as a user would."""
    options: dict[str, Any] = field(default_factory=dict)
    """`mesh=`, `distinct=` and `share=` of the control."""
    key: Callable[[str], Hashable] = lambda name: name
    """Identifies a parameter by its name: equal keys on several ranks are replicas."""
    group: Any = None
    """The ranks that train this model; None for all."""
    write_inf: Callable[[], None] | None = None
    """Writes Inf into a gradient on one rank; None if `backward` does so itself."""
    on_control: Callable[[gradilocks.GradientControl], None] = lambda control: None
    """Called with the new control."""
    whole_optimizer: Callable[[Any], Any] = optimizer_for
    """The optimizer of the one process."""

    named_parameters: list[tuple[str, Any]] = field(init=False)
    """The parameters with the names that culprits should have. Some wrappers replace them during the forward pass."""

    def __post_init__(self) -> None:
        models = self.model if isinstance(self.model, dict) else {"": self.model}
        wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
        self.named_parameters = [
            (".".join(part for part in [prefix, *path.split(".")] if part and part not in wrappers), param)
            for prefix, model in models.items()
            for path, param in model.named_parameters()
        ]


class CollectiveCounter(TorchDispatchMode):
    """A context that collects the name and the sent bytes of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "wrap")):
            sent = args[1] if name.startswith("allgather") else args[0]
            tensors = sent if isinstance(sent, (list, tuple)) else [sent]
            self.calls.append((name, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def train(case: TrainingCase, clip: Any) -> dict[str, Any]:
    """Trains STEPS steps with an Inf in one of them.

    Returns:
        differences: from one process, in words; empty if there are none.
        collectives: of each step.
        culprits: of the step with the Inf.
    """
    scale = gradilocks.DynamicScale(init_scale=4.0, growth_interval=3)
    whole = {key: nn.Parameter(value) for key, value in _gather(case, lambda param: param.detach()).items()}
    with warnings.catch_warnings(action="ignore"):  # Plain tensors on several ranks: here each rank is to decide alone.
        alone = gradilocks.GradientControl(case.whole_optimizer(list(whole.values())), scale=scale, clip=clip)
    control = gradilocks.GradientControl(*case.optimizers, model=case.model, scale=scale, clip=clip, **case.options)
    case.on_control(control)
    differences: list[str] = []
    collectives, culprits, clipped_steps = [], (), 0
    for step in range(STEPS):
        case.backward(control, step)
        if step == BAD_STEP and case.write_inf is not None:
            case.write_inf()
        grads = _gather(case, lambda param: param.grad)
        with CollectiveCounter() as counter:
            outcome = control.step()
        collectives.append(counter.calls)
        alone.scale_loss(torch.ones((), requires_grad=True))
        for key, param in whole.items():
            param.grad = grads.get(key)
        expected = alone.step()
        clipped = _any(case, outcome.clipped)
        found = outcome.skipped, clipped, outcome.scale, control.scale, outcome.step
        wanted = expected.skipped, expected.clipped, expected.scale, alone.scale, expected.step
        if found != wanted or outcome.skipped != (step == BAD_STEP):
            differences.append(f"step {step}: decided {found}, one process {wanted}")
        if not outcome.skipped and not math.isclose(outcome.norm, expected.norm, rel_tol=1e-6):
            differences.append(f"step {step}: norm {outcome.norm!r}, one process {expected.norm!r}")
        clipped_steps += clipped
        culprits = outcome.culprits or culprits
        control.zero_grad()
        alone.zero_grad()
    for key, value in _gather(case, lambda param: param.detach()).items():
        if not torch.allclose(value, whole[key], rtol=1e-5, atol=1e-6):
            error = (value - whole[key]).abs().max().item()
            differences.append(f"{key} differs from that of one process by {error:g}")
    if not 0 < clipped_steps < STEPS - 1:
        differences.append(f"{clipped_steps} of {STEPS} steps were clipped, so the case shows little")
    return {"differences": differences, "collectives": collectives, "culprits": culprits}


def _any(case: TrainingCase, flag: bool) -> bool:
    flags: list[Any] = [None] * dist.get_world_size(case.group)
    dist.all_gather_object(flags, flag, group=case.group)
    return any(flags)


def _gather(case: TrainingCase, tensor_of: Callable[[Any], Any]) -> dict[Hashable, Tensor]:
    """Every tensor of the model, whole, by key. Replicas must be equal bit for bit."""
    own: dict[Hashable, Tensor] = {}
    for name, param in case.named_parameters:
        tensor = tensor_of(param)
        if tensor is not None:
            own[case.key(name)] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
    parts: list[Any] = [None] * dist.get_world_size(case.group)
    dist.all_gather_object(parts, own, group=case.group)
    found: dict[Hashable, Tensor] = {}
    for part in parts:
        for key, tensor in part.items():
            first = found.setdefault(key, tensor)
            if not tensor.isfinite().all():
                found[key] = tensor
            elif first.isfinite().all() and not torch.equal(first, tensor):
                raise AssertionError(f"replicas of {key} differ: the case itself or an earlier step is wrong")
    return dict(sorted(found.items(), key=lambda item: repr(item[0])))
