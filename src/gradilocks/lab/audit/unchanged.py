"""A model enters a block of code and leaves it as it was: gradients, buffers, modes, generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradilocks._torch import buffers_of, post_accumulate_hooks, set_buffer, version
from gradilocks.errors import GradilocksError

__all__ = ["unchanged"]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, gradients are None, and hooks that would step an optimizer are out of the way.

    Raises:
        GradilocksError: a parameter was changed inside, which is beyond repair.
    """
    with ExitStack() as stack:
        for act in (_generators, _modes, _buffers, _gradients, _late_hooks):
            stack.callback(act(model))
        before = {name: _version(param) for name, param in model.named_parameters()}
        yield
        after = {name: _version(param) for name, param in model.named_parameters()}
    for name, counted in after.items():
        if before.get(name) != counted:
            raise GradilocksError(
                f"{name} was changed while the model was audited. loss_fn must return the loss and "
                "leave the optimizer alone: nothing is trained here."
            )


def _version(param: Tensor) -> int:
    return -1 if param.is_inference() else version(param)


def _generators(model: nn.Module) -> Callable[[], None]:
    """Those that torch, Python and NumPy draw from when nobody names one."""
    cpu = torch.get_rng_state()
    on_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if on_gpus else None
    python = random.getstate()
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    drawn = numpy.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(drawn)

    return restore


def _modes(model: nn.Module) -> Callable[[], None]:
    were = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in were:
            module.training = training

    return restore


def _buffers(model: nn.Module) -> Callable[[], None]:
    """BatchNorm's statistics and the like, by object and by value."""
    were = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
    ]

    @torch.no_grad()
    def restore() -> None:
        for module, name, buffer, value in were:
            set_buffer(module, name, buffer)
            if buffer is not None and value is not None and not torch.equal(buffer, value):
                buffer.copy_(value)

    return restore


def _gradients(model: nn.Module) -> Callable[[], None]:
    were = [(param, param.grad) for param in model.parameters()]
    for param, _ in were:
        param.grad = None

    def restore() -> None:
        for param, gradient in were:
            param.grad = gradient

    return restore


def _late_hooks(model: nn.Module) -> Callable[[], None]:
    """An optimizer that steps inside backward does so by a hook after a gradient is added up."""
    were = []
    for param in model.parameters():
        hooks = post_accumulate_hooks(param)
        if hooks:
            were.append((hooks, dict(hooks)))
            hooks.clear()

    def restore() -> None:
        for hooks, held in were:
            hooks.update(held)

    return restore
