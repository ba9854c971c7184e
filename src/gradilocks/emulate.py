"""Emulation of low-precision training on any device: matrix products with rounded inputs and outputs.

Inputs and outputs of matrix products are rounded to the format but remain float32 tensors; sums are accumulated in
float32, as in a tensor core. Everything else (normalization, softmax, losses, parameters, the optimizer) is float32, as
under `torch.autocast`.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradilocks.errors import GradilocksError
from gradilocks.formats import FORMATS, Format, find_format
from gradilocks.trace import tensors_in

__all__ = ["emulate", "emulated_format", "run_eagerly"]


@contextlib.contextmanager
def emulate(
    format: str | torch.dtype, *, backward: str | torch.dtype | None = None, keep: Iterable[nn.Module] = ()
) -> Iterator[None]:
    """Rounds inputs and outputs of matrix products to a format, in forward and backward, on any device.

    A context manager and decorator for the forward pass. Matrix products are linear layers, matmul and its variants,
    einsum, convolutions and scaled dot product attention of float32 tensors. Their gradients are rounded even if
    `backward()` is called outside the context. With activation checkpointing or an `autograd.Function` of your own,
    call `backward()` inside the context: otherwise the products in backward are not rounded. Compiled models run
    uncompiled. Only the calling thread is affected.

    Args:
        format: "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp32", or torch's dtype. Tensors have no scales of their own.
        backward: format of the gradients; None for the same.
        keep: modules that are computed in float32.

    Raises:
        GradilocksError: on recurrent layers, sparse, nested or half-precision tensors and in-place products, under
            `torch.autocast` and inside another `emulate`.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> with gradilocks.emulate("fp16"):
        ...     loss = model(torch.full((2, 4), 1e-9)).square().mean()
        >>> loss.backward()
        >>> model.weight.grad.count_nonzero().item()  # 1e-9 is zero in fp16.
        0
    """
    mode = _Emulation(find_format(format), find_format(format if backward is None else backward))
    if _active.mode is not None:
        raise GradilocksError("emulate() is already active. Leave the outer context first, or use keep=.")
    with contextlib.ExitStack() as stack:
        for module in _modules_in(keep):
            stack.callback(module.register_forward_pre_hook(mode.pause, prepend=True).remove)
            stack.callback(module.register_forward_hook(mode.resume, always_call=True).remove)
        stack.enter_context(run_eagerly())
        stack.callback(setattr, _active, "mode", None)
        _active.mode = mode
        stack.enter_context(mode)
        yield


def emulated_format() -> Format | None:
    """The format that gradients are rounded to in this thread; None outside of `emulate`."""
    return None if _active.mode is None else _active.mode.backward


def run_eagerly() -> contextlib.AbstractContextManager[Any]:
    """A context in which compiled functions run uncompiled.

    Does nothing if torch's compiler is not imported yet: nothing is compiled then, and its import takes three seconds.
    """
    if "torch._dynamo" in sys.modules:
        stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return contextlib.nullcontext()


def _modules_in(keep: Any) -> list[nn.Module]:
    modules: list[Any] = [keep] if isinstance(keep, (nn.Module, str)) else list(keep)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"keep= takes modules, got {module!r}. For a name: model.get_submodule(name).")
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise ValueError("keep=: nn.MultiheadAttention computes out_proj itself. Keep the whole attention.")
    return modules


class _Emulation(TorchFunctionMode):
    """Performs the matrix products of one thread with rounded inputs, outputs and gradients."""

    def __init__(self, forward: Format, backward: Format) -> None:
        super().__init__()
        self.forward, self.backward = forward, backward
        self._paused = 0
        """Number of nested calls of `keep` modules in progress."""

    def pause(self, *_: object) -> None:
        self._paused += 1

    def resume(self, *_: object) -> None:
        self._paused = max(self._paused - 1, 0)

    def round(self, values: Tensor) -> Tensor:
        """Rounds a tensor now and its gradient in backward."""
        rounded: Tensor = _Round.apply(values, self.forward, self.backward)  # type: ignore[no-untyped-call]
        return rounded

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._paused:
            if func in _COMPOSED:
                with self:
                    return _COMPOSED[func](*args, **kwargs)
            _check_supported(func)
            if func in _PRODUCTS and _is_float32(func, args, kwargs):
                return _PRODUCTS[func](self, func, *args, **kwargs)
        return func(*args, **kwargs)


class _Round(torch.autograd.Function):
    """Rounds values in forward and their gradient in backward; otherwise the identity."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: Format, backward: Format) -> Tensor:
        ctx.format = backward
        return forward.round_tensor(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Round.apply(grads[0], ctx.format, ctx.format), None, None  # type: ignore[no-untyped-call]


class _Active(threading.local):
    """The emulation of a thread."""

    mode: _Emulation | None = None


_active = _Active()


# --- operations -------------------------------------------------------------------------------------------------------


def _product(mode: _Emulation, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The rounded product of rounded inputs."""
    if kwargs.get("out") is not None:
        raise GradilocksError(f"{func.__name__}(out=) is not supported under emulate(). Use the returned tensor.")
    return mode.round(func(*_rounded(mode, args), **{name: _rounded(mode, value) for name, value in kwargs.items()}))


def _rounded(mode: _Emulation, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.round(value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return [_rounded(mode, item) for item in value]
    return value


def _attention(
    mode: _Emulation,
    func: Any,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the roundings of a fused kernel.

    Scores are float32 up to the softmax. The attention weights and the gradient of the scores are rounded, because they
    are inputs of further products.
    """
    query, key, value = (mode.round(tensor) for tensor in (query, key, value))
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    # A fused kernel rounds the gradient of the scores before it multiplies by the scale.
    query = query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores: Tensor = _Round.apply(query @ key.mT, FORMATS["fp32"], mode.backward)  # type: ignore[no-untyped-call]
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + mode.round(attn_mask)
    # A row that is fully masked attends to nothing, as in torch; its softmax would be NaN.
    is_empty = scores.detach().isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
    weights = F.dropout(weights, dropout_p)
    weights = _Round.apply(weights, mode.forward, FORMATS["fp32"])  # type: ignore[no-untyped-call]
    return mode.round(weights @ value)


def _is_float32(func: Any, args: Any, kwargs: Any) -> bool:
    """True for dense float32 tensors, False for float64, complex and integers.

    Raises:
        GradilocksError: under `torch.autocast`, or for nested, sparse and half-precision tensors.
    """
    tensors = list(tensors_in((args, kwargs)))
    device = tensors[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise GradilocksError("emulate() and torch.autocast are both active. Remove autocast; emulate() replaces it.")
    for tensor in tensors:
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "a nested" if tensor.is_nested else "a sparse"
            raise GradilocksError(f"{func.__name__} got {kind} tensor; emulate() supports dense ones. Use keep=.")
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            raise GradilocksError(
                f"{func.__name__} got a {tensor.dtype} tensor; emulate() rounds float32 ones. Call model.float()."
            )
    # Masks and indices may be integers.
    return {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()} == {torch.float32}


def _check_supported(func: Any) -> None:
    if func in _UNSUPPORTED or type(func).__name__ == "FlexAttentionHOP":
        name = getattr(func, "__name__", "flex_attention")
        raise GradilocksError(
            f"{name} cannot be emulated: it multiplies inside one kernel, or in place. Use another operation, or "
            "compute its module in float32 with keep=."
        )


def _without_dispatch(function: Any) -> Any:
    """A copy of a Python function of torch without its dispatch check, so that modes intercept the products inside."""
    names = {**function.__globals__, **dict.fromkeys(_DISPATCH_CHECKS, lambda *_: False)}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_DISPATCH_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_NAMES = ("matmul", "mm", "bmm", "mv", "inner", "addmm", "addmv", "addbmm", "baddbmm", "addr")
_CONVOLUTIONS = ("convolution", *(f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)))
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")

_PRODUCTS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): _product for name in (*_NAMES, *_CONVOLUTIONS)},
    **{getattr(Tensor, name): _product for name in (*_NAMES, "__rmatmul__")},
    **dict.fromkeys((F.linear, torch.einsum, torch.tensordot, torch.linalg.matmul, torch.linalg.multi_dot), _product),
    F.scaled_dot_product_attention: _attention,
}
_UNSUPPORTED = {
    *(getattr(torch, name) for name in _RECURRENT),
    *(getattr(Tensor, f"{name}_") for name in _NAMES[5:]),
    torch.conv_tbc,
}
# Backward is included because activation checkpointing recomputes products in it.
_COMPOSED = {
    function: _without_dispatch(function)
    for function in (
        F.multi_head_attention_forward,
        *([F.linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else []),
        Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}
