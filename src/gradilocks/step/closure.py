"""Steps with a closure, through which the optimizer evaluates the loss itself, once or several times."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _SkipStep(Exception):
    """Raised in the closure to leave the optimizer's step."""


def step_with_closure(optimizer: Any, closure: Callable[[], Tensor], unscale_and_clip: Callable[[], bool]) -> None:
    """Steps the optimizer through the closure, or leaves it bit for bit unchanged.

    Parameters and state are copied first, because the optimizer may have changed the parameters before an evaluation
    turns out to be non-finite.

    Args:
        optimizer: calls the closure as often as it needs.
        closure: clears the gradients, runs `control.backward(loss)` and returns the loss.
        unscale_and_clip: unscales and clips the gradients in place; returns False to skip the step.
    """

    def evaluate() -> Tensor:
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            raise TypeError("the closure must return the loss; it returned None.")
        if not unscale_and_clip():
            raise _SkipStep
        return loss

    params = [param for group in optimizer.param_groups for param in group["params"]]
    values = [param.detach().clone() for param in params]
    state = {param: copy.deepcopy(entry) for param, entry in optimizer.state.items()}
    try:
        optimizer.step(evaluate)
    except BaseException as error:
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        if not isinstance(error, _SkipStep):
            raise
