"""A model enters, is run for a look at it, and leaves as it was; and so do the random generators.

An audit runs a model on batches of its own, and a trace runs a step once more. Neither may leave
anything behind: training goes on bit for bit as if nobody had looked.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradilocks._torch import (
    buffers_of,
    post_accumulate_hooks,
    same_version,
    set_buffer,
    version,
    without_gradient_hooks,
)
from gradilocks.errors import GradilocksError

__all__ = ["Generators", "unchanged", "version_of", "waiting"]

_MOST_BYTES = 256 << 20
"""Of what is copied while a model is run for a look at it."""
_INTERNAL = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


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
def unchanged(models: Iterable[nn.Module], *, doing: str = "") -> Iterator[None]:
    """Inside, gradients are None, and hooks that would step an optimizer are out of the way.

    What modules hold beside their trained parameters is lent to what runs inside as a copy: their
    buffers, frozen parameters and tensors in attributes, up to 256 MiB, and on a CPU trained
    parameters too if they fit. What they count or collect in numbers, texts, lists and dicts is put
    back, and so are generators of their own. No version of a tensor moves on: a backward pass that
    is still to come finds what it has saved.

    Args:
        models: that are run.
        doing: what is done to them, if it is an error that a parameter is changed. Else hooks on
            parameters, which are for training, are out of the way as well.

    Raises:
        GradilocksError: a parameter was changed inside.
    """
    whole = nn.ModuleList(models)
    params = list(whole.parameters())
    names = {id(p): name.partition(".")[2] for name, p in whole.named_parameters()}
    before = {id(param): version_of(param) for param in params}
    with ExitStack() as stack:
        stack.callback(Generators.now().restore)
        lent = _lend(whole, stack)
        _keep_attributes(whole, stack)
        for param in params:
            stack.callback(setattr, param, "grad", param.grad)
            # An optimizer that steps inside backward does so by a hook after a gradient is added.
            late = post_accumulate_hooks(param)
            stack.callback(late.update, dict(late))
            late.clear()
            if not doing:
                stack.enter_context(without_gradient_hooks(param))
            param.grad = None
        yield
        changed = [
            names[id(param)]
            for param in params
            if before[id(param)] != version_of(param) and (doing or id(param) not in lent)
        ]
    if changed:
        raise GradilocksError(
            f"{changed[0]} was changed while the model was {doing or 'run'}. What computes "
            "the loss must leave parameters and optimizers alone: nothing is trained here."
        )


def _lend(whole: nn.Module, stack: ExitStack) -> set[int]:
    """Copies what a forward pass may write to; at the end of the stack the originals are back.

    Returns the ids of the tensors that were copied.
    """
    held: dict[int, Tensor] = {}
    trained: dict[int, Tensor] = {}
    for module in whole.modules():
        written = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm
        for param in module.parameters(recurse=False):
            frozen = not param.requires_grad or written
            (held if frozen else trained)[id(param)] = param
        for value in (*buffers_of(module).values(), *vars(module).values()):
            if isinstance(value, Tensor):
                held[id(value)] = value
        for name, buffer in buffers_of(module).items():
            stack.callback(set_buffer, module, name, buffer)
    left = _MOST_BYTES
    for tensor in sorted(held.values(), key=_size):
        left -= _size(tensor)
        if left < 0:
            del held[id(tensor)]
    on_host = all(each.device.type == "cpu" for each in trained.values())
    if on_host and sum(map(_size, trained.values())) <= max(left, 0):
        held |= trained
    lent = set()
    for tensor in held.values():
        try:
            original, copied = tensor.data, tensor.data.clone()
            stack.enter_context(same_version(tensor))
            stack.callback(setattr, tensor, "data", original)
            tensor.data = copied
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            continue  # As a parameter that has no shape yet: nothing can be written to it either.
        lent.add(id(tensor))
    return lent


def _size(tensor: Tensor) -> int:
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, ValueError, TypeError):
        return 0


def _keep_attributes(whole: nn.Module, stack: ExitStack) -> None:
    """Puts back, at the end of the stack, what modules keep in attributes of their own."""
    for module in whole.modules():
        own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
        stack.callback(vars(module).update, own)
        stack.callback(setattr, module, "training", module.training)
        for value in own.values():
            if isinstance(value, torch.Generator):
                stack.callback(value.set_state, value.get_state())
            elif type(value) in _CONTAINERS:
                stack.callback(_refill, value, copy.copy(value))


def _refill(container: Any, held: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(held)
