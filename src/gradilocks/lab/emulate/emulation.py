"""``gradilocks.emulate``: a context in which products of matrices are stored in a given format.

It stands in the way of torch's functions, and so of every call in its thread. Modules in ``keep``
stay in float32 by hooks before and after their forward. What activation checkpointing computes
again in the backward pass is emulated again: torch carries autocast over to the second computation
and knows nothing of ours, so while an emulation is on, the two functions that
``torch.utils.checkpoint.checkpoint`` hands its work to take the emulation along.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from gradilocks._torch import CHECKPOINT_GENERATOR, COMPOSABLE_CHECKPOINT, is_autocast_enabled
from gradilocks.eager import UNCOMPILED
from gradilocks.errors import GradilocksError
from gradilocks.lab.emulate.operations import COMPOSED, OPERATIONS, concerns
from gradilocks.lab.emulate.rounding import Storage, rounding_to
from gradilocks.lab.formats import Format, format_named
from gradilocks.lab.tensors import Hook

__all__ = ["Emulation", "emulate", "emulated_format"]


class Emulation(ContextDecorator):
    """Trains in a number format that the machine need not have.

    Inside the context matmuls, convolutions, attention, Linear and recurrent layers store what goes
    in and what comes out in the format, and compute in float32, as a tensor core does; the backward
    pass of what was computed there does the same with the gradients, wherever it is called. All
    tensors stay float32, and so do the parameters: they are the master weights.

    A context, and a decorator as ``torch.autocast`` is one.

    Args:
        format: ``torch.float16``, ``torch.bfloat16``, ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2``, or a name of `gradilocks.lab.formats.FORMATS`, as in ``"tf32"``.
        backward: the format of the gradients; the same if it is None.
        keep: modules that stay in float32.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> with gradilocks.emulate(torch.float16):
        ...     loss = model(torch.full((2, 4), 1e-9)).square().mean()
        >>> loss.backward()
        >>> model.weight.grad.count_nonzero().item()  # 1e-9 is nothing in fp16.
        0
    """

    def __init__(
        self,
        format: torch.dtype | str,
        *,
        backward: torch.dtype | str | None = None,
        keep: nn.Module | Iterable[nn.Module] = (),
    ) -> None:
        self.format = _format("format", format)
        self.backward = self.format if backward is None else _format("backward", backward)
        self._keep = _modules_to_keep(keep)
        self._storage = Storage(rounding_to(self.format), rounding_to(self.backward))
        self._idle = {self.format.name, self.backward.name} == {"fp32"}

    def __enter__(self) -> Emulation:
        if not self._idle:
            _refuse_autocast()
        with ExitStack() as stack:
            stack.enter_context(UNCOMPILED)  # What is compiled would pass unseen, or break.
            mode = _Mode(self, self._storage, idle=self._idle)
            stack.enter_context(_paused_in(self._keep, mode))
            stack.enter_context(_CHECKPOINTS)
            _ON.modes.append(mode)
            stack.callback(_ON.modes.remove, mode)
            stack.enter_context(mode)
            mode.undo = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # One object may be entered by several threads, and in one of them several times.
        next(mode for mode in reversed(_ON.modes) if mode.emulation is self).undo.close()

    def __repr__(self) -> str:
        backward = "" if self.backward == self.format else f", backward={self.backward.name!r}"
        keep = f", keep={len(self._keep)} modules" if self._keep else ""
        return f"emulate({self.format.name!r}{backward}{keep})"

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Emulation, backward=self.backward.name, keep=self._keep)
        return make, (self.format.name,)


emulate = Emulation


def _format(argument: str, given: torch.dtype | str) -> Format:
    try:
        return format_named(given)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None


class _Mode(TorchFunctionMode):
    """Stands in the way of every call of torch in this thread, for one `with`."""

    def __init__(self, emulation: Emulation, storage: Storage, *, idle: bool) -> None:
        super().__init__()
        self.emulation = emulation
        self._storage, self._idle = storage, idle
        self.undo = ExitStack()
        """What has to be undone at its end."""
        self.thread = threading.get_ident()
        self.paused = 0
        """How many modules that are kept in float32 are running, one inside the other."""

    def pause(self, by: int, *_: Any) -> None:
        """A module that is kept in float32 begins (1) or ends (-1), perhaps in another thread."""
        if self.thread == threading.get_ident():
            self.paused = max(self.paused + by, 0)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Of several, the innermost counts.
        if self._idle or self.paused or _ON.modes[-1] is not self:
            return func(*args, **kwargs)
        if func in OPERATIONS:
            _refuse_autocast()
            if concerns(func, args, kwargs):
                return OPERATIONS[func](self._storage, func, *args, **kwargs)
        elif func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        elif type(func).__name__ == "FlexAttentionHOP":
            raise GradilocksError(
                "flex_attention is one kernel, and gradilocks.emulate cannot see into it. Use "
                "scaled_dot_product_attention, or name its module in keep."
            )
        return func(*args, **kwargs)


class _On(threading.local):
    """What is on in this thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[_Mode] = []


_ON = _On()


def _emulation_now() -> Emulation | None:
    """The one that rounds what is computed now, in this thread."""
    return None if not _ON.modes or _ON.modes[-1].paused else _ON.modes[-1].emulation


def emulated_format() -> Format | None:
    """The format of the gradients that are computed now, in this thread; None without emulation."""
    emulation = _emulation_now()
    return None if emulation is None or emulation.backward.name == "fp32" else emulation.backward


def _refuse_autocast() -> None:
    """Raises under torch.autocast: what it has cast already cannot be computed in float32."""
    if is_autocast_enabled():
        kinds = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
        device = next((each for each in kinds if torch.is_autocast_enabled(each)), "...")
        raise GradilocksError(
            f"gradilocks.emulate and torch.autocast({device!r}) are both on. Use one "
            "of the two: emulate stands for autocast; leave autocast out."
        )


# --- modules that stay in float32 ----------------------------------------------------------------


def _modules_to_keep(keep: nn.Module | Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules as a tuple; raises if there is something else, or one that is never called."""
    given: Any = keep
    # A Sequential is iterable, too.
    one = isinstance(given, (nn.Module, str)) or not isinstance(given, Iterable)
    modules = (given,) if one else tuple(given)
    for each in modules:
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
    return modules


@contextmanager
def _paused_in(modules: Iterable[nn.Module], mode: _Mode) -> Iterator[None]:
    """Pauses the mode while one of the modules, or of those inside them, runs."""
    every = {inner: None for module in modules for inner in module.modules()}
    handles = [
        handle
        for module in every
        for handle in (
            module.register_forward_pre_hook(Hook(mode.pause, +1), prepend=True),
            module.register_forward_hook(Hook(mode.pause, -1), always_call=True),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- activation checkpointing --------------------------------------------------------------------


class _Checkpoints:
    """Puts itself between `checkpoint` and its work while it is entered, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered > 1:
                return
            composable = sys.modules.get(COMPOSABLE_CHECKPOINT)
            for module in filter(None, (torch.utils.checkpoint, composable)):
                # One that torch no longer has is left out: what it computes again is in float32.
                for name in (CHECKPOINT_GENERATOR, "CheckpointFunction"):
                    if hasattr(module, name):
                        original = getattr(module, name)
                        self._replaced.append((module, name, original))
                        setattr(module, name, _Checkpointing(original))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                for module, name, original in self._replaced:
                    setattr(module, name, original)
                self._replaced = []


class _Checkpointing:
    """Stands for a function, or an autograd.Function, whose first argument is computed twice."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self._original(_with_emulation(function), *args, **kwargs)

    def apply(self, function: Any, *args: Any) -> Any:
        return self._original.apply(_with_emulation(function), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _with_emulation(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is to be called again later, with what is on now."""
    emulation = _emulation_now()
    if emulation is None:
        return function

    def emulated(*args: Any, **kwargs: Any) -> Any:
        with emulation:
            return function(*args, **kwargs)

    return emulated


_CHECKPOINTS = _Checkpoints()
