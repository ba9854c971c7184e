"""Tensors enter, how many of their values have which exponent leaves, and how many of these are
powers of two: such a value may lie exactly on a format's border.

Counted on the tensor's own device, in integers, from the bits of a float32. Nothing waits until
`read` fetches all counts at once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradilocks.kernels import pieces
from gradilocks.lab.audit_record import Histogram
from gradilocks.step.table import measurable

__all__ = ["Tally", "read", "rows_read", "values_of"]

LOWEST = -149
"""The exponent of the smallest float32; what a float64 has below it is counted there."""
HIGHEST = 127
_CELLS = HIGHEST - LOWEST + 3  # The first is for zeros, the last for NaN and Inf.
_NONFINITE = _CELLS - 1
_INF = 0x7F800000
_NORMAL = 0x00800000  # The bits of the smallest normal float32.
# A row: how many are in which cell, how many of them are powers of two, and the bits of the
# largest and the smallest magnitude.
_MOST, _LEAST = 2 * _CELLS, 2 * _CELLS + 1
_ROW = 2 * _CELLS + 2
_MANTISSA = 0x007FFFFF
# On a CPU the passes over a piece find it in the cache: 4 ns a value instead of 24 (4 M values).
_PIECE = 1 << 16
_LARGE_PIECE = 1 << 24  # Elsewhere it bounds the memory: 30 bytes a value for a moment.
_LANES = 64  # Elsewhere a count is spread over so many addresses: all values share a few cells.


class Tally:
    """Counts of one thing: a module's parameters, or its output."""

    def __init__(self) -> None:
        self.rows: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def add(self, gradient: Tensor, *, scale: Tensor | float = 1.0) -> None:
        """Counts a gradient's values, divided by the scale that they carry."""
        values = values_of(gradient)
        if values is None:
            return
        home = values.device
        row = self.rows.get(home)
        if row is None:
            row = self.rows[home] = torch.zeros(_ROW, dtype=torch.int64, device=home)
            row[_LEAST] = _INF
        if isinstance(scale, Tensor):
            scale = scale.detach().to(home, non_blocking=True)
        for part in pieces.of(values, _PIECE if home.type == "cpu" else _LARGE_PIECE):
            self._count(row, part if part.dtype is torch.float64 else part.float(), scale)

    def take(self, other: Tally) -> None:
        """Counts what another has counted as well."""
        for home, row in other.rows.items():
            own = self.rows.get(home)
            if own is None:
                self.rows[home] = row.clone()
                continue
            own[: 2 * _CELLS] += row[: 2 * _CELLS]
            own[_MOST] = torch.maximum(own[_MOST], row[_MOST])
            own[_LEAST] = torch.minimum(own[_LEAST], row[_LEAST])

    def _count(self, row: Tensor, part: Tensor, scale: Tensor | float) -> None:
        if isinstance(scale, Tensor) or scale != 1.0:
            part = part / scale
        bits = _bits(part)
        row[: 2 * _CELLS] += _counted(part, bits)
        least, most = _extremes(bits)
        row[_MOST] = torch.maximum(row[_MOST], most)
        row[_LEAST] = torch.minimum(row[_LEAST], least)


def values_of(tensor: Tensor) -> Tensor | None:
    """A tensor's own numbers, of complex ones both parts; None if there are none to be counted."""
    values = measurable(tensor)
    if values is None or not values.numel():
        return None
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def read(tallies: Sequence[Tally]) -> list[Histogram]:
    """The counts of all of them. Waits for the devices, once for each."""
    found = rows_read([tally.rows for tally in tallies])
    return [Histogram.total(map(_histogram, rows)) for rows in found]


def rows_read(held: Sequence[Mapping[torch.device, Tensor]]) -> list[list[Any]]:
    """The rows of each, as lists; waits once for each device that there are rows on."""
    found: list[list[Any]] = [[] for _ in held]
    for device in {device for rows in held for device in rows}:
        places = [place for place, rows in enumerate(held) if device in rows]
        stacked = torch.stack([held[place][device] for place in places])
        for place, row in zip(places, stacked.tolist(), strict=True):
            found[place].append(row)
    return found


def _histogram(row: Sequence[int]) -> Histogram:
    bins = {LOWEST + place: count for place, count in enumerate(row[1:_NONFINITE])}
    powers = {LOWEST + place: count for place, count in enumerate(row[_CELLS + 1 : _MOST - 1])}
    some = any(bins.values())
    return Histogram.of(
        bins,
        powers=powers,
        zeros=row[0],
        nonfinite=row[_NONFINITE],
        largest=_number(row[_MOST]) if some else None,
        smallest=_number(row[_LEAST]) if some else None,
    )


def _number(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def _bits(values: Tensor) -> Tensor:
    """The bits of the magnitudes, which are in the order of the magnitudes."""
    if values.dtype is torch.float64:
        size = values.abs()
        held = size.clamp(2.0**LOWEST, torch.finfo(torch.float32).max)
        values = torch.where((size > 0.0) & size.isfinite(), held, size).to(torch.float32)
    return values.view(torch.int32) & 0x7FFFFFFF


def _extremes(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The least above zero and the most below Inf."""
    if bits.device.type == "cpu":  # Where most gradients are finite and other than zero: one pass.
        least, most = torch.aminmax(bits)
        if least > 0 and most < _INF:
            return least, most
    return torch.where(bits > 0, bits, _INF).amin(), torch.where(bits < _INF, bits, 0).amax()


def _counted(values: Tensor, bits: Tensor) -> Tensor:
    """The counts of the cells, then those of the powers of two in them."""
    if values.dtype is torch.float64:
        mantissas, _ = torch.frexp(values)
        return _both(_cells_of_doubles(values), mantissas.abs() == 0.5)
    if values.device.type != "cpu":
        cells = torch.where(bits < _NORMAL, _cells_of_small(bits), (bits >> 23) + 23)
        return _both(cells, _are_powers(bits))
    made = torch.zeros(2, _CELLS, dtype=torch.int64)
    counts = torch.bincount(bits >> 23, minlength=256)
    made[0, 24:] = counts[1:]
    mantissas = bits & _MANTISSA
    # Few pieces have one: 0.3 ns a value to see that, 2 ns to pick them out.
    if len(bits) and not mantissas.amin():
        powers = bits[mantissas == 0]  # Zeros and Inf are among them, and not looked at.
        made[1, 24:_NONFINITE] = torch.bincount(powers >> 23, minlength=256)[1:255]
    if counts[0]:  # Zeros and subnormals.
        small = bits[bits < _NORMAL]
        made += _both(_cells_of_small(small), _are_powers(small)).view(2, _CELLS)
    return made.view(-1)


def _both(cells: Tensor, powers: Tensor) -> Tensor:
    """Each cell twice: once for all, once for powers of two."""
    named = torch.where(powers, cells + _CELLS, cells)
    on_cpu = named.device.type == "cpu"
    counts = torch.bincount(named, minlength=2 * _CELLS) if on_cpu else _spread_sum(named)
    counts = counts.view(2, _CELLS)
    counts[0] += counts[1]
    return counts.view(-1)


def _are_powers(bits: Tensor) -> Tensor:
    """Of a subnormal the bits are a number; of another the mantissa is zero. Inf is none."""
    small = (bits & (bits - 1) == 0) & (bits > 0)
    return torch.where(bits < _NORMAL, small, (bits & _MANTISSA == 0) & (bits < _INF))


def _cells_of_small(bits: Tensor) -> Tensor:
    """Of zeros and subnormals: as an integer the bits are a number times 2**149."""
    return ((bits.to(torch.float32).view(torch.int32) >> 23) - 126).clamp_min(0)


def _cells_of_doubles(values: Tensor) -> Tensor:
    exponents = torch.frexp(values)[1] - 1
    cells = (exponents - LOWEST + 1).clamp(1, _NONFINITE - 1)
    cells = torch.where(values == 0.0, 0, cells)
    return torch.where(values.isfinite(), cells, _NONFINITE)


def _spread_sum(cells: Tensor) -> Tensor:
    """How often each cell is named; integers, so that the order of the sum is of no matter."""
    lanes = torch.arange(cells.numel(), device=cells.device) % _LANES
    counts = torch.zeros(2 * _CELLS * _LANES, dtype=torch.int64, device=cells.device)
    one = torch.ones(1, dtype=torch.int64, device=cells.device).expand(cells.numel())
    return counts.index_add_(0, cells.to(torch.int64) * _LANES + lanes, one).view(-1, _LANES).sum(1)
