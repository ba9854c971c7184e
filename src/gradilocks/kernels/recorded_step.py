"""A step on one CUDA device, by kernels that read addresses from tables and are replayed as a CUDA graph.

The kernels' arguments never change: gradient addresses and settings are copied into the tables before a replay, and
results go to `ring[launch % 1024]`. The device counts the launches.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradilocks.errors import OutcomeExpired
from gradilocks.kernels.addresses import AddressReader
from gradilocks.kernels.pointer_table import (
    GRAD,
    MEASURE_CHUNK,
    OPTIMIZER_CHUNK,
    SETTINGS,
    PointerTable,
    chunks_for,
    is_capturing,
    on_device,
    upload,
)
from gradilocks.kernels.triton_kernels import (
    StepBuffers,
    StepTensors,
    launch_coefficients,
    launch_decide,
    launch_measure,
    launch_update,
)
from gradilocks.ranks.collective import RANK_ROW, gather_rows
from gradilocks.ranks.layout import Layout
from gradilocks.step.decide import ROW, Decision, StepInputs

if TYPE_CHECKING:
    from gradilocks.optim.fused_step import FusedStep

SLOTS, STATISTICS_SLOTS = 1024, 64
"""Number of steps whose row, and whose statistics of each tensor, can still be read."""
_captured: list[object] = []
"""Tables that the user's CUDA graphs read at each replay."""


class UpdateTables:
    """The tables of a FusedStep in device memory: addresses, chunks, settings and coefficients."""

    def __init__(self, fused: FusedStep) -> None:
        device, sizes = fused.device, fused.reader.sizes
        is_captured = is_capturing(device)
        keep: list[Tensor] | None = [] if is_captured else None
        self.table = PointerTable(fused.rows, fused.group_count, device, is_captured=is_captured)
        self._chunks = chunks_for(sizes, fused.kinds, OPTIMIZER_CHUNK, device, keep)
        self._groups = upload(array("i", fused.groups), device, keep=keep)
        self._coefficients = torch.empty(len(sizes), SETTINGS, dtype=torch.float64, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        if is_captured:
            _captured.append((self, keep))

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Addresses, groups, settings and coefficients: the last arguments of the decide kernels."""
        return self.table.rows, self._groups, self.table.settings, self._coefficients

    def launch(self, skip: Tensor, divisor: Tensor) -> None:
        """Steps the parameters with coefficients that are already computed."""
        launch_update(self.table.rows, self._chunks, self._coefficients, skip, divisor)

    def run(self, addresses: array[int], settings: list[float], divisor: Tensor | None, skip: Tensor | None) -> None:
        """Steps the parameters according to the caller's decision; see `FusedStep.run`."""
        self.table.refresh(addresses, settings)
        skip = self._zero if skip is None else skip.to(self._zero.device, torch.float32)
        divisor = self._one if divisor is None else divisor.to(self._one.device, torch.float32)
        with on_device(self._zero.device):
            launch_coefficients(self.arguments, skip)
            self.launch(skip, divisor)


class RecordedStep:
    """Measures, decides and optionally updates the parameters of one CUDA device, as a CUDA graph.

    `run` does not synchronize. The first run of each variant launches the kernels one by one, which compiles them; the
    second captures them. While the user captures a graph, they are launched into that graph, with separate tables.
    With Triton's interpreter the same class serves CPU tensors, without graphs.

    Args:
        params: parameters whose gradients are measured.
        step: tensors of the decision.
        order: of the norm: 1, 2 or inf.
        fused: updates `params`; None to decide only.
        layout: ranks that decide together; None for one rank.

    Attributes:
        device: of the parameters.
        skip, divisor, multiplier: the decision.
        rows: [ranks, len(RANK_ROW)], the rows of all ranks in the last step.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        step: StepTensors,
        *,
        order: float,
        fused: FusedStep | None,
        layout: Layout | None,
    ) -> None:
        self.skip, self.divisor, self.multiplier = step.skip, step.divisor, step.multiplier
        self._params, self._step, self._order, self._fused, self._layout = params, step, order, fused, layout
        self.device = device = step.scale.device
        self._reader = AddressReader(params)
        self._is_captured = is_capturing(device)
        keep: list[Tensor] | None = [] if self._is_captured else None
        self._chunks = chunks_for(self._reader.sizes, self._reader.dtypes, MEASURE_CHUNK, device, keep)
        self._update = None if fused is None else UpdateTables(fused)
        if self._update is None:
            self._table = PointerTable([[0] * len(params)] * 5, 0, device, is_captured=self._is_captured)
        else:
            self._table = self._update.table
        row = torch.zeros(len(RANK_ROW) + 2, dtype=torch.float64, device=device)
        self._own_row = row[: len(RANK_ROW)]
        self.rows = self._own_row.unsqueeze(0) if layout is None else row.new_zeros(layout.size, len(RANK_ROW))
        self._buffers = StepBuffers(
            partial=row.new_empty(5, self._chunks.total),
            arrived=torch.zeros((), dtype=torch.int32, device=device),
            shares=row.new_ones(len(params)) if layout is None else layout.weights(row),
            overflow=torch.zeros((), dtype=torch.float32, device=device),
            row=row,
            rows=self.rows,
            statistics=row.new_empty(1 if self._is_captured else STATISTICS_SLOTS, 5, len(params)),
            launches=torch.zeros((), dtype=torch.int64, device=device),
            ring=row.new_empty(1 if self._is_captured else SLOTS, len(ROW)),
        )
        self._has_overflow = False
        self._count = 0
        self._graphs: dict[object, torch.cuda.CUDAGraph | None] = {}
        self._is_recordable = device.type == "cuda" and not self._is_captured
        self._user_graph_steps: list[RecordedStep] = []
        """One for each step that the user has captured. Slot -1 - i means element i."""
        if keep is not None:
            _captured.append((self, keep))

    def run(self, grads: list[Tensor | None], inputs: StepInputs) -> Decision | None:
        """Performs one step. Every gradient is measured; `inputs.needs_statistics` has no effect.

        Returns:
            None if a gradient has another layout than its parameter.
        """
        addresses = self._reader.read_gradients(grads)
        if addresses is None:
            return None
        slot = self.launch(addresses, inputs)
        return Decision(
            skip=self.skip,
            multiplier=self.multiplier,
            divisor=self.divisor,
            overflow=self.skip,  # ClipByNorm rejects no step, so every skipped one overflowed.
            row=partial(self.row, slot),
            statistics=partial(self.statistics, slot),
            rank_rows=None if self._layout is None else self.rows.clone(),
        )

    def launch(self, addresses: array[int], inputs: StepInputs) -> int:
        """Performs one step with the gradients at `addresses`.

        Returns:
            The slot for `row` and `statistics`; negative for a step that is captured in the user's graph.
        """
        if is_capturing(self.device) and not self._is_captured:
            # Eager steps must not overwrite the tables that the user's graph reads.
            captured = RecordedStep(self._params, self._step, order=self._order, fused=self._fused, layout=self._layout)
            self._user_graph_steps.append(captured)
            captured.launch(addresses, inputs)
            self.rows = captured.rows
            return -len(self._user_graph_steps)
        self._table.refresh(addresses, [] if self._fused is None else self._fused.settings())
        if inputs.overflow is not None:
            self._buffers.overflow.copy_(inputs.overflow, non_blocking=True)
        elif self._has_overflow:
            self._buffers.overflow.zero_()
        self._has_overflow = inputs.overflow is not None
        key = inputs.is_unscaled, inputs.updates_scale
        flags = {"unscaled": inputs.is_unscaled, "updates_scale": inputs.updates_scale}
        if self._layout is None:
            self._replay(key, partial(self._launch, measure=True, decide=True, **flags))
        else:
            self._write_loss(inputs.loss)
            self._replay("measure", partial(self._launch, measure=True, decide=False))
            if self._has_overflow:
                self._own_row[RANK_ROW.index("scale")].neg_()
            self._buffers.rows.copy_(gather_rows(self._own_row, self._layout))
            self._replay(key, partial(self._launch, measure=False, decide=True, **flags))
        self.rows = self._buffers.rows
        self._count += 1
        return self._count - 1

    def row(self, slot: int) -> Tensor:
        """The numbers named by `step.decide.ROW`, on the device. Later steps overwrite them.

        Raises:
            OutcomeExpired: if they have been overwritten.
        """
        if slot < 0:
            return self._user_graph_steps[-slot - 1].last_row()
        return self._slot(self._buffers.ring, slot)

    def last_row(self) -> Tensor:
        """The row of the latest step; for a step in the user's graph, of the latest replay."""
        latest = self._user_graph_steps[-1] if self._user_graph_steps else self
        return latest._slot(latest._buffers.ring, latest._count - 1)

    def statistics(self, slot: int) -> Tensor:
        """float64 [5, n]: the statistics of each gradient, see `kernels.measure`.

        Raises:
            OutcomeExpired: if they have been overwritten.
        """
        if slot < 0:
            return self._user_graph_steps[-slot - 1].statistics(0)
        return self._slot(self._buffers.statistics, slot)

    def _slot(self, ring: Tensor, slot: int) -> Tensor:
        if not self._count - ring.shape[0] <= slot < self._count:
            raise OutcomeExpired(
                f"the device keeps these numbers for {ring.shape[0]} steps, and {self._count - slot - 1} steps "
                "followed. Read them earlier."
            )
        return ring[slot % ring.shape[0]]

    def _write_loss(self, loss: Tensor | None) -> None:
        at = RANK_ROW.index("loss")
        self._own_row[at + 1].fill_(float(loss is not None))
        if loss is not None:
            self._own_row[at].copy_(loss, non_blocking=True)

    def _replay(self, key: object, launch: Callable[[], None]) -> None:
        """Launches kernels: the first call of a key compiles them, the second captures a graph, others replay it."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()  # Selects the graph's device itself.
            return
        with on_device(self.device):
            if key in self._graphs and self._is_recordable:
                graph = self._graphs[key] = self._record(launch)
            self._graphs.setdefault(key, None)
            graph.replay() if graph is not None else launch()

    def _record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Captures kernels in a graph; None if the capture fails."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Not torch.cuda.graph(), which would synchronize and empty the cache of the allocator.
            with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    launch()
                finally:
                    graph.capture_end()
        except RuntimeError:
            self._is_recordable = False
            return None
        return graph

    def _launch(self, *, measure: bool, decide: bool, unscaled: bool = False, updates_scale: bool = False) -> None:
        update = None if self._update is None else self._update.arguments
        if measure:
            launch_measure(self._table.rows[GRAD], self._chunks, self._buffers.partial, order=self._order)
        launch_decide(
            self._chunks, self._buffers, self._step, update,
            order=self._order, reduce=measure, decide=decide, unscaled=unscaled, updates_scale=updates_scale,
        )  # fmt: skip
        if decide and self._update is not None:
            self._update.launch(self.skip, self.divisor)
