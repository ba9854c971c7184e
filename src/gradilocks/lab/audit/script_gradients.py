"""A script's models and optimizers, met as they run: their gradients are counted from the start.

Nothing says which modules will be trained before an optimizer steps, so every module is followed,
by torch's global hooks. What belongs to no optimizer's model is left out in the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from gradilocks._torch import DYNAMO, in_backward
from gradilocks.eager import UNCOMPILED
from gradilocks.lab.audit.counted import Counted
from gradilocks.lab.audit.module_hooks import Listener, gather, is_unit
from gradilocks.lab.tensors import tensors_in
from gradilocks.observe.interpreter import when_imported
from gradilocks.observe.rank_parts import partners_of
from gradilocks.observe.rank_post import RankPost
from gradilocks.observe.script_models import owners_of
from gradilocks.ranks.layout import has_other_ranks
from gradilocks.record.environment import rank_here
from gradilocks.step.events import PerDriver, Step, StepListener

__all__ = ["ScriptGradients"]


class ScriptGradients(StepListener):
    """Counts the gradients of a script and its steps, and keeps the models that they train.

    Args:
        guard: around what is done in a forward or backward pass.
        stepped: told how many steps the busiest optimizer has taken; may raise to stop the script.

    Attributes:
        steps: how many the busiest optimizer has taken.
        post: brings to rank 0 what others have counted; None where there are no others.
    """

    def __init__(self, guard: Callable[..., Any], stepped: Callable[[int], None]) -> None:
        self._guard, self._stepped = guard, stepped
        self._listener = Listener()
        self._listener.guard = guard
        self._numbers = PerDriver(lambda: itertools.count(1))  # Of the steps of each.
        self.steps = 0
        self.post: RankPost | None = None
        self._models: dict[int, nn.Module] = {}  # Held: a script may be done with them before us.
        self._params: dict[Tensor, str] = {}  # With the names of those that no model owns.
        self._is_uncompiled = False
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        when_imported(DYNAMO, self._run_eagerly)

    def close(self) -> None:
        """Takes every hook away."""
        for handle in self._handles:
            handle.remove()
        self._listener.remove()
        if self._is_uncompiled:
            UNCOMPILED.__exit__()
            self._is_uncompiled = False

    def counted(self) -> Counted:
        """What was counted in this process."""
        return gather(self._listener, list(self._models.values()), others=self._params)

    def partners(self) -> list[int]:
        """The ranks that train a model together with this one, as far as it is known."""
        return sorted(partners_of(list(self._params), list(self._models.values())))

    def _run_eagerly(self) -> None:
        """Compiled code would run past the hooks."""
        UNCOMPILED.__enter__()
        self._is_uncompiled = True

    # --- modules -------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if is_unit(module):
            self._guard(self._listener.before_forward, module, args)
        if self._listener.add_module(module):
            for part in module.modules():
                self._listener.add_module(part)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and is_unit(module):
            self._guard(self._listener.after_forward, module, args, output)

    # --- the scale that gradients carry --------------------------------------------------------

    def loss_scaled(self, driver: Any, loss: Any, scaled: Any, scale: Tensor) -> None:
        """Whenever these losses are run backward, the scale is carried.

        The hook is the first thing that happens in a loss's own backward pass.
        """
        held = scale.detach().clone()
        for _, tensor in tensors_in(scaled, ""):
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: self._listener.carry(held)
                )

    def backward_begins(self, tensors: Any, gradients: Any) -> None:
        self.grad_begins(tensors)

    def grad_begins(self, outputs: Any) -> None:
        """A backward pass within another, as of a checkpoint, changes nothing."""
        if not in_backward():
            self._listener.scale = 1.0
            self._guard(self._listener.count_losses, outputs)
            self._listener.hook_parameters()

    def backward_ended(self) -> None:
        if not in_backward():
            self._listener.unhook_parameters()
            self._listener.count_shards()

    # --- steps ---------------------------------------------------------------------------------

    def step_begins(self, step: Step) -> None:
        """Its parameters are trained."""
        if self.post is None and has_other_ranks():
            self.post = RankPost(*rank_here(), "audit")
        carried = self._listener.scale if step.is_of_control else step.carried
        params = list(step.parameters())
        self._listener.count_unhooked(params, scale=carried)
        if any(param not in self._params for param in params):
            self._models.update((id(model), model) for model in owners_of(params))
            for place, param in enumerate(params):
                self._params.setdefault(param, f"parameter {place}")

    def step_ended(self, step: Step) -> None:
        self.steps = max(self.steps, next(self._numbers.of(step)))
        self._stepped(self.steps)
