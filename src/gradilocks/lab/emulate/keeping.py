"""``emulate(keep=...)``: modules that stay in float32, by hooks before and after their forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

__all__ = ["holding", "modules_to_keep"]


class Held(Protocol):
    """What stands still while a module that is kept runs in its thread."""

    thread: int
    held: int


def modules_to_keep(keep: nn.Module | Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules as a tuple.

    Raises:
        TypeError: there is something else among them.
        ValueError: there is one that is never called.
    """
    given: Any = keep
    modules: list[nn.Module] = []
    # A Sequential is iterable, too.
    one = isinstance(given, (nn.Module, str)) or not isinstance(given, Iterable)
    for each in (given,) if one else given:
        if not isinstance(each, nn.Module):
            shown = repr(each) if isinstance(each, str) else f"a {type(each).__name__}"
            raise TypeError(
                f"keep must be modules, got {shown}. For a name: model.get_submodule(name)."
            )
        if isinstance(each, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise ValueError(
                "keep: the out_proj of an nn.MultiheadAttention is computed by the attention "
                "itself. Keep the nn.MultiheadAttention."
            )
        modules.append(each)
    return tuple(modules)


@contextmanager
def holding(modules: Iterable[nn.Module], mode: Held) -> Iterator[None]:
    """Holds the mode while one of the modules, or of those inside them, runs."""
    every = {inner: None for module in modules for inner in module.modules()}
    handles = [
        handle
        for module in every
        for handle in (
            module.register_forward_pre_hook(_Moving(mode, +1), prepend=True),
            module.register_forward_hook(_Moving(mode, -1), always_call=True),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Moving:
    """A hook that copies of the module, and what is saved of it, do without."""

    def __init__(self, mode: Held, by: int) -> None:
        self._mode, self._by = mode, by

    def __call__(self, *_: Any) -> None:
        if self._mode.thread == threading.get_ident():
            self._mode.held = max(self._mode.held + self._by, 0)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """What a copy of a module has in place of a hook."""
