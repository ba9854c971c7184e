"""Steps of a control in the rows of a Weights & Biases run."""

from __future__ import annotations

from typing import Any

from gradilocks.integrations.step_callback import StepCallback

__all__ = ["WandbCallback"]


class WandbCallback(StepCallback):
    """Adds the numbers of the latest step, and the number of skipped steps, to the next row that you log.

    It never commits a row, so your `wandb.log(..., step=...)` keeps its axis. If you log every 10th step, the rows have
    the numbers of every 10th step; `skipped_steps` counts all. Subscribe it on one rank, and call `flush()` before your
    last `wandb.log`: on a GPU the numbers arrive a step or two late.

    Args:
        run: the result of `wandb.init`.
        prefix: precedes all names.
    """

    def __init__(self, run: Any, *, prefix: str = "gradilocks/") -> None:
        if not callable(getattr(run, "log", None)):
            raise TypeError(f"WandbCallback takes the result of wandb.init(...), got {type(run).__name__}.")
        super().__init__(prefix)
        self._run, self._skipped = run, 0

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        """Adds one step to the next row."""
        self._skipped += any(value for name, value in values.items() if name.endswith("skipped"))
        counts = {f"{self.prefix}step": step, f"{self.prefix}skipped_steps": self._skipped}
        self._run.log(values | counts, commit=False)
