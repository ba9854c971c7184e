"""Steps of a control as scalars in TensorBoard."""

from __future__ import annotations

from typing import Any

from gradilocks.integrations.step_callback import StepCallback

__all__ = ["TensorBoardCallback"]


class TensorBoardCallback(StepCallback):
    """Writes loss, lr, scale, norm, limit, clipped, skipped, nan and inf of every step as scalars.

    Subscribe it on one rank, and call `flush()` before you close the writer: on a GPU the numbers arrive a step or two
    late.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        prefix: precedes all tags.
    """

    def __init__(self, writer: Any, *, prefix: str = "gradilocks/") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"TensorBoardCallback takes a SummaryWriter, got {type(writer).__name__}.")
        super().__init__(prefix)
        self._writer = writer

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        """Writes one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)
