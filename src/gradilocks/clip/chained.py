"""Several policies one after the other, each on what the one before has left."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradilocks.clip.clip_policy import NOTHING, ClipByValue, ClipPolicy, Memory, resolve_clip
from gradilocks.kernels.reference import rounded, total_norm
from gradilocks.values import ClipLimit, Measurement

__all__ = ["Chain", "chain"]


def chain(*policies: Any) -> Chain:
    """Clip policies one after the other: `chain(SkipSpikes(), ClipByNorm(1.0))`.

    Each sees the gradients as the one before has left them. One that rejects a step rejects it for
    all, and none of them learns from it. The limit of a step is the smallest of theirs; of one that
    was rejected, that of the policy that did so.

    Args:
        policies: two or more, measured with the same order; a number means ClipByNorm.
            AdaptiveClip only as the first one, ClipByValue only as the last.
    """
    return Chain(policies)


@dataclass(frozen=True)
class Chain(ClipPolicy):
    """What `chain` makes: policies one after the other.

        for each policy:  its limit for the gradients as the one before has left them
        coefficient, factors = the product of all;  rejected if one of them rejects

    Example:
        >>> from gradilocks.clip import ClipByNorm, SkipSpikes
        >>> len(chain(SkipSpikes(), ClipByNorm(1.0)).policies)
        2

    Reference: optax.chain, for the idea. Use it to skip what is hopeless and clip the rest.
    """

    policies: tuple[ClipPolicy, ...]

    def __post_init__(self) -> None:
        flat: list[ClipPolicy] = []
        for given in self.policies:
            policy = _resolved(given)
            flat += policy.policies if isinstance(policy, Chain) else [policy]
        object.__setattr__(self, "policies", tuple(flat))
        if len(self.policies) < 2:
            raise ValueError(f"chain takes two policies or more, got {len(self.policies)}.")
        orders = {float(policy.order) for policy in self.policies}
        if len(orders) > 1:
            raise ValueError(
                f"the policies of a chain measure one norm, got orders {sorted(orders)}. Give them "
                "the same order."
            )
        if any(policy.by_unit for policy in self.policies[1:]):
            raise ValueError(
                "AdaptiveClip must be the first of a chain: it looks at the gradients themselves, "
                "which the policies before it have not changed yet."
            )
        if any(isinstance(policy, ClipByValue) for policy in self.policies[:-1]):
            raise ValueError(
                "ClipByValue must be the last of a chain: what is left of a norm after it is known "
                "only by measuring again."
            )
        # What one of them needs, the chain needs.
        object.__setattr__(self, "order", orders.pop())
        for name in ("needs_largest", "apart", "by_unit"):
            needed = any(getattr(policy, name) for policy in self.policies)
            object.__setattr__(self, name, needed)
        by_group = all(policy.by_group for policy in self.policies if policy.apart)
        object.__setattr__(self, "by_group", by_group)
        by_parameter = tuple(
            f"{k}.{name}" for k, policy in enumerate(self.policies) for name in policy.by_parameter
        )
        object.__setattr__(self, "by_parameter", by_parameter)

    @property
    def needs_scene(self) -> bool:
        return any(policy.needs_scene for policy in self.policies)

    def misfits(
        self, names: Sequence[str], groups: Sequence[tuple[int, str | None]]
    ) -> dict[str | int, str]:
        found: dict[str | int, str] = {}
        for policy in self.policies:
            found.update(policy.misfits(names, groups))
        return found

    def unit_count(self, name: str, shape: Sequence[int]) -> int:
        return self.policies[0].unit_count(name, shape)  # The only one that may be by unit.

    def start(self, device: torch.device, count: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for k, policy in enumerate(self.policies):
            for name, tensor in (policy.start(device, count) or {}).items():
                state[f"{k}.{name}"] = tensor
        return state

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        seen: list[tuple[Measurement, ClipLimit]] = []
        for k, policy in enumerate(self.policies):
            own = _own(state, k)
            limit = policy.limit(measurement, scale, *([own] if own else []))
            seen.append((measurement, limit))
            measurement = _after(measurement, limit)
        limits = [limit for _, limit in seen]
        values = [each.value for each in limits if each.value is not None]
        units = [each.units for each in limits if each.units is not None]
        rejections = [each.reject for each in limits if each.reject is not None]
        return ClipLimit(
            coefficient=functools.reduce(torch.mul, [each.coefficient for each in limits]),
            limit=_bound(limits, seen[0][0].nonfinite),
            clipped=functools.reduce(torch.maximum, [each.clipped for each in limits]),
            value=values[-1] if values else None,  # It bounds what the others have left.
            factors=_product([each.factors for each in limits]),
            units=[_product(each) for each in zip(*units, strict=True)] if units else None,
            reject=functools.reduce(torch.maximum, rejections) if rejections else None,
            parts=seen,
        )

    def advance(
        self, state: Memory, measurement: Measurement, scale: Tensor, limit: ClipLimit, skip: Tensor
    ) -> None:
        # Not worked out again: by now gradients and weights are no longer what they were.
        for k, (policy, (seen, each)) in enumerate(zip(self.policies, limit.parts, strict=True)):
            if own := _own(state, k):
                policy.advance(own, seen, scale, each, skip)


def _resolved(given: object) -> ClipPolicy:
    """The policy that `given` stands for, as `clip=` takes it; None is no part of a chain."""
    try:
        if given is not None:
            return resolve_clip(given)
    except TypeError:
        pass  # Its message speaks of clip=.
    raise TypeError(f"chain takes clip policies such as ClipByNorm(1.0), got {given!r}.")


def _own(state: Memory, k: int) -> dict[str, Tensor]:
    prefix = f"{k}."
    return {name[len(prefix) :]: t for name, t in state.items() if name.startswith(prefix)}


def _after(measurement: Measurement, limit: ClipLimit) -> Measurement:
    """The Measurement of the gradients as `limit` leaves them."""
    statistics = measurement.tensors
    shrunk = limit.coefficient if limit.factors is None else limit.coefficient * limit.factors
    norms = statistics.norms * shrunk if limit.norms is None else limit.norms
    largest = None if statistics.largest is None else statistics.largest * shrunk
    # Rounded as any total is, so that on any number of ranks the next policy sees the same one.
    norm = rounded(total_norm(norms, measurement.order), double=measurement.double)
    if limit.factors is None and limit.norms is None:
        norm = measurement.norm * limit.coefficient  # Also where other ranks have a part in it.
    norm = torch.where(measurement.nonfinite > 0, measurement.norm, norm)
    return dataclasses.replace(
        measurement,
        norm=norm,
        tensors=dataclasses.replace(statistics, norms=norms, largest=largest),
    )


def _bound(limits: Sequence[ClipLimit], nonfinite: Tensor) -> Tensor:
    """0-d: the smallest bound on the norm; of a rejected step, of those that have rejected it."""
    smallest = functools.reduce(torch.minimum, [each.limit for each in limits])
    bound = torch.full_like(smallest, math.inf)
    rejected = torch.zeros_like(nonfinite, dtype=torch.bool)
    for each in limits:
        if each.reject is not None:
            rejects = (each.reject > 0) & (nonfinite == 0)  # Else it is no rejection.
            bound = torch.where(rejects, torch.minimum(bound, each.limit), bound)
            rejected = rejected | rejects
    return torch.where(rejected, bound, smallest)


def _product(factors: Sequence[Tensor | None]) -> Tensor | None:
    """The product of those that are there; None if none is."""
    there = [factor for factor in factors if factor is not None]
    return functools.reduce(torch.mul, there) if there else None
