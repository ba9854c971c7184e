"""A step over given gradients in plain torch: applies clip policies as the engine does, without scale and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradilocks.clip import Limit, resolve_clip


def p_norm(values: Tensor, order: float) -> Tensor:
    """0-d: p-norm in float64, without overflow of the powers."""
    largest = values.abs().amax()
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return torch.linalg.vector_norm(values / unit, order) * unit


@dataclass(frozen=True)
class Step:
    """The result of one step."""

    gradients: list[Tensor]
    """Clipped gradients in float64; as they came if the step was skipped."""
    norm: float
    bound: float
    """The smallest bound; of a rejected step, the bound that rejected it."""
    clipped: bool
    rejected: bool
    skipped: bool
    limits: tuple[Limit, ...]
    ratios: list[float]
    """Norm of each gradient after clipping over its norm before."""


class Driver:
    """Clip policies with their state, for a list of parameters.

    Args:
        clip: as GradientControl's `clip=`.
        names: of the parameters.
        param_groups: number and name of each parameter's group; one group by default.
        weights: the parameters, for policies per row; zeros by default.
    """

    def __init__(self, clip, *, names=None, param_groups=None, weights=None):
        self.policies = resolve_clip(clip)
        self.states = [dict(policy.init()) for policy in self.policies]
        self.names, self.param_groups, self.weights = names, param_groups, weights

    @property
    def state(self) -> dict[str, object]:
        """The state of the only policy as Python numbers."""
        (state,) = self.states
        return {name: tensor.tolist() for name, tensor in state.items()}

    def step(self, *gradients) -> Step:
        """Clips one list of gradients and moves the states on.

        Args:
            gradients: tensors or lists; a number stands for a gradient of that norm.
        """
        grads = [
            torch.as_tensor([g] if isinstance(g, (int, float)) else g, dtype=torch.float64).clone() for g in gradients
        ]
        before = [grad.clone() for grad in grads]
        order = float(getattr(self.policies[0], "order", 2.0)) if self.policies else 2.0
        first = total = p_norm(torch.stack([p_norm(grad, order) for grad in grads]), order)
        is_finite = bool(total.isfinite())
        names = self.names or [f"layer.{index}" for index in range(len(grads))]
        groups = self.param_groups or [(0, None)] * len(grads)
        observations, bounds, rejecting = [], [math.inf], []
        for policy, state in zip(self.policies, self.states, strict=True):
            per = getattr(policy, "per", "model")
            norms = torch.stack([p_norm(grad, order) for grad in grads])
            if per == "model":
                index = [0] * len(grads)
                norms = total.reshape(1)
            elif per == "tensor":
                index = list(range(len(grads)))
            elif per == "group":
                index = policy.groups(names, groups)
                members = [[norm for norm, i in zip(norms, index, strict=True) if i == g] for g in range(policy.count)]
                zero = torch.zeros((), dtype=torch.float64)
                norms = torch.stack([p_norm(torch.stack(part), order) if part else zero for part in members])
            else:
                weights = self.weights or [torch.zeros_like(grad) for grad in grads]
                counts = [policy.rows(name, grad.shape) for name, grad in zip(names, grads, strict=True)]
                norms = _row_norms(grads, counts)
                state = {**state, "weight_norms": _row_norms(weights, counts)}
            limit = policy.limit(norms, total, state)
            observations.append((norms, total, limit))
            if not is_finite:
                continue
            bounds.append(limit.bound.item())
            rejecting += [limit.bound.item()] * bool(limit.reject)
            if per == "row":
                factors = list(limit.factor.split([count for count in counts if count]))
                for grad, count in zip(grads, counts, strict=True):
                    if count:
                        grad *= factors.pop(0).reshape([-1, *[1] * (grad.dim() - 1)] if grad.dim() else [])
            else:
                factors = limit.factor.expand(norms.shape)
                for grad, i in zip(grads, index, strict=True):
                    grad *= factors[i]
            if limit.value is not None:
                grads = [grad.clamp(-limit.value, limit.value) for grad in grads]
            total = p_norm(torch.stack([p_norm(grad, order) for grad in grads]), order)
        skipped = not is_finite or bool(rejecting)
        if not skipped:
            for k, (policy, seen) in enumerate(zip(self.policies, observations, strict=True)):
                self.states[k] = policy.update(*seen, self.states[k])
        ratios = [
            (p_norm(after, order) / p_norm(grad, order)).item() if grad.any() else 0.0
            for after, grad in zip(grads, before, strict=True)
        ]
        return Step(
            gradients=before if skipped else grads,
            norm=first.item(),
            bound=min(rejecting or bounds),
            clipped=not skipped and any(not torch.equal(a, b) for a, b in zip(grads, before, strict=True)),
            rejected=is_finite and bool(rejecting),
            skipped=skipped,
            limits=tuple(limit for *_, limit in observations),
            ratios=ratios,
        )


def _row_norms(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    parts = [
        torch.linalg.vector_norm(tensor.double().reshape(count, -1), dim=1)
        for tensor, count in zip(tensors, counts, strict=True)
        if count
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def scale_path(policy, flags, *, largest=0.0, state=None) -> list[float]:
    """The scale before the first step and after each.

    Args:
        policy: a scale policy.
        flags: for each step, a truthy value if it overflowed.
        largest: largest magnitude of the scaled gradients.
        state: to start from.
    """
    state = policy.init() if state is None else state
    scales = [state["scale"].item()]
    for overflow in flags:
        state = policy.update(state, torch.tensor(bool(overflow)), torch.tensor(largest, dtype=torch.float64))
        scales.append(state["scale"].item())
    return scales


@contextmanager
def no_host_reads(device: str):
    """Fails on every operation that reads a number on the host or brings host data to the device."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            forbidden = ("_local_scalar_dense", "lift_fresh", "is_nonzero", "nonzero", "masked_select", "equal")
            assert operation.overloadpacket.__name__ not in forbidden, operation
            result = operation(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                assert not isinstance(tensor, Tensor) or tensor.device.type == device, (operation, tensor.device)
            return result

    with Mode():
        yield
