"""SGD's kernels, as `adam`'s: rates a tensor, then unscale, clip and step in one pass."""

# Kernel arguments have no types that a checker knows, and tl.constexpr names are capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803, SIM102, SIM108

from __future__ import annotations

import triton
import triton.language as tl

from gradilocks.kernels.launch import unspecialized

__all__ = ["sgd_kernel", "sgd_rates", "sgd_rates_kernel"]


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
            b = keep * b + take * g
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
