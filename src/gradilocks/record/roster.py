"""An optimizer and names for its parameters → what a run file says of it, and backward order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from gradilocks.names import Names
from gradilocks.ranks.layout import is_distributed
from gradilocks.runfile import OptimizerInfo
from gradilocks.step.gradients import every_parameter

__all__ = ["info_of", "is_whole", "order_of"]


def info_of(optimizer: Any, *, index: int, names: Mapping[Tensor, str] | None) -> OptimizerInfo:
    """What a run file says of an optimizer."""
    params = list(every_parameter((optimizer,)))
    given = names or {}
    own = Names(None, (optimizer,)).of(params)
    return OptimizerInfo(
        index=index,
        kind=type(optimizer).__name__,
        names=tuple(given.get(param, name) for param, name in zip(params, own, strict=True)),
        sizes=tuple(0 if is_lazy(param) else param.numel() for param in params),
        dtypes=tuple(str(param.dtype).removeprefix("torch.") for param in params),
    )


def order_of(optimizer: Any, names: Mapping[Tensor, str] | None) -> list[int]:
    """The places of its parameters in backward order: the order of the names, turned round.

    Parameters that have no name come last, in the optimizer's order, turned round.
    """
    at = {id(param): number for number, param in enumerate(names or {})}
    params = list(every_parameter((optimizer,)))
    ranked = [(at.get(id(param), -1), place) for place, param in enumerate(params)]
    return [place for _, place in sorted(ranked, reverse=True)]


def is_whole(optimizer: Any) -> bool:
    """Whether this process sees each gradient whole: not where they are spread over ranks."""
    return not any(is_distributed(param) for param in every_parameter((optimizer,)))
