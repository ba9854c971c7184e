"""A model enters, is run for a look at it, and leaves as it was; and so do the random generators.

An audit runs a model on batches of its own, and a trace runs a step once more. Neither may leave
anything behind: training goes on bit for bit as if nobody had looked.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradilocks._torch import buffers_of, post_accumulate_hooks, set_buffer, version
from gradilocks.errors import GradilocksError

__all__ = ["Generators", "unchanged", "version_of", "waiting"]

_PLAIN = (int, float, bool, str, bytes, complex, type(None))


class Generators(NamedTuple):
    """Where the generators stand that torch, Python and NumPy draw from when nobody names one."""

    cpu: Tensor
    devices: dict[int, Tensor]
    """By the number of a CUDA device."""
    python: Any
    """None if it was not looked at; likewise `numpy`."""
    numpy: Any

    @classmethod
    def now(
        cls, devices: Iterable[int] | None = None, *, python: bool = True, numpy: bool = True
    ) -> Generators:
        """Where they stand at this moment.

        Args:
            devices: the CUDA devices to look at; None for all.
            python, numpy: whether to look at those of Python and NumPy, which takes longer.
        """
        on_devices: dict[int, Tensor] = {}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            numbers = range(torch.cuda.device_count()) if devices is None else devices
            on_devices = {number: torch.cuda.get_rng_state(number) for number in numbers}
        theirs = _numpy() if numpy else None
        return cls(
            torch.get_rng_state(),
            on_devices,
            random.getstate() if python else None,
            None if theirs is None else theirs.get_state(),
        )

    def unknown(self) -> Generators:
        """Where those stand at this moment that this does not tell of."""
        return Generators.now((), python=self.python is None, numpy=self.numpy is None)

    def moved(self) -> tuple[bool, bool]:
        """Whether somebody has drawn from Python's since then, and from NumPy's."""
        theirs = _numpy()
        now = None if theirs is None or self.numpy is None else theirs.get_state()
        python = self.python is not None and self.python != random.getstate()
        return python, now is not None and repr(now) != repr(self.numpy)

    def restore(self) -> None:
        """Puts them back there."""
        torch.set_rng_state(self.cpu)
        for number, state in self.devices.items():
            torch.cuda.set_rng_state(state, number)
        if self.python is not None:
            random.setstate(self.python)
        theirs = _numpy()
        if theirs is not None and self.numpy is not None:
            theirs.set_state(self.numpy)


def _numpy() -> Any:
    """NumPy's random numbers, if somebody has imported them."""
    return getattr(sys.modules.get("numpy"), "random", None)


def version_of(tensor: Tensor) -> int:
    """torch's count of the writes into a tensor; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else version(tensor)


@contextmanager
def waiting() -> Iterator[None]:
    """Inside, a wait for a GPU is none that torch is to warn of, or to refuse, for the user."""
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    if mode:
        torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def unchanged(models: Iterable[nn.Module], *, doing: str) -> Iterator[None]:
    """Inside, gradients are None, and hooks that would step an optimizer are out of the way.

    What modules count in attributes of their own is put back too, if it is a plain number or text.
    `doing` says what is done to the models, for the error.

    Raises:
        GradilocksError: a parameter was changed inside, which is beyond repair.
    """
    whole = nn.ModuleList(models)
    generators = Generators.now()
    parts = list(whole.modules())[1:]
    training = [(module, module.training) for module in parts]
    counted = [
        (module, {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN)})
        for module in parts
    ]
    # BatchNorm's statistics and the like, by object and by value.
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in parts
        for name, buffer in buffers_of(module).items()
    ]
    named = {
        f"{at}.{name}": p for at, model in enumerate(whole) for name, p in model.named_parameters()
    }
    gradients = [(param, param.grad) for param in whole.parameters()]
    # An optimizer that steps inside backward does so by a hook after a gradient is added up.
    late_hooks = [post_accumulate_hooks(param) for param in whole.parameters()]
    held = [dict(hooks) for hooks in late_hooks]
    before = {name: version_of(param) for name, param in named.items()}
    try:
        for param, _ in gradients:
            param.grad = None
        for hooks in late_hooks:
            hooks.clear()
        yield
        after = {name: version_of(param) for name, param in named.items()}
    finally:
        for hooks, were in zip(late_hooks, held, strict=True):
            hooks.update(were)
        for param, gradient in gradients:
            param.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                set_buffer(module, name, buffer)
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for module, was in training:
            module.training = was
        for module, values in counted:
            vars(module).update(values)
        generators.restore()
    for name, number in after.items():
        if before.get(name) != number:
            raise GradilocksError(
                f"{name.partition('.')[2]} was changed while the model was {doing}. What computes "
                "the loss must leave parameters and optimizers alone: nothing is trained here."
            )
