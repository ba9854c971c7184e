"""``gradilocks.emulate``: a context in which products of matrices are stored in a given format."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradilocks.emulating.checkpointing import Carrying
from gradilocks.emulating.operations import COMPOSED, OPERATIONS, concerns
from gradilocks.emulating.rounding import rounding_to
from gradilocks.emulating.storage import Storage
from gradilocks.errors import GradilocksError
from gradilocks.precision import Format, format_named

__all__ = ["Emulation", "emulate"]


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
            ``torch.float8_e5m2``, or a name of `gradilocks.precision.FORMATS`, as in ``"tf32"``.
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
        self._kept = _modules(keep)
        self._storage = Storage(rounding_to(self.format), rounding_to(self.backward))
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Emulation:
        refuse_autocast()
        mode = _Mode(self, self._storage)
        with ExitStack() as stack:
            for module in self._kept:
                before = module.register_forward_pre_hook(mode.hold, prepend=True)
                after = module.register_forward_hook(mode.let_go, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(_CARRYING)
            if (
                "torch._dynamo" in sys.modules
            ):  # What is compiled would pass unseen, or not compile.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            _ON.modes.append(mode)
            stack.callback(_ON.modes.remove, mode)
            stack.enter_context(mode)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._entered.pop().close()


class _Mode(TorchFunctionMode):
    """Stands in the way of every call of torch in this thread, for one `with`."""

    def __init__(self, emulation: Emulation, storage: Storage) -> None:
        super().__init__()
        self.emulation = emulation
        self._storage = storage
        self.held = 0

    def hold(self, *_: Any) -> None:
        """A module that is kept in float32 begins."""
        self.held += 1

    def let_go(self, *_: Any) -> None:
        """It has ended."""
        self.held -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.held or _ON.modes[-1] is not self:  # Of several, the innermost counts.
            return func(*args, **kwargs)
        if func in OPERATIONS:
            refuse_autocast()
            if concerns(func, args, kwargs):
                return OPERATIONS[func](self._storage, func, args, kwargs)
        if func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        return func(*args, **kwargs)


class _On(threading.local):
    """What is on in this thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[_Mode] = []


_ON = _On()


def _again() -> Emulation | None:
    """What a checkpoint is to enter when it computes again what it is computing now."""
    if not _ON.modes or _ON.modes[-1].held:
        return None
    return _ON.modes[-1].emulation


_CARRYING = Carrying(_again)


def refuse_autocast() -> None:
    """Raises under torch.autocast: what it has cast already cannot be computed in float32."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise GradilocksError(
                f"gradilocks.emulate and torch.autocast({device!r}) are both on. Use one of the "
                "two: emulate stands for autocast; leave autocast out."
            )


def _format(argument: str, given: torch.dtype | str) -> Format:
    try:
        return format_named(str(given))
    except ValueError as error:
        raise GradilocksError(f"{argument}: {error}") from error


def _modules(keep: torch.nn.Module | Iterable[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    modules: list[torch.nn.Module] = []
    each: object
    for each in (keep,) if isinstance(keep, (torch.nn.Module, str)) else keep:
        if not isinstance(each, torch.nn.Module):
            raise GradilocksError(
                f"keep must be modules, got {each!r}. For a name: model.get_submodule(name)."
            )
        modules.append(each)
    return tuple(modules)
