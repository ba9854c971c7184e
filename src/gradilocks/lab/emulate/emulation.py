"""``gradilocks.emulate``: a context in which products of matrices are stored in a given format."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradilocks._torch import is_autocast_enabled
from gradilocks.eager import UNCOMPILED
from gradilocks.errors import GradilocksError
from gradilocks.lab.emulate.checkpointing import Carrying
from gradilocks.lab.emulate.keeping import holding, modules_to_keep
from gradilocks.lab.emulate.operations import COMPOSED, OPERATIONS, concerns
from gradilocks.lab.emulate.rounding import rounding_to
from gradilocks.lab.emulate.storage import Storage
from gradilocks.lab.formats import Format, format_named

__all__ = ["Emulation", "emulate", "emulated_format"]


def emulate(
    format: torch.dtype | str,
    *,
    backward: torch.dtype | str | None = None,
    keep: torch.nn.Module | Iterable[torch.nn.Module] = (),
) -> Emulation:
    """Trains in a number format that the machine need not have.

    Inside the context matmuls, convolutions, attention, Linear and recurrent layers store what goes
    in and what comes out in the format, and compute in float32, as a tensor core does; the backward
    pass of what was computed there does the same with the gradients, wherever it is called. All
    tensors stay float32, and so do the parameters: they are the master weights.

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
    return Emulation(format, backward=backward, keep=keep)


class Emulation(ContextDecorator):
    """What `emulate` returns: a context, and a decorator as ``torch.autocast`` is one."""

    def __init__(
        self,
        format: torch.dtype | str,
        *,
        backward: torch.dtype | str | None = None,
        keep: torch.nn.Module | Iterable[torch.nn.Module] = (),
    ) -> None:
        self.format = _format("format", format)
        self.backward = self.format if backward is None else _format("backward", backward)
        self._kept = modules_to_keep(keep)
        self._storage = Storage(rounding_to(self.format), rounding_to(self.backward))
        self._idle = {self.format.name, self.backward.name} == {"fp32"}
        self._entered = _Entered()

    def __enter__(self) -> Emulation:
        if not self._idle:
            refuse_autocast()
        mode = _Mode(self, self._storage, idle=self._idle)
        with ExitStack() as stack:
            stack.enter_context(holding(self._kept, mode))
            stack.enter_context(_CARRYING)
            stack.enter_context(UNCOMPILED)  # What is compiled would pass unseen, or break.
            _ON.modes.append(mode)
            stack.callback(_ON.modes.remove, mode)
            stack.enter_context(mode)
            self._entered.stacks.append(stack.pop_all())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._entered.stacks.pop().close()

    def __repr__(self) -> str:
        backward = "" if self.backward == self.format else f", backward={self.backward.name!r}"
        kept = f", keep={len(self._kept)} modules" if self._kept else ""
        return f"emulate({self.format.name!r}{backward}{kept})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.format.name, self.backward.name, self._kept)


def _made(format: str, backward: str, keep: tuple[torch.nn.Module, ...]) -> Emulation:
    return Emulation(format, backward=backward, keep=keep)


class _Entered(threading.local):
    """What has to be undone, by thread: one object may be entered by several."""

    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class _Mode(TorchFunctionMode):
    """Stands in the way of every call of torch in this thread, for one `with`."""

    def __init__(self, emulation: Emulation, storage: Storage, *, idle: bool) -> None:
        super().__init__()
        self.emulation = emulation
        self._storage, self._idle = storage, idle
        self.thread = threading.get_ident()
        self.held = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Of several, the innermost counts.
        if self._idle or self.held or _ON.modes[-1] is not self:
            return func(*args, **kwargs)
        if func in OPERATIONS:
            refuse_autocast()
            if concerns(func, args, kwargs):
                return OPERATIONS[func](self._storage, func, args, kwargs)
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


def emulated_format() -> Format | None:
    """The format of the gradients that are computed now, in this thread; None without emulation."""
    if not _ON.modes or _ON.modes[-1].held or _ON.modes[-1].emulation.backward.name == "fp32":
        return None
    return _ON.modes[-1].emulation.backward


def _again() -> Emulation | None:
    """What a checkpoint is to enter when it computes again what it is computing now."""
    if not _ON.modes or _ON.modes[-1].held:
        return None
    return _ON.modes[-1].emulation


_CARRYING = Carrying(_again)


def refuse_autocast() -> None:
    """Raises under torch.autocast: what it has cast already cannot be computed in float32."""
    if is_autocast_enabled():
        devices = (each for each in _DEVICES if torch.is_autocast_enabled(each))
        raise GradilocksError(
            f"gradilocks.emulate and torch.autocast({next(devices, '...')!r}) are both on. Use one "
            "of the two: emulate stands for autocast; leave autocast out."
        )


_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def _format(argument: str, given: torch.dtype | str) -> Format:
    try:
        return format_named(str(given))
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None
