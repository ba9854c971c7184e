"""The floor: how long the bytes of a step take at the device's own copy bandwidth."""

from __future__ import annotations

import torch
from harness import Times

from report import Row, spread

STEP_BYTES = 32
"""float32: the measuring reads 4; AdamW reads 16 (gradient, parameter, moments) and writes 12."""
CLIP_BYTES = 12
"""float32: read once to measure, read and written once to multiply."""
NORM_BYTES = 4
"""float32: read once to measure, and nothing to multiply."""
MASTERS_BYTES = 30
"""fp16 with fp32 masters: the measuring reads 2; AdamW reads 14 (gradient, master, moments) and
writes 14 (master, moments, parameter). The fp16 parameter itself need not be read."""
BF16_BYTES = 16
"""bf16 throughout: the measuring reads 2; AdamW reads 8 and writes 6."""


class Floor:
    """Copies a large tensor on the device, many times, and remembers how fast that was."""

    def __init__(self, device: torch.device, *, gib: int = 2, rounds: int = 40) -> None:
        source = torch.ones(gib << 28, device=device)
        target = torch.empty_like(source)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        taken: Times = {"gpu": []}
        for number in range(5 + rounds):
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            if number >= 5:
                taken["gpu"].append(begin.elapsed_time(end))
        moved = 2 * source.numel() * source.element_size()
        self._rounds = rounds
        self._ms_per_byte = [ms / moved for ms in taken["gpu"]]

    @property
    def bytes_per_second(self) -> float:
        """The median; bytes read and bytes written both count."""
        return 1e3 / spread(self._ms_per_byte).median_ms

    def ms(self, count: int, bytes_each: int) -> float:
        """How long so many elements take."""
        return spread(self._ms_per_byte).median_ms * count * bytes_each

    def row(self, workload: str, count: int, bytes_each: int) -> Row:
        """The floor as a row beside the contenders'."""
        taken = [each * count * bytes_each for each in self._ms_per_byte]
        name = f"floor: {bytes_each} bytes at {self.bytes_per_second / 1e12:.2f} TB/s"
        return Row(
            workload,
            name,
            rounds=self._rounds,
            times={"gpu": spread(taken)},
            floor_ms=self.ms(count, bytes_each),
        )
