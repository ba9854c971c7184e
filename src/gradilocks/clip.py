"""Clip policies, which scale down the gradients of a step or reject the step.

A policy is a frozen configuration with three pure functions: `init`, `limit` and `update`. They are torch operations on
a few norms, so a policy runs on the gradients' device without a host synchronization and inside CUDA graphs.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from gradilocks.checks import check_number, check_order

__all__ = [
    "AdaGC",
    "AdaptiveClip",
    "Chain",
    "ClipByNorm",
    "ClipByValue",
    "ClipPerGroup",
    "ClipPolicy",
    "Limit",
    "QuantileClip",
    "SkipSpikes",
    "ZScoreClip",
    "chain",
    "resolve_clip",
]

Per = Literal["model", "group", "tensor", "row"]
State = Mapping[str, Tensor]

_EPSILON = 1e-6
"""Added to the norm before dividing by it, as in torch."""


@dataclass(frozen=True)
class Limit:
    """The decision of a clip policy for one step. All tensors are on the device of the norms."""

    factor: Tensor
    """0-d, or 1-d with one entry per norm, in [0, 1]: multiplies the unscaled gradients."""
    bound: Tensor
    """0-d: the largest global norm the policy allows; inf for none."""
    reject: Tensor
    """0-d bool: skip the step although all gradients are finite."""
    value: Tensor | None = None
    """0-d: bound on the magnitude of each unscaled element; None for none."""


class ClipPolicy:
    """Base class of clip policies.

    A custom policy is a subclass, or any object with the same `init`, `limit` and `update`. It need not handle NaN or
    Inf: the results of `limit` and `update` are discarded if the global norm is not finite.
    """

    per: ClassVar[Per] = "model"
    """Scope of each entry of `norms`: the model, a group, a parameter, or a row of a parameter. For "group" the policy
    also has the methods of ClipPerGroup, for "row" those of AdaptiveClip."""
    order: float = 2.0
    """The p of the norms."""

    def init(self) -> dict[str, Tensor]:
        """Returns the initial state, empty for a policy without memory.

        With `per = "tensor"`, a 1-d tensor holds one number per parameter. `init` may return it as 0-d; it is then
        expanded.
        """
        return {}

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        """Returns the limit for one step.

        Args:
            norms: 1-d float64, norms of the unscaled gradients per model, group, tensor or row; 0 without a gradient.
            total: 0-d float64, global norm of the unscaled gradients.
            state: the current state.
        """
        raise NotImplementedError(f"{type(self).__name__} must define limit(norms, total, state).")

    def update(self, norms: Tensor, total: Tensor, limit: Limit, state: State) -> dict[str, Tensor]:
        """Returns the next state, which the caller discards if the step was skipped."""
        return dict(state)


@dataclass(frozen=True)
class ClipByNorm(ClipPolicy):
    """Scales all gradients down together so that their global norm is at most `max_norm`.

        factor = min(1, max_norm / (norm + 1e-6))

    Args:
        max_norm: the bound, not negative; `math.inf` to measure without clipping.
        order: the p of the norm, from 1 to 8; `math.inf` bounds the largest element.

    Examples:
        >>> policy = ClipByNorm(1.0)
        >>> policy.limit(torch.tensor([4.0]), torch.tensor(4.0), policy.init()).factor
        tensor(0.2500)

    Reference: Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013.
    """

    max_norm: float
    order: float = 2.0

    def __post_init__(self) -> None:
        check_number("max_norm", self.max_norm, at_least=0.0)
        check_order(self.order)

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        return _limit(total, factor=_torch_coefficient(total, self.max_norm), bound=self.max_norm)


@dataclass(frozen=True)
class ClipByValue(ClipPolicy):
    """Bounds the magnitude of every element. The direction of the gradient may change.

        g = min(max(g, -value), value)

    Args:
        value: the bound, not negative.

    Examples:
        >>> policy = ClipByValue(0.5)
        >>> policy.limit(torch.tensor([4.0]), torch.tensor(4.0), policy.init()).value
        tensor(0.5000)

    Reference: Mikolov, "Statistical Language Models Based on Neural Networks", 2012.
    """

    value: float

    def __post_init__(self) -> None:
        check_number("value", self.value, at_least=0.0)

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        return _limit(total, value=torch.full_like(total, self.value))


@dataclass(frozen=True)
class ClipPerGroup(ClipPolicy):
    """Clips groups of parameters separately, each group by its own norm and to its own limit.

        for each group:  factor = min(1, limit / (norm of the group + 1e-6))

    Args:
        limits: largest norm of each group, None for no limit. A key is the index of a param_group, counted over all
            optimizers, the "name" in a param_group, or a shell pattern of parameter names (`embed.*`, `*.bias`). The
            first key that matches a parameter wins.
        otherwise: limit for all other parameters together; None for no limit.
        order: the p of the norm, from 1 to 8, or `math.inf`.

    Examples:
        >>> policy = ClipPerGroup({"embed.*": 0.5, "head.*": None}, otherwise=1.0)
        >>> policy.groups(["embed.weight", "body.weight", "head.weight"], [(0, None)] * 3)
        [0, 2, 1]
        >>> policy.limit(torch.tensor([2.0, 8.0, 4.0]), torch.tensor(84.0).sqrt(), policy.init()).factor
        tensor([0.2500, 1.0000, 0.2500])

    Reference: the rule of ClipByNorm for each group.
    """

    limits: Mapping[str | int, float | None]
    otherwise: float | None = None
    order: float = 2.0
    per: ClassVar[Per] = "group"

    def __post_init__(self) -> None:
        limits: object = self.limits
        if not isinstance(limits, Mapping) or not limits:
            raise TypeError(f"limits must be a non-empty dict from groups or patterns to norms, got {limits!r}.")
        object.__setattr__(self, "limits", dict(limits))
        for key, limit in limits.items():
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise TypeError(f"a key of limits must be a str or an int, got {key!r}.")
            if limit is not None:
                check_number(f"limits[{key!r}]", limit, at_least=0.0)
        if self.otherwise is not None:
            check_number("otherwise", self.otherwise, at_least=0.0)
        check_order(self.order)

    @property
    def count(self) -> int:
        """Number of groups: one per key of `limits`, and a last one for all other parameters."""
        return len(self.limits) + 1

    def groups(self, names: Sequence[str], param_groups: Sequence[tuple[int, str | None]]) -> list[int]:
        """Returns the group index of each parameter.

        Args:
            names: names of all parameters.
            param_groups: for each parameter, the index and the "name" of its param_group.
        """
        keys = list(self.limits)
        return [
            next((index for index, key in enumerate(keys) if _matches(key, name, group)), len(keys))
            for name, group in zip(names, param_groups, strict=True)
        ]

    def unmatched(self, names: Sequence[str], param_groups: Sequence[tuple[int, str | None]]) -> list[str]:
        """Returns the keys of `limits` that match no parameter, as the user would write them."""
        pairs = list(zip(names, param_groups, strict=True))
        return [f"limits[{key!r}]" for key in self.limits if not any(_matches(key, *pair) for pair in pairs)]

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        limits = [*self.limits.values(), self.otherwise]
        # Filled on the device: a tensor made from a list would be copied from the host at every step.
        bounds = torch.cat([norms.new_full((1,), math.inf if limit is None else limit) for limit in limits])
        return _limit(total, factor=_torch_coefficient(norms, bounds))


@dataclass(frozen=True)
class AdaptiveClip(ClipPolicy):
    """Bounds the gradient of each row by a fraction of the norm of its weights (AGC).

        for each row:  bound = clipping * max(norm of the weights, eps)
                       if norm > bound:  gradient *= bound / max(norm, 1e-6)

    A row is a row of a matrix or an output channel of a convolution; a vector or a scalar is one row.

    Args:
        clipping: the fraction. The authors use 0.01 for batches of 4096 and more for smaller ones.
        eps: lower bound of the norm of the weights, for weights that start at zero.
        exclude: shell patterns of parameter names that are not clipped. The authors exclude the last layer.

    Examples:
        >>> policy = AdaptiveClip(0.01, exclude=("head.*",))
        >>> policy.rows("conv.weight", (64, 3, 7, 7)), policy.rows("head.weight", (10, 64))
        (64, 0)
        >>> state = {"weight_norms": torch.tensor([5.0, 0.0])}
        >>> policy.limit(torch.tensor([0.5, 0.005]), torch.tensor(0.5), state).factor
        tensor([0.1000, 0.0020])

    Reference: Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", ICML 2021.
    """

    clipping: float = 0.01
    eps: float = 1e-3
    exclude: tuple[str, ...] = ()
    per: ClassVar[Per] = "row"

    def __post_init__(self) -> None:
        check_number("clipping", self.clipping, above=0.0, below=math.inf)
        check_number("eps", self.eps, above=0.0, below=math.inf)
        exclude: object = self.exclude
        if not isinstance(exclude, (tuple, list)) or not all(isinstance(pattern, str) for pattern in exclude):
            raise TypeError(f"exclude must be a tuple of patterns such as ('head.*',), got {exclude!r}.")
        object.__setattr__(self, "exclude", tuple(exclude))

    def rows(self, name: str, shape: Sequence[int]) -> int:
        """Returns the number of rows of a parameter; 0 if it is excluded."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude):
            return 0
        return shape[0] if len(shape) > 1 else 1

    def unmatched(self, names: Sequence[str], param_groups: Sequence[tuple[int, str | None]]) -> list[str]:
        """Returns the patterns of `exclude` that match no parameter, as the user would write them."""
        return [f"exclude={pattern!r}" for pattern in self.exclude if not fnmatch.filter(names, pattern)]

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        """Returns the limit for one step; see `ClipPolicy.limit`.

        Args:
            norms: one per row.
            total: global norm.
            state: "weight_norms", supplied by the caller: norm of the weights of each row.
        """
        bounds = self.clipping * state["weight_norms"].clamp(min=self.eps)
        return _limit(total, factor=torch.where(norms > bounds, bounds / norms.clamp(min=1e-6), 1.0))


@dataclass(frozen=True)
class AdaGC(ClipPolicy):
    """Bounds the norm of each parameter's gradient by a multiple of its own running average.

        first `warmup` steps:  clip the global norm to `warmup_norm`
                               average = min(average, clipped norm)
        then:                  factor = min(1, ratio * average / norm)
                               average = beta * average + (1 - beta) * factor * norm

    A gradient of norm 0 leaves its average unchanged, so that a layer without gradients is not clipped to 0 later.

    Args:
        ratio: largest ratio of a norm to its average.
        beta: decay of the average.
        warmup: number of steps with global clipping.
        warmup_norm: global limit of these steps.

    Examples:
        >>> policy = AdaGC(warmup=1, warmup_norm=1.0)
        >>> state, norms, total = policy.init(), torch.tensor([3.0, 4.0]), torch.tensor(5.0)
        >>> state = policy.update(norms, total, policy.limit(norms, total, state), state)
        >>> policy.limit(torch.tensor([0.3, 8.0]), torch.tensor(8.0), state).factor
        tensor([1.0000, 0.1050])

    Reference: Wang et al., "AdaGC: Improving Training Stability for Large Language Model Pretraining", 2025.
    """

    ratio: float = 1.05
    beta: float = 0.98
    warmup: int = 100
    warmup_norm: float = 1.0
    per: ClassVar[Per] = "tensor"

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, above=0.0, below=math.inf)
        check_number("beta", self.beta, above=0.0, below=1.0)
        check_number("warmup", self.warmup, at_least=1, integer=True)
        check_number("warmup_norm", self.warmup_norm, at_least=0.0)

    def init(self) -> dict[str, Tensor]:
        average = torch.full((), math.inf, dtype=torch.float64)
        return {"count": torch.zeros((), dtype=torch.int64), "average": average}

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        is_warmup = state["count"] < self.warmup
        factor = torch.where(
            is_warmup,
            _torch_coefficient(total, self.warmup_norm),
            _exact_coefficient(norms, self.ratio * state["average"]),
        )
        bound = torch.full_like(total, math.inf).masked_fill(is_warmup, self.warmup_norm)
        return _limit(total, factor=factor, bound=bound)

    def update(self, norms: Tensor, total: Tensor, limit: Limit, state: State) -> dict[str, Tensor]:
        average, clipped = state["average"], norms * limit.factor
        is_first = (state["count"] < self.warmup) | average.isinf()
        new = self.beta * average + (1.0 - self.beta) * clipped
        new = torch.where(is_first, torch.minimum(average, clipped), new)
        return {"count": state["count"] + 1, "average": torch.where(clipped > 0, new, average)}


@dataclass(frozen=True)
class QuantileClip(ClipPolicy):
    """Clips the global norm to a quantile of the most recent norms, the current one included (AutoClip).

        bound = quantile(last `window` norms before clipping, quantile)

    Args:
        quantile: between 0 and 1, interpolated linearly. The authors use 0.1, which clips nearly every step.
        window: number of norms in memory. The authors keep all.

    Examples:
        >>> policy = QuantileClip(0.5, window=4)
        >>> state = policy.init()
        >>> for norm in torch.tensor([1.0, 2.0, 9.0]):
        ...     limit = policy.limit(norm.reshape(1), norm, state)
        ...     state = policy.update(norm.reshape(1), norm, limit, state)
        >>> limit.bound
        tensor(2., dtype=torch.float64)

    Reference: Seetharaman et al., "AutoClip: Adaptive Gradient Clipping for Source Separation Networks", 2020.
    """

    quantile: float = 0.1
    window: int = 1000

    def __post_init__(self) -> None:
        check_number("quantile", self.quantile, above=0.0, below=1.0)
        check_number("window", self.window, at_least=2, integer=True)

    def init(self) -> dict[str, Tensor]:
        return _empty_window(self.window)

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        window = _append(state, total)
        bound = torch.nanquantile(torch.where(window.isfinite(), window, math.nan), self.quantile)
        return _limit(total, factor=_exact_coefficient(total, bound), bound=bound)

    def update(self, norms: Tensor, total: Tensor, limit: Limit, state: State) -> dict[str, Tensor]:
        return {"norms": _append(state, total)}


@dataclass(frozen=True)
class ZScoreClip(ClipPolicy):
    """Clips outliers of the global norm towards its running mean; larger outliers more strongly (ZClip).

        z = (norm - mean) / (std + 1e-6)
        if z > threshold:  bound = mean + threshold^2 / z * std
        x = min(norm, bound)
        mean = alpha * mean + (1 - alpha) * x
        variance = alpha * variance + (1 - alpha) * (x - mean)^2

    Mean and variance start as those of the first `warmup` norms.

    Args:
        threshold: number of standard deviations above the mean from which norms are clipped.
        alpha: decay of mean and variance.
        warmup: number of steps before clipping starts.

    Examples:
        >>> policy, norm = ZScoreClip(warmup=4), torch.tensor(10.0)
        >>> state = {"count": torch.tensor(4), "mean": torch.tensor(2.0), "variance": torch.tensor(0.5)}
        >>> policy.limit(norm.reshape(1), norm, state).bound
        tensor(2.3906)

    Reference: Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", 2025.
    """

    threshold: float = 2.5
    alpha: float = 0.97
    warmup: int = 25

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, above=0.0, below=math.inf)
        check_number("alpha", self.alpha, above=0.0, below=1.0)
        check_number("warmup", self.warmup, at_least=1, integer=True)

    def init(self) -> dict[str, Tensor]:
        return {
            "count": torch.zeros((), dtype=torch.int64),
            "mean": torch.zeros((), dtype=torch.float64),
            "variance": torch.zeros((), dtype=torch.float64),
        }

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        deviation = state["variance"].clamp(min=0.0).sqrt()
        z = (total - state["mean"]) / (deviation + 1e-6)
        is_spike = (z > self.threshold) & (state["count"] >= self.warmup)
        bound = torch.where(is_spike, state["mean"] + self.threshold**2 / z * deviation, math.inf)
        return _limit(total, factor=_exact_coefficient(total, bound), bound=bound)

    def update(self, norms: Tensor, total: Tensor, limit: Limit, state: State) -> dict[str, Tensor]:
        count, mean, variance = state["count"], state["mean"], state["variance"]
        norm = torch.minimum(total, limit.bound)
        is_warm = count >= self.warmup
        decay = torch.where(is_warm, self.alpha, 1.0 - 1.0 / (count + 1).to(mean.dtype))
        new_mean = decay * mean + (1.0 - decay) * norm
        # During warm-up this is Welford's update of the variance of all norms so far.
        deviation = norm - torch.where(is_warm, new_mean, mean)
        new_variance = decay * variance + (1.0 - decay) * (norm - new_mean) * deviation
        return {"count": count + 1, "mean": new_mean, "variance": new_variance}


@dataclass(frozen=True)
class SkipSpikes(ClipPolicy):
    """Rejects steps whose global norm is far above the most recent accepted norms.

        bound = min(max_norm, mean + sigmas * std of the last `window` accepted norms)
        reject unless norm <= bound

    A rejected step leaves parameters, optimizer state and loss scale unchanged. If the norms rise permanently, every
    later step is rejected: watch `outcome.rejected`.

    Args:
        sigmas: number of sample standard deviations above the mean from which steps are rejected.
        window: number of accepted norms in memory. `sigmas` applies once half of it is filled.
        max_norm: absolute bound, from the first step on; inf for none.

    Examples:
        >>> policy, norm = SkipSpikes(max_norm=50.0), torch.tensor(60.0)
        >>> policy.limit(norm.reshape(1), norm, policy.init()).reject
        tensor(True)

    Reference: SkipStepOptimizer of OLMo-core; skip_and_clip_by_global_norm of axlearn.
    """

    sigmas: float = 6.0
    window: int = 128
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        check_number("sigmas", self.sigmas, above=0.0, below=math.inf)
        check_number("window", self.window, at_least=4, integer=True)
        check_number("max_norm", self.max_norm, above=0.0)

    def init(self) -> dict[str, Tensor]:
        return _empty_window(self.window)

    def limit(self, norms: Tensor, total: Tensor, state: State) -> Limit:
        window = state["norms"]
        is_filled = window.isfinite()
        count = is_filled.sum()
        mean = torch.where(is_filled, window, 0.0).sum() / count.clamp(min=1)
        squares = torch.where(is_filled, (window - mean) ** 2, 0.0).sum()
        bound = mean + self.sigmas * (squares / (count - 1).clamp(min=1)).sqrt()
        # Norms that never vary have std 0, and rounding must not turn the next one into a spike.
        bound = torch.where(count >= self.window // 2, bound * (1.0 + 1e-6), math.inf).clamp(max=self.max_norm)
        # Negated, so that NaN is rejected.
        return _limit(total, bound=bound, reject=~(total <= bound))

    def update(self, norms: Tensor, total: Tensor, limit: Limit, state: State) -> dict[str, Tensor]:
        return {"norms": _append(state, total)}


@dataclass(frozen=True)
class Chain:
    """Clip policies in the order in which they apply. Created by `chain`."""

    policies: tuple[ClipPolicy, ...]


def chain(*policies: object) -> Chain:
    """Applies clip policies one after the other; each policy receives the norms as clipped by the previous ones.

    If one policy rejects a step, the step is skipped and no policy updates its state.

    Args:
        policies: policies, chains, or numbers (ClipByNorm). All must use norms of the same order. AdaptiveClip must be
            the first, ClipByValue the last.

    Examples:
        >>> chain(SkipSpikes(), 1.0).policies[1]
        ClipByNorm(max_norm=1.0, order=2.0)

    Reference: optax.chain.
    """
    if not policies or any(policy is None for policy in policies):
        raise TypeError(f"chain takes clip policies such as ClipByNorm(1.0), got {policies!r}.")
    flat = tuple(member for policy in policies for member in resolve_clip(policy))
    orders = {getattr(policy, "order", 2.0) for policy in flat}
    if len(orders) > 1:
        raise ValueError(f"the policies of a chain must use norms of the same order, got orders {sorted(orders)}.")
    if any(getattr(policy, "per", "model") == "row" for policy in flat[1:]):
        raise ValueError("AdaptiveClip must be the first policy of a chain: it measures rows of unclipped gradients.")
    if any(isinstance(policy, ClipByValue) for policy in flat[:-1]):
        raise ValueError("ClipByValue must be the last policy of a chain: the norms after it are unknown.")
    return Chain(flat)


def resolve_clip(clip: object) -> tuple[ClipPolicy, ...]:
    """Returns the policies for GradientControl's `clip=`, in order; empty for None.

    Args:
        clip: None, a number (ClipByNorm), a policy, or a chain.

    Raises:
        TypeError: anything else.
        ValueError: a negative number, or a policy with an invalid `per` or `order`.
    """
    if clip is None:
        return ()
    if isinstance(clip, Chain):
        return clip.policies
    if isinstance(clip, (int, float)) and not isinstance(clip, bool):
        check_number("clip", clip, at_least=0.0)
        return (ClipByNorm(float(clip)),)
    methods = [callable(getattr(clip, name, None)) for name in ("init", "limit", "update")]
    if isinstance(clip, type) or not all(methods):
        raise TypeError(
            "clip must be None, a number (the largest norm) or a clip policy (init, limit and update) such as "
            f"ClipByNorm(1.0), got {clip!r}."
        )
    per = getattr(clip, "per", "model")
    if per not in get_args(Per):
        raise ValueError(f"per must be one of {', '.join(get_args(Per))}, got {per!r} in {clip!r}.")
    check_order(getattr(clip, "order", 2.0))
    return (cast(ClipPolicy, clip),)


def _limit(
    total: Tensor,
    *,
    factor: Tensor | None = None,
    bound: Tensor | float = math.inf,
    reject: Tensor | None = None,
    value: Tensor | None = None,
) -> Limit:
    return Limit(
        factor=torch.ones_like(total) if factor is None else factor,
        bound=bound if isinstance(bound, Tensor) else torch.full_like(total, bound),
        reject=torch.zeros_like(total, dtype=torch.bool) if reject is None else reject,
        value=value,
    )


def _torch_coefficient(norm: Tensor, max_norm: Tensor | float) -> Tensor:
    """The clip coefficient of torch's clip_grad_norm_."""
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def _exact_coefficient(norm: Tensor, bound: Tensor) -> Tensor:
    # torch's epsilon of 1e-6 would scale norms of 1e-7 down tenfold. Here the factor of norms within the bound is 1.
    return torch.where(norm > bound, bound / norm, 1.0)


def _matches(key: str | int, name: str, param_group: tuple[int, str | None]) -> bool:
    if isinstance(key, int):
        return param_group[0] == key
    return param_group[1] == key or fnmatch.fnmatchcase(name, key)


def _empty_window(size: int) -> dict[str, Tensor]:
    """State of a policy with a window of norms, oldest first; unused entries are inf."""
    return {"norms": torch.full((size,), math.inf, dtype=torch.float64)}


def _append(state: State, norm: Tensor) -> Tensor:
    return torch.cat([state["norms"][1:], norm.to(state["norms"].dtype).reshape(1)])
