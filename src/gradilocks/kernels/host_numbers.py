"""Numbers of the host in, a tensor on the device out, without a wait and safe in a CUDA graph.

A settings table, the places of some tensors among others, who counts: small, and the same at nearly
every step. `numbers_on` sends them once and keeps them; `send` sends them whenever it is called.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from gradilocks._torch import current_stream
from gradilocks.kernels import native
from gradilocks.kernels.cuda_graph import capturing, keep_if_captured

__all__ = ["STAGED", "numbers_on", "send", "send_into", "stream_of"]

_MOST_KEPT = 64
STAGED = 1 << 16
"""So many bytes the driver takes over before it returns; more is pinned, or it might wait."""


def send(numbers: Tensor | array[int], device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on `device`, without waiting for it.

    Always a new tensor: a kernel that is still queued may be reading the last one.
    """
    if isinstance(numbers, array):
        numbers = torch.frombuffer(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return numbers.to(device, copy=True)
    if numbers.numel() == 0:
        return torch.empty_like(numbers, device=device)
    if numbers.nbytes > STAGED or capturing():
        numbers = numbers.pin_memory()
        keep_if_captured(numbers)  # It is sent again at every replay.
    return numbers.to(device, non_blocking=True)


def send_into(there: Tensor, numbers: Tensor, stream: int | None) -> None:
    """Numbers of the host into a tensor of a device, without waiting for it, in a stream's order.

    Through the driver, from C++, where that is built: 2,000 take an H200's host 0.01 ms, by torch
    and into a new tensor 0.07 after other work has filled the cache. Not inside a CUDA graph.

    Args:
        there: int64, contiguous; whoever still reads it does so on `stream`.
        numbers: int64, of as many elements.
        stream: the current one of that device, as `stream_of` has it.
    """
    library = native.library() if there.is_cuda and numbers.nbytes <= STAGED else None
    if library is None or not library.cuda_upload(there, numbers, there.get_device(), stream):
        pinned = there.is_cuda and numbers.nbytes > STAGED
        there.copy_(numbers.pin_memory() if pinned else numbers, non_blocking=True)


def stream_of(device: torch.device) -> int | None:
    """The stream on which work for `device` is queued; no other waits for what is sent on it."""
    return None if device.type != "cuda" else current_stream(device.index)


def numbers_on(
    device: torch.device, numbers: tuple[float, ...], dtype: torch.dtype = torch.float64
) -> Tensor:
    """The numbers as a tensor that nobody writes to: sent on first use and kept a stream."""
    key = (numbers, dtype, device, stream_of(device))
    kept = None if capturing() else _kept.get(key)
    if kept is None:
        kept = send(torch.tensor(numbers, dtype=dtype, device="cpu"), device)
        if capturing():  # What a graph sends is there only when it is replayed.
            keep_if_captured(kept)
            return kept
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[key] = kept
    return kept


_kept: dict[tuple[object, ...], Tensor] = {}
