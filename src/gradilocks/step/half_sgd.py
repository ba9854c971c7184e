"""torch's fused SGD on a CPU, on float16 and bfloat16 parameters: there it hardly moves them.

The step of an optimizer enters, and one that moves all of them leaves. The kernel writes what it
has worked out of the last few elements alone, those that fill no vector (pytorch issue 191763, seen
with 2.13); parameters, and momentum in float16, stay as they were, and nothing says so. So its one
call, `torch._fused_sgd_`, is given float32 copies, and what comes of them is rounded back: that is
what it would have stored. All else that the optimizer does, it does itself. Where torch moves them,
which is tried once, nothing is done.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradilocks._torch import fused_sgd_
from gradilocks.step.own_step import is_ours
from gradilocks.step.table import every_parameter

__all__ = ["HALF", "hardly_moves", "hardly_steps", "moving"]

_logger = logging.getLogger("gradilocks")
HALF = frozenset((torch.float16, torch.bfloat16))


def moving(
    optimizer: Any, step: Callable[..., Any], device: torch.device | None = None
) -> Callable[..., Any]:
    """`step`, so that every parameter moves. To be asked where a gradient is of one of HALF.

    Args:
        optimizer: any, also a wrapper around others.
        step: calls its step.
        device: that of the gradients; None if it is not known, or there are several.
    """
    elsewhere = device is not None and device.type != "cpu"
    if elsewhere or _is_another(optimizer) or not hardly_moves(every_parameter([optimizer])):
        return step

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        with _InFloat32():
            return step(*args, **kwargs)

    return stepped


@functools.cache
def _tell() -> None:
    """Once in a process."""
    _logger.warning(
        "torch's fused SGD leaves float16 and bfloat16 parameters on a CPU as they are (pytorch "
        "issue 191763). Here they are stepped by its kernel in float32, on copies; "
        "gradilocks.optim.SGD needs none where C++ is built."
    )


def hardly_moves(params: Iterable[Tensor]) -> bool:
    """Whether a fused SGD of torch would leave some of these parameters as they are."""
    return any(p.is_cpu and p.dtype in HALF for p in params) and not _moves_half()


def hardly_steps(optimizer: Any) -> bool:
    """Whether `optimizer` is torch's fused SGD, and leaves some of its parameters as they are."""
    if not isinstance(optimizer, torch.optim.SGD) or is_ours(optimizer):
        return False
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return fused and hardly_moves(every_parameter([optimizer]))


def _is_another(optimizer: Any) -> bool:
    """Whether it is one of torch's optimizers or of ours, and neither torch's SGD nor a wrapper."""
    kind = type(optimizer)
    known = kind.__module__.startswith(("torch.optim.", "gradilocks.optim."))
    return known and kind is not torch.optim.SGD


class _InFloat32(TorchFunctionMode):
    """Inside, `torch._fused_sgd_` works on float32 copies of half-precision tensors on a CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is fused_sgd_ and args and args[0] and hardly_moves(args[0][:1]):
            _tell()
            return _step_in_float32(*args, **kwargs)
        return func(*args, **kwargs)


def _step_in_float32(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], **settings: Any
) -> None:
    """As `torch._fused_sgd_`, whose tensors are of one dtype, all on the CPU."""
    flag = settings.get("found_inf")
    if flag is not None and flag.item() == 1:  # It is skipped, bit for bit.
        fused_sgd_(params, grads, buffers, **settings)
        return
    unscales = settings.get("grad_scale") is not None  # Then it leaves unscaled gradients behind.
    for place, param in enumerate(params):
        for mine in _pieces([param, grads[place], *buffers[place : place + 1]]):
            wide = [_widened(tensor) for tensor in mine]
            fused_sgd_(wide[:1], wide[1:2], wide[2:], **settings)
            for number, (tensor, made) in enumerate(zip(mine, wide, strict=True)):
                if number != 1 or unscales:
                    tensor.copy_(made)


_PIECE = 1 << 20
"""Elements of a tensor that are copied at a time: 4 megabytes, whatever its size."""


def _pieces(tensors: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """The same elements of all of them, some at a time, if they lie in the same order.

    By their `data`: what is written is uncounted by their versions, as the kernel's own writes.
    """
    data = [tensor.data for tensor in tensors]
    if not all(tensor.is_contiguous() for tensor in data):
        return [data]
    return zip(*(torch.split(tensor.view(-1), _PIECE) for tensor in data), strict=True)


def _widened(tensor: Tensor) -> Tensor:
    """A float32 copy whose elements lie in the order that the kernel takes for granted."""
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


@functools.cache
def _moves_half() -> bool:
    """Whether this torch's fused SGD moves every element of half-precision tensors on a CPU."""
    if fused_sgd_ is None:
        return True
    for dtype in HALF:
        param, grad = (torch.ones(64, dtype=dtype, device="cpu") for _ in range(2))
        numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        fused_sgd_([param], [grad], [], **numbers, **flags)
        if bool((param != 0.5).any()):
            return False
    return True
