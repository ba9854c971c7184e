"""Evaluation of the clip policies for parameters that step together, with torch operations and no host reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gradilocks.clip import Limit
from gradilocks.ranks.collective import reduce_powers
from gradilocks.ranks.layout import Layout, check_rows_are_local, copy_to
from gradilocks.step.gradients import device_indices, elements


@dataclass(frozen=True)
class Clipping:
    """The combined result of the clip policies for one step. All tensors are on the device."""

    factor: Tensor
    """0-d: multiplies every unscaled gradient."""
    bound: Tensor
    """0-d: the smallest bound on the norm; for a rejected step, the bound that rejected it."""
    reject: Tensor
    """0-d bool: skip the step although all gradients are finite."""
    factors: Tensor | None = None
    """1-d, one per parameter: multiplies its unscaled gradient."""
    row_factors: list[Tensor | None] | None = None
    """One tensor per parameter, shaped to broadcast over its rows; None for a parameter without row limits."""
    value: Tensor | None = None
    """0-d: bound on the magnitude of each unscaled element."""
    observations: tuple[tuple[Tensor, Tensor, Any], ...] = ()
    """For each policy, the norms and the total that it received and the Limit that it returned."""


class ClipStage:
    """Clip policies with their state, for the parameters that step together.

    Args:
        policies: applied in order; each policy receives the norms as clipped by the previous ones.
        params: the parameters.
        names: their names.
        groups: index and name of each parameter's param group.
        layout: how the parameters are distributed over ranks; None for one rank.
    """

    def __init__(
        self,
        policies: Sequence[Any],
        params: Sequence[Tensor],
        names: Sequence[str],
        groups: Sequence[tuple[int, str | None]],
        layout: Layout | None = None,
    ) -> None:
        self.policies = tuple(policies)
        self.states: list[dict[str, Tensor]] = [_initial_state(policy, len(params)) for policy in policies]
        self._params, self._layout = params, layout
        self.order = float(getattr(policies[0], "order", 2.0)) if policies else 2.0
        """The p of the norm that the policies bound."""
        self._group_indices: list[tuple[int, ...]] = []
        """For each policy, the group of each parameter; empty unless its norms are those of groups."""
        self._row_counts: list[int] = []
        for policy in self.policies:
            per = getattr(policy, "per", "model")
            self._group_indices.append(tuple(policy.groups(names, groups)) if per == "group" else ())
            if per == "row":
                self._row_counts = [policy.rows(name, param.shape) for name, param in zip(names, params, strict=True)]
                check_rows_are_local(params, self._row_counts, names)

    def limit(self, norms: Tensor, total: Tensor, tensors: Sequence[Tensor | None], gradient_scale: Tensor) -> Clipping:
        """Evaluates the policies.

        Args:
            norms: 1-d, norm of each parameter's unscaled gradient on this rank.
            total: 0-d, their global norm over all ranks.
            tensors: the gradients, for policies that bound rows.
            gradient_scale: 0-d, the scale of `tensors`; 1 if they are unscaled.
        """
        factor, bound = torch.ones_like(total), torch.full_like(total, math.inf)
        rejecting_bound, reject = bound, torch.zeros_like(total, dtype=torch.bool)
        factors: Tensor | None = None
        row_factors: list[Tensor | None] | None = None
        value: Tensor | None = None
        observations: list[tuple[Tensor, Tensor, Any]] = []
        local = norms
        remaining = len(self.policies)
        for policy, state, group_indices in zip(self.policies, self.states, self._group_indices, strict=True):
            remaining -= 1
            per = getattr(policy, "per", "model")
            for name, tensor in state.items():
                state[name] = copy_to(tensor, total.device)
            rows: list[Tensor | None] = []
            if per == "row":
                rows = self._row_norms(tensors, gradient_scale)
                weights = self._row_norms(self._weights(tensors), torch.ones_like(gradient_scale))
                state = {**state, "weight_norms": _concatenate(weights, total)}
                own_norms = _concatenate(rows, total)
            elif per == "group":
                own_norms = self._group_norms(local, group_indices, policy.count)
            else:
                own_norms = self._tensor_norms(local) if per == "tensor" else total.reshape(1)
            limit = policy.limit(own_norms, total, state)
            observations.append((own_norms, total, limit))
            rejecting_bound = torch.where(limit.reject & ~reject, limit.bound.to(total.dtype), rejecting_bound)
            reject, bound = reject | limit.reject, torch.minimum(bound, limit.bound.to(total.dtype))
            value = limit.value if limit.value is not None else value
            if per == "model":
                factor = factor * limit.factor.reshape(())
                local, total = local * limit.factor, total * limit.factor.reshape(())
                continue
            if per == "row":
                row_factors, per_tensor = self._split_rows(limit.factor, rows, local)
            else:
                per_tensor = limit.factor
                if per == "group":
                    per_tensor = per_tensor[device_indices(group_indices, per_tensor.device)]
                factors = per_tensor if factors is None else factors * per_tensor
            if remaining:  # Computed only if another policy follows: with several ranks the total is a collective.
                local = local * per_tensor
                total = self._total(local)
        bound = torch.where(reject, rejecting_bound, bound)
        return Clipping(factor, bound, reject, factors, row_factors, value, tuple(observations))

    def update(self, clipping: Clipping, is_taken: Tensor) -> None:
        """Updates the state of the policies, unless the step was skipped.

        Args:
            clipping: the result of `limit`.
            is_taken: 0-d bool, False for a skipped step.
        """
        for policy, state, observation in zip(self.policies, self.states, clipping.observations, strict=True):
            for name, new in policy.update(*observation, dict(state)).items():
                old = state[name]
                old.copy_(torch.where(is_taken, new.to(old.dtype), old))  # In place: a CUDA graph may read it.

    def _tensor_norms(self, local: Tensor) -> Tensor:
        """Norm of each parameter's gradient over all ranks that hold a part of it."""
        return local if self._layout is None else self._norms(self._powers(local), over="spmd")

    def _group_norms(self, local: Tensor, group_indices: tuple[int, ...], count: int) -> Tensor:
        powers = self._powers(local)
        sums, index = powers.new_zeros(count), device_indices(group_indices, powers.device)
        if self.order == math.inf:
            return self._norms(sums.scatter_reduce(0, index, powers, "amax"), over="group")
        return self._norms(sums.index_add(0, index, powers), over="group")

    def _total(self, local: Tensor) -> Tensor:
        powers = self._powers(local)
        total = powers.amax() if self.order == math.inf else powers.sum()
        return self._norms(total.reshape(1), over="group").reshape(())

    def _powers(self, norms: Tensor) -> Tensor:
        """p-th powers, weighted so that their sum over the ranks counts every element once."""
        if self.order == math.inf:
            return norms
        return norms**self.order if self._layout is None else norms**self.order * self._layout.weights(norms)

    def _norms(self, powers: Tensor, *, over: Literal["spmd", "group"]) -> Tensor:
        """Norms from the powers of all ranks."""
        if self._layout is not None:
            powers = reduce_powers(powers, self._layout, self.order, over=over)
        return powers if self.order == math.inf else powers ** (1.0 / self.order)

    def _weights(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The weights with the same rows as the gradients: for a sparse gradient, only the rows that it has."""
        weights: list[Tensor | None] = []
        for param, tensor in zip(self._params, tensors, strict=True):
            if tensor is None:
                weights.append(None)
                continue
            weight = elements(param.detach())
            if param.grad is not None and param.grad.layout is torch.sparse_coo:
                weight = weight[param.grad.indices()[0]]
            weights.append(weight)
        return weights

    def _row_norms(self, tensors: Sequence[Tensor | None], gradient_scale: Tensor) -> list[Tensor | None]:
        norms: list[Tensor | None] = []
        for param, tensor, count in zip(self._params, tensors, self._row_counts, strict=True):
            if tensor is None or not count:
                norms.append(None)
                continue
            dims = tuple(range(1, tensor.dim())) if param.dim() > 1 else None
            dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
            norm = torch.linalg.vector_norm(tensor.detach(), ord=2, dim=dims, dtype=dtype)
            norms.append(norm.reshape(-1) / gradient_scale)
        return norms

    def _split_rows(
        self, factor: Tensor, rows: list[Tensor | None], local: Tensor
    ) -> tuple[list[Tensor | None], Tensor]:
        """The row factors of each parameter, and the ratio of each gradient's norm after clipping to that before."""
        factors: list[Tensor | None] = []
        ratios: list[Tensor] = []
        begin, one = 0, torch.ones_like(local[0])
        for norms in rows:
            if norms is None:
                factors.append(None)
                ratios.append(one)
                continue
            part = factor[begin : begin + norms.numel()]
            begin += norms.numel()
            factors.append(part)
            before = torch.linalg.vector_norm(norms)
            ratios.append(torch.where(before > 0, torch.linalg.vector_norm(norms * part) / before, one))
        return factors, torch.stack(ratios)


def _initial_state(policy: Any, count: int) -> dict[str, Tensor]:
    """The initial state of a policy; with per = "tensor", in the shapes that it has after the first update.

    Raises:
        TypeError: `limit` or `update` of a custom policy returns the wrong type, keys or number of factors.
    """
    state = dict(policy.init())
    per = getattr(policy, "per", "model")
    if per == "row" or not count:
        return state
    norms = torch.ones({"tensor": count, "group": getattr(policy, "count", 1)}.get(per, 1), dtype=torch.float64)
    total = torch.linalg.vector_norm(norms)
    limit = policy.limit(norms, total, dict(state))
    fields = [limit.factor, limit.bound, limit.reject] if isinstance(limit, Limit) else [None]
    is_valid = all(isinstance(field, Tensor) for field in fields) and limit.factor.numel() in (1, norms.numel())
    new = policy.update(norms, total, limit, dict(state)) if is_valid else None
    if not isinstance(new, Mapping) or set(new) != set(state):
        raise TypeError(
            f"limit() of {type(policy).__name__} must return a gradilocks.clip.Limit of tensors, with one factor or "
            f"{norms.numel()}, and update() a dict with the keys of init(), {sorted(state)}; got {limit} and {new}."
        )
    return {key: tensor.expand(new[key].shape).clone() for key, tensor in state.items()} if per == "tensor" else state


def _concatenate(parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else like.new_zeros(0)
