"""A step with a closure: an optimizer that evaluates the loss itself, once or many times.

Each evaluation's gradients are judged and made true in place before the optimizer sees them. One
that is not finite, or an error, undoes the whole step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from gradilocks.step.framework_wrappers import refuse_second_scaler
from gradilocks.step.half_sgd import moving
from gradilocks.step.own_step import inner_optimizers

__all__ = ["BeforeStep", "step_with_closure"]


class _Skipped(Exception):
    """Leaves an optimizer's step from inside its closure."""


def step_with_closure(
    optimizer: Any,
    closure: Callable[[], Tensor],
    *,
    make_true: Callable[[], bool],
    gradients_are_waiting: bool,
) -> None:
    """Steps `optimizer` through `closure`, or leaves it bit for bit as it was.

    Args:
        optimizer: calls the closure as often as it likes.
        closure: clears the gradients, runs backward on the scaled loss and returns the loss.
        make_true: unscales and clips the gradients in place; False if they are not finite.
        gradients_are_waiting: whether the optimizer is to begin with gradients that are there
            already, as SAM does.
    """

    def require_finite() -> None:
        if not make_true():
            raise _Skipped

    def evaluate() -> Tensor:
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            raise TypeError("the closure must return the loss, it returned None.")
        require_finite()
        return loss

    refuse_second_scaler(optimizer, steps=True)
    before = BeforeStep(optimizer)
    try:
        if gradients_are_waiting:
            require_finite()
        moving(optimizer, optimizer.step)(evaluate)
    except _Skipped:
        before.restore()
    except BaseException:
        before.restore()
        raise


class BeforeStep:
    """An optimizer's parameters and state, and that of those inside it, so that a step is undone.

    Only a step with a closure needs one: by the time a later evaluation turns out non-finite, the
    optimizer has moved the parameters already. It costs a copy of both.
    """

    def __init__(self, optimizer: Any) -> None:
        self._params = [
            (param, param.detach().clone())
            for group in optimizer.param_groups
            for param in group["params"]
        ]
        # What an optimizer inside a wrapper remembers is its own, unless the wrapper forwards it.
        self._states: list[tuple[Any, dict[Any, Any]]] = []
        seen: set[int] = set()
        for holder in (optimizer, *inner_optimizers(optimizer)):
            state = getattr(holder, "state", None)
            if isinstance(state, MutableMapping) and id(state) not in seen:
                seen.add(id(state))
                kept = {param: copy.deepcopy(entry) for param, entry in state.items()}
                self._states.append((holder, kept))

    def restore(self) -> None:
        """Puts everything back bit for bit."""
        with torch.no_grad():
            for param, before in self._params:
                param.copy_(before)
        for holder, kept in self._states:
            holder.state.clear()
            holder.state.update(kept)
