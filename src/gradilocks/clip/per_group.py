"""Policies that bound gradients apart from each other: one by one, or group by group."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradilocks.clip.clip_policy import (
    NOTHING,
    ClipPolicy,
    Memory,
    check_max_norm,
    check_order,
    clip_coefficient,
    scene_of,
    without_coefficient,
)
from gradilocks.values import ClipLimit, Measurement, Scene, moved

__all__ = ["ClipPerGroup", "ClipPerTensor"]

_MOST_CACHED = 16


@dataclass(frozen=True)
class ClipPerTensor(ClipPolicy):
    """Shortens each gradient on its own so that its norm is at most `max_norm`.

        factor = min(1, max_norm / (norm of this gradient + 1e-6))

    Args:
        max_norm: the bound, not negative.
        order: the p of the norm, at least 1; `math.inf` bounds the largest element.

    Example:
        >>> ClipPerTensor(1.0)
        ClipPerTensor(max_norm=1.0, order=2.0)

    Reference: the per-layer clipping of differentially private training and of many RL code bases.
    Use it where one layer must not take the others' share; the direction of the whole turns.
    """

    max_norm: float
    order: float = 2.0
    apart = True

    def __post_init__(self) -> None:
        check_max_norm(self.max_norm)
        check_order(self.order)

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        norms = measurement.tensors.norms / scale
        factors = clip_coefficient(norms, self.max_norm, measurement.nonfinite)
        return without_coefficient(measurement, (factors < 1.0).any(), factors=factors)


@dataclass(frozen=True)
class ClipPerGroup(ClipPolicy):
    """Shortens the gradients of each group together, each group to its own limit or to none.

        factor = min(1, limit / (norm of the group's gradients + 1e-6))

    Args:
        limits: from a group to its largest norm, or to None for no limit. A group is named by its
            number (0), counted over all optimizers in their order, by the "name" in its
            param_group, or by a pattern of parameter names as in a shell ("embed.*", "*.bias"). The
            first that fits a parameter counts.
        otherwise: the limit for all other parameters together; None for none.
        order: the p of the norm, at least 1.

    Example:
        >>> ClipPerGroup({"embed.*": 0.5, "head.*": None}, otherwise=1.0).otherwise
        1.0

    Reference: the rule of ClipByNorm (Pascanu et al., 2013), group by group. Use it where parts of
    a model want different limits or none: Muon's matrices, whose update does not depend on the
    norm, embeddings, heads.
    """

    limits: Mapping[str | int, float | None]
    otherwise: float | None = None
    order: float = 2.0
    apart = True
    by_group = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cached", {})
        given: Any = self.limits
        if isinstance(given, (list, Mapping)):
            # A list is as a checkpoint has it: JSON would turn a number into a name.
            given = dict(given)
            object.__setattr__(self, "limits", given)
        if not isinstance(given, Mapping) or not given:
            raise TypeError(
                "limits must be a dict from a group or a pattern of names to a norm or None, got "
                f"{self.limits!r}."
            )
        for key, bound in self.limits.items():
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise TypeError(f"a group is named by a str or an int, got {key!r} in limits.")
            if bound is not None:
                check_max_norm(bound, name=f"limits[{key!r}]", none="None")
        if self.otherwise is not None:
            check_max_norm(self.otherwise, name="otherwise", none="None")
        check_order(self.order)

    def __reduce__(self) -> Any:
        return ClipPerGroup, (dict(self.limits), self.otherwise, self.order)

    def misfits(
        self, names: Sequence[str], groups: Sequence[tuple[int, str | None]]
    ) -> dict[str | int, str]:
        pairs = list(zip(names, groups, strict=True))
        there = sorted({name for _, name in groups if name is not None})
        described = (
            f"There are {len({n for n, _ in groups})} groups{f' named {there}' if there else ''}, "
            f"and parameters such as {', '.join(names[:3])}."
        )
        return {
            key: f"limits[{key!r}] fits no parameter. {described}"
            for key in self.limits
            if not any(_fits(key, name, group) for name, group in pairs)
        }

    def limit(self, measurement: Measurement, scale: Tensor, state: Memory = NOTHING) -> ClipLimit:
        norms = measurement.tensors.norms
        scene = scene_of(measurement, self)
        member, bounds = self._members(scene, norms)
        unit = norms.amax() if norms.numel() else norms.new_ones(())
        unit = torch.where((unit > 0) & torch.isfinite(unit), unit, torch.ones_like(unit))
        sums = norms.new_zeros(bounds.numel())
        if self.order == math.inf:
            together = sums.scatter_reduce(0, member, norms, "amax")
        else:
            powers = sums.index_add(0, member, (norms / unit) ** self.order)
            together = unit * powers ** (1.0 / self.order)
        factors = clip_coefficient(together / scale, bounds, measurement.nonfinite)[member]
        return without_coefficient(measurement, (factors < 1.0).any(), factors=factors)

    def _members(self, scene: Scene, like: Tensor) -> tuple[Tensor, Tensor]:
        """Each gradient's group by number, and the groups' bounds, the last one `otherwise`'s."""
        cached: dict[object, tuple[Tensor, Tensor]] = self.__dict__["_cached"]
        names, groups = scene.names(), scene.groups()
        key = (tuple(names), tuple(groups), tuple(scene.places), like.device, like.dtype)
        if key not in cached:
            order = list(self.limits)
            numbers = [
                next(
                    (k for k, each in enumerate(order) if _fits(each, names[i], groups[i])),
                    len(order),
                )
                for i in scene.places
            ]
            bounds = [*self.limits.values(), self.otherwise]
            host = torch.tensor([math.inf if b is None else b for b in bounds], dtype=like.dtype)
            if len(cached) >= _MOST_CACHED:
                cached.clear()
            member = torch.tensor(numbers, dtype=torch.int64)
            cached[key] = moved(member, like.device), moved(host, like.device)
        return cached[key]


def _fits(key: str | int, name: str, group: tuple[int, str | None]) -> bool:
    if isinstance(key, int):
        return group[0] == key
    return group[1] == key or fnmatch.fnmatchcase(name, key)
