"""The optimizers' kernels: unscale, clip and step all tensors in two launches.

Before each step one lane a tensor works out in float64 the few numbers that all elements of a
tensor share (`rates`), in a launch of its own or in the one that settles; so tensors of any number
of groups share one launch. Then one program a chunk steps parameters and state in one pass. Nothing
at all is done if the step is skipped, and the gradients are never written.

`launch_rates` and `launch_step` launch them, on addresses and settings that lie on the device.
"""

# Kernel arguments have no types that a checker knows, and tl.constexpr names are capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803, SIM102, SIM108

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradilocks.kernels.chunks import Chunking
from gradilocks.kernels.triton_launch import TYPES, BoundLaunch, Launch, launch_for, unspecialized

__all__ = [
    "adam_kernel",
    "adam_rates",
    "adam_rates_kernel",
    "launch_rates",
    "launch_step",
    "sgd_kernel",
    "sgd_rates",
    "sgd_rates_kernel",
]

TILE = 1024
WARPS = 8
_LANES = 256


@unspecialized
def adam_rates_kernel(
    steps_ptr, groups_ptr, settings_ptr, skip_ptr, rates_ptr,
    tensors,
    SKIPPABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the step of each tensor and works out its rates, a lane a tensor."""
    if SKIPPABLE:
        if tl.load(skip_ptr) != 0.0:
            return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    adam_rates(steps_ptr, groups_ptr, settings_ptr, rates_ptr, at, tensors)


@triton.jit
def adam_rates(steps_ptr, groups_ptr, settings_ptr, rates_ptr, at, tensors):
    """step += 1, and lr / (1 - beta1^step), sqrt(1 - beta2^step), decay, eps, beta1, beta2."""
    inside = at < tensors
    places = tl.load(steps_ptr + at, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(places, mask=inside, other=0.0) + 1.0
    tl.store(places, step, mask=inside)
    setting = settings_ptr + tl.load(groups_ptr + at, mask=inside, other=0) * 8
    lr = tl.load(setting, mask=inside, other=0.0)
    decay = tl.load(setting + 1, mask=inside, other=0.0)
    beta1 = tl.load(setting + 2, mask=inside, other=0.5)
    beta2 = tl.load(setting + 3, mask=inside, other=0.5)
    eps = tl.load(setting + 4, mask=inside, other=0.0)
    exact = step.to(tl.float64)
    # beta^step; log of 0 is -inf, and exp of that is 0 again.
    left1 = 1.0 - tl.exp(exact * tl.log(beta1))
    left2 = 1.0 - tl.exp(exact * tl.log(beta2))
    decoupled = tl.load(setting + 5, mask=inside, other=0.0) != 0.0
    decay = tl.where(decoupled, lr * decay, decay)
    rate = rates_ptr + at * 8
    tl.store(rate, lr / left1, mask=inside)
    tl.store(rate + 1, tl.sqrt(left2), mask=inside)
    tl.store(rate + 2, decay, mask=inside)
    tl.store(rate + 3, eps, mask=inside)
    tl.store(rate + 4, beta1, mask=inside)
    tl.store(rate + 5, 1.0 - beta1, mask=inside)
    tl.store(rate + 6, beta2, mask=inside)
    tl.store(rate + 7, 1.0 - beta2, mask=inside)


@triton.jit
def _adam_chunk(
    p_ptr, m_ptr, v_ptr, x_ptr, w_ptr, g_ptr, left,
    lr, root, decay, eps, beta1, take1, beta2, take2, divisor,
    PARAM: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    MASTER: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The elements of one chunk, tile by tile; a full one is read without a mask."""
    lanes = tl.arange(0, TILE)
    for offset in range(0, CHUNK if FULL else left, TILE):
        at = offset + lanes
        inside = at < left
        if FULL:
            g = tl.load(g_ptr + at).to(WIDE)
            m = tl.load(m_ptr + at).to(WIDE)
            v = tl.load(v_ptr + at).to(WIDE)
            p = tl.load(w_ptr + at) if MASTER else tl.load(p_ptr + at).to(WIDE)
            x = tl.load(x_ptr + at).to(WIDE) if AMSGRAD else v
        else:
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(WIDE)
            m = tl.load(m_ptr + at, mask=inside, other=0.0).to(WIDE)
            v = tl.load(v_ptr + at, mask=inside, other=0.0).to(WIDE)
            if MASTER:
                p = tl.load(w_ptr + at, mask=inside, other=0.0)
            else:
                p = tl.load(p_ptr + at, mask=inside, other=0.0).to(WIDE)
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(WIDE) if AMSGRAD else v
        if SCALED:
            g = tl.div_rn(g, divisor) if tl.float32 == WIDE else g / divisor
        if MAXIMIZE:
            g = -g
        if not DECOUPLED:
            g = tl.where(decay != 0.0, g + decay * p, g)
        # From whichever end is nearer: rounded once, and exact where m has come to rest at g.
        m = tl.where(take1 < 0.5, m + take1 * (g - m), g - beta1 * (g - m))
        v = tl.where(take2 < 0.5, v + take2 * (g * g - v), g * g - beta2 * (g * g - v))
        if AMSGRAD:
            x = tl.maximum(x, v, propagate_nan=tl.PropagateNan.ALL)
        else:
            x = v
        if tl.float32 == WIDE:
            change = lr * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(x), root) + eps)
        else:
            change = lr * (m / (tl.sqrt(x) / root + eps))
        if DECOUPLED:
            change = tl.where(decay != 0.0, change + decay * p, change)
        p = p - change
        if FULL:
            tl.store(m_ptr + at, m.to(STATE))
            tl.store(v_ptr + at, v.to(STATE))
            tl.store(p_ptr + at, p.to(PARAM))
            if MASTER:
                tl.store(w_ptr + at, p)
            if AMSGRAD:
                tl.store(x_ptr + at, x.to(STATE))
        else:
            tl.store(m_ptr + at, m.to(STATE), mask=inside)
            tl.store(v_ptr + at, v.to(STATE), mask=inside)
            tl.store(p_ptr + at, p.to(PARAM), mask=inside)
            if MASTER:
                tl.store(w_ptr + at, p, mask=inside)
            if AMSGRAD:
                tl.store(x_ptr + at, x.to(STATE), mask=inside)


@unspecialized
def adam_kernel(
    places_ptr, grads_ptr, sizes_ptr, owner_ptr, index_ptr, rates_ptr, skip_ptr, divisor_ptr,
    first, tensors,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    MASTER: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    SCALED: tl.constexpr, SKIPPABLE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Adam or AdamW on one chunk of one tensor.

    g = g / divisor;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    `places` holds the addresses of parameters, m, v, the largest v and masters, row by row.
    """
    if SKIPPABLE:
        if tl.load(skip_ptr) != 0.0:
            return
    program = first + tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    start = tl.load(index_ptr + program).to(tl.int64) * CHUNK
    size = tl.load(sizes_ptr + owner)
    left = tl.minimum(size - start, CHUNK).to(tl.int32)
    place = places_ptr + owner
    p_ptr = tl.multiple_of(tl.load(place).to(tl.pointer_type(PARAM)), ALIGN) + start
    m_ptr = tl.multiple_of(tl.load(place + tensors).to(tl.pointer_type(STATE)), ALIGN) + start
    v_ptr = tl.multiple_of(tl.load(place + 2 * tensors).to(tl.pointer_type(STATE)), ALIGN) + start
    x_ptr = tl.multiple_of(tl.load(place + 3 * tensors).to(tl.pointer_type(STATE)), ALIGN) + start
    w_ptr = tl.multiple_of(tl.load(place + 4 * tensors).to(tl.pointer_type(WIDE)), ALIGN) + start
    g_ptr = tl.multiple_of(tl.load(grads_ptr + owner).to(tl.pointer_type(GRAD)), ALIGN) + start
    rate = rates_ptr + owner * 8
    lr = tl.load(rate).to(WIDE)
    root = tl.load(rate + 1).to(WIDE)
    decay = tl.load(rate + 2).to(WIDE)
    eps = tl.load(rate + 3).to(WIDE)
    beta1 = tl.load(rate + 4).to(WIDE)
    take1 = tl.load(rate + 5).to(WIDE)
    beta2 = tl.load(rate + 6).to(WIDE)
    take2 = tl.load(rate + 7).to(WIDE)
    divisor = tl.load(divisor_ptr).to(WIDE) if SCALED else 1.0
    if start + CHUNK <= size:
        _adam_chunk(
            p_ptr, m_ptr, v_ptr, x_ptr, w_ptr, g_ptr, left,
            lr, root, decay, eps, beta1, take1, beta2, take2, divisor,
            PARAM, STATE, WIDE, MASTER, AMSGRAD, MAXIMIZE, DECOUPLED, SCALED, CHUNK, TILE, True,
        )  # fmt: skip
    else:
        _adam_chunk(
            p_ptr, m_ptr, v_ptr, x_ptr, w_ptr, g_ptr, left,
            lr, root, decay, eps, beta1, take1, beta2, take2, divisor,
            PARAM, STATE, WIDE, MASTER, AMSGRAD, MAXIMIZE, DECOUPLED, SCALED, CHUNK, TILE, False,
        )  # fmt: skip


@unspecialized
def sgd_rates_kernel(
    fresh_ptr, groups_ptr, settings_ptr, skip_ptr, rates_ptr,
    tensors,
    SKIPPABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Works out the rates of each tensor, a lane a tensor."""
    if SKIPPABLE:
        if tl.load(skip_ptr) != 0.0:
            return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sgd_rates(fresh_ptr, groups_ptr, settings_ptr, rates_ptr, at, tensors)


@triton.jit
def sgd_rates(fresh_ptr, groups_ptr, settings_ptr, rates_ptr, at, tensors):
    """lr, decay, momentum, and what of the buffer is kept and of the gradient taken.

    The first step that is taken fills the buffer with the gradient itself, whatever the dampening.
    `fresh` holds the address of each tensor's flag, or 0 if its buffer is known to be filled.
    """
    inside = at < tensors
    setting = settings_ptr + tl.load(groups_ptr + at, mask=inside, other=0) * 8
    lr = tl.load(setting, mask=inside, other=0.0)
    decay = tl.load(setting + 1, mask=inside, other=0.0)
    momentum = tl.load(setting + 2, mask=inside, other=0.0)
    dampening = tl.load(setting + 3, mask=inside, other=0.0)
    address = tl.load(fresh_ptr + at, mask=inside, other=0)
    asked = inside & (address != 0)
    flag = address.to(tl.pointer_type(tl.int32))
    fresh = tl.load(flag, mask=asked, other=0) != 0
    rate = rates_ptr + at * 8
    tl.store(rate, lr, mask=inside)
    tl.store(rate + 1, decay, mask=inside)
    tl.store(rate + 2, momentum, mask=inside)
    tl.store(rate + 3, tl.where(fresh, 0.0, momentum), mask=inside)
    tl.store(rate + 4, tl.where(fresh, 1.0, 1.0 - dampening), mask=inside)
    tl.store(flag, tl.zeros(at.shape, tl.int32), mask=asked)


@triton.jit
def _sgd_chunk(
    p_ptr, b_ptr, w_ptr, g_ptr, left, lr, decay, momentum, keep, take, divisor,
    PARAM: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    MASTER: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The elements of one chunk, tile by tile; a full one is read without a mask."""
    lanes = tl.arange(0, TILE)
    for offset in range(0, CHUNK if FULL else left, TILE):
        at = offset + lanes
        inside = at < left
        if FULL:
            g = tl.load(g_ptr + at).to(WIDE)
            p = tl.load(w_ptr + at) if MASTER else tl.load(p_ptr + at).to(WIDE)
            b = tl.load(b_ptr + at).to(WIDE) if MOMENTUM else g
        else:
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(WIDE)
            if MASTER:
                p = tl.load(w_ptr + at, mask=inside, other=0.0)
            else:
                p = tl.load(p_ptr + at, mask=inside, other=0.0).to(WIDE)
            b = tl.load(b_ptr + at, mask=inside, other=0.0).to(WIDE) if MOMENTUM else g
        if SCALED:
            g = tl.div_rn(g, divisor) if tl.float32 == WIDE else g / divisor
        if MAXIMIZE:
            g = -g
        g = tl.where(decay != 0.0, g + decay * p, g)
        if MOMENTUM:
            # Said, not left to the compiler: which product it fuses differs from kernel to kernel.
            b = tl.fma(take, g, keep * b)
            if NESTEROV:
                g = g + momentum * b
            else:
                g = b
        p = p - lr * g
        if FULL:
            tl.store(p_ptr + at, p.to(PARAM))
            if MASTER:
                tl.store(w_ptr + at, p)
            if MOMENTUM:
                tl.store(b_ptr + at, b.to(STATE))
        else:
            tl.store(p_ptr + at, p.to(PARAM), mask=inside)
            if MASTER:
                tl.store(w_ptr + at, p, mask=inside)
            if MOMENTUM:
                tl.store(b_ptr + at, b.to(STATE), mask=inside)


@unspecialized
def sgd_kernel(
    places_ptr, grads_ptr, sizes_ptr, owner_ptr, index_ptr, rates_ptr, skip_ptr, divisor_ptr,
    first, tensors,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, WIDE: tl.constexpr,
    MASTER: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr, SKIPPABLE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """SGD on one chunk of one tensor.

    g = g / divisor + decay p;  b = keep b + take g;  p = p - lr b
    with nesterov:              p = p - lr (g + momentum b)

    `places` holds the addresses of parameters, buffers and masters, row by row.
    """
    if SKIPPABLE:
        if tl.load(skip_ptr) != 0.0:
            return
    program = first + tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    start = tl.load(index_ptr + program).to(tl.int64) * CHUNK
    size = tl.load(sizes_ptr + owner)
    left = tl.minimum(size - start, CHUNK).to(tl.int32)
    place = places_ptr + owner
    p_ptr = tl.multiple_of(tl.load(place).to(tl.pointer_type(PARAM)), ALIGN) + start
    b_ptr = tl.multiple_of(tl.load(place + tensors).to(tl.pointer_type(STATE)), ALIGN) + start
    w_ptr = tl.multiple_of(tl.load(place + 2 * tensors).to(tl.pointer_type(WIDE)), ALIGN) + start
    g_ptr = tl.multiple_of(tl.load(grads_ptr + owner).to(tl.pointer_type(GRAD)), ALIGN) + start
    rate = rates_ptr + owner * 8
    lr = tl.load(rate).to(WIDE)
    decay = tl.load(rate + 1).to(WIDE)
    momentum = tl.load(rate + 2).to(WIDE)
    keep = tl.load(rate + 3).to(WIDE)
    take = tl.load(rate + 4).to(WIDE)
    divisor = tl.load(divisor_ptr).to(WIDE) if SCALED else 1.0
    if start + CHUNK <= size:
        _sgd_chunk(
            p_ptr, b_ptr, w_ptr, g_ptr, left, lr, decay, momentum, keep, take, divisor,
            PARAM, STATE, WIDE, MASTER, MOMENTUM, NESTEROV, MAXIMIZE, SCALED, CHUNK, TILE, True,
        )  # fmt: skip
    else:
        _sgd_chunk(
            p_ptr, b_ptr, w_ptr, g_ptr, left, lr, decay, momentum, keep, take, divisor,
            PARAM, STATE, WIDE, MASTER, MOMENTUM, NESTEROV, MAXIMIZE, SCALED, CHUNK, TILE, False,
        )  # fmt: skip


_KERNELS = {"adam": adam_kernel, "sgd": sgd_kernel}
_RATES = {"adam": adam_rates_kernel, "sgd": sgd_rates_kernel}


def launch_rates(
    kernel: str, tables: tuple[Tensor, Tensor, Tensor, Tensor], skip: Tensor | None
) -> None:
    """Works out what the elements of each tensor share, and counts the step.

    Args:
        kernel: "adam" or "sgd".
        tables: what belongs to each tensor (its step for Adam, for SGD whether its buffer is
            still to be filled), its group, the groups' settings, and where the rates go.
        skip: 0-d float32; None to step whatever comes.
    """
    own, groups, settings, rates = tables
    count = rates.shape[0]
    launch_for(_RATES[kernel], 4, SKIPPABLE=skip is not None, BLOCK=_LANES)(
        -(-count // _LANES), rates.device, own, groups, settings,
        settings if skip is None else skip, rates, count,
    )  # fmt: skip


def launch_step(
    kernel: str,
    chunking: Chunking,
    places: Tensor,
    gradients: Tensor,
    rates: Tensor,
    skip: Tensor | None,
    divisor: Tensor | None,
    kept: dict[Hashable, Any],
) -> None:
    """Steps every tensor: one launch for those that have dtypes and flags in common.

    Args:
        kernel: "adam" or "sgd".
        chunking: its kinds are (parameter, gradient, state dtype, master, aligned, flags).
        places: addresses of parameters and state, as the kernel wants them.
        gradients: addresses of the gradients.
        rates: as `launch_rates` leaves them.
        skip: 0-d float32; None to step whatever comes.
        divisor: 0-d float32; None to take the gradients as they are.
        kept: the launches of the last step and what they were made for; of whoever steps.
    """
    given = (places, gradients, rates, skip, divisor)
    before, launches = kept.get(chunking, ((), ()))
    if len(before) != len(given) or any(map(operator.is_not, before, given)):
        launches = _bound_steps(kernel, chunking, *given)
        kept[chunking] = given, launches
    for launch in launches:
        launch()


def bound_step(
    chunking: Chunking, kept: dict[Hashable, Any]
) -> Callable[[int | None], object] | None:
    """The launches that `launch_step` made last, to be made again on a stream.

    Args:
        chunking, kept: as `launch_step` was given them.

    Returns:
        None if C++ does not launch them. To be called while their device is the current one.
    """
    _, launches = kept.get(chunking, ((), ()))
    quick = [launch.quick for launch in launches]
    if not quick or None in quick:
        return None
    if len(quick) == 1:
        return quick[0]  # type: ignore[no-any-return]

    def step(stream: int | None) -> None:
        for launch in quick:
            launch(stream)

    return step


def _bound_steps(
    kernel: str,
    chunking: Chunking,
    places: Tensor,
    gradients: Tensor,
    rates: Tensor,
    skip: Tensor | None,
    divisor: Tensor | None,
) -> list[BoundLaunch]:
    """The launches of `launch_step`."""
    key = (kernel, skip is None, divisor is None)
    args = (
        places, gradients, chunking.sizes, chunking.owner, chunking.index, rates,
        rates if skip is None else skip, rates if divisor is None else divisor,
    )  # fmt: skip
    launches = chunking.launches.get(key)
    if launches is None:
        launches = [
            _stepping(kernel, chunking, bucket.kind, *key[1:]) for bucket in chunking.buckets
        ]
        for launch in launches:
            launch.prepare(chunking.device, *args, 0, chunking.count)
        chunking.launches[key] = launches
    return [
        launch.bind(bucket.chunks, chunking.device, (*args, bucket.first, chunking.count))
        for bucket, launch in zip(chunking.buckets, launches, strict=True)
    ]


def _stepping(kernel: str, chunking: Chunking, kind: Any, always: bool, unscaled: bool) -> Launch:
    param, grad, state, master, aligned, flags = kind
    wide = torch.float64 if param is torch.float64 else torch.float32
    return launch_for(
        _KERNELS[kernel], WARPS, PARAM=TYPES[param], GRAD=TYPES[grad], STATE=TYPES[state],
        WIDE=TYPES[wide], MASTER=master, **dict(flags), SCALED=not unscaled, SKIPPABLE=not always,
        CHUNK=chunking.chunk, TILE=min(TILE, chunking.chunk), ALIGN=16 if aligned else 2,
    )  # fmt: skip
