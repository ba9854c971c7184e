"""The optimizers' launches: which kernel, with which constants, on which tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels.adam import adam_kernel, adam_rates_kernel
from gradilocks.kernels.launch import Launch, launch_for
from gradilocks.kernels.sgd import sgd_kernel, sgd_rates_kernel
from gradilocks.kernels.table import Layout
from gradilocks.kernels.triton_backend import TYPES

__all__ = ["step", "work_out_rates"]

TILE = 1024
WARPS = 8
_LANES = 256
_KERNELS = {"adam": adam_kernel, "sgd": sgd_kernel}
_RATES = {"adam": adam_rates_kernel, "sgd": sgd_rates_kernel}


def work_out_rates(
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


def step(
    kernel: str,
    layout: Layout,
    places: Tensor,
    gradients: Tensor,
    rates: Tensor,
    skip: Tensor | None,
    divisor: Tensor | None,
) -> None:
    """Steps every tensor: one launch for those that have dtypes and flags in common.

    Args:
        kernel: "adam" or "sgd".
        layout: its kinds are (parameter, gradient, state dtype, master, aligned, flags).
        places: addresses of parameters and state, as the kernel wants them.
        gradients: addresses of the gradients.
        rates: as `work_out_rates` leaves them.
        skip: 0-d float32; None to step whatever comes.
        divisor: 0-d float32; None to take the gradients as they are.
    """
    key = (kernel, skip is None, divisor is None)
    args = (
        places, gradients, layout.sizes, layout.owner, layout.index, rates,
        rates if skip is None else skip, rates if divisor is None else divisor,
    )  # fmt: skip
    launches = layout.launches.get(key)
    if launches is None:
        launches = [_stepping(kernel, layout, bucket.kind, *key[1:]) for bucket in layout.buckets]
        for launch in launches:
            launch.prepare(layout.device, *args, 0, layout.count)
        layout.launches[key] = launches
    for bucket, launch in zip(layout.buckets, launches, strict=True):
        launch(bucket.chunks, layout.device, *args, bucket.first, layout.count)


def _stepping(kernel: str, layout: Layout, kind: Any, always: bool, unscaled: bool) -> Launch:
    param, grad, state, master, aligned, flags = kind
    wide = torch.float64 if param is torch.float64 else torch.float32
    return launch_for(
        _KERNELS[kernel], WARPS, PARAM=TYPES[param], GRAD=TYPES[grad], STATE=TYPES[state],
        WIDE=TYPES[wide], MASTER=master, **dict(flags), SCALED=not unscaled, SKIPPABLE=not always,
        CHUNK=layout.chunk, TILE=min(TILE, layout.chunk), ALIGN=16 if aligned else 2,
    )  # fmt: skip
