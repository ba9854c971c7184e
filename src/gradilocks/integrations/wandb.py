"""Records → a Weights & Biases run, while the training goes on; offline if so asked.

Needs the `wandb` package: `pip install 'gradilocks[wandb]'`.
"""

from __future__ import annotations

from typing import Any

from gradilocks.errors import MissingPackage
from gradilocks.runfile import (
    End,
    Header,
    Logged,
    OptimizerInfo,
    Resume,
    SpoiltWeights,
    Step,
    describe_skip,
    named_numbers,
)

__all__ = ["WandbSink"]


class WandbSink:
    """Logs every step under `gradilocks/`, with `gradilocks/step` as the axis.

    If a run is already active in this process, the numbers join it and it is left open; otherwise
    a run is begun, and finished with the training.

    Args:
        project: the project of a run that is begun.
        mode: 'online', 'offline' or 'disabled', as `wandb.init` takes it.
        detail: whether to log the numbers of every tensor.
        **more: further arguments of `wandb.init`, as `name`, `dir` or `settings`.

    Raises:
        MissingPackage: the package `wandb` is not installed.

    Example:
        >>> sink = WandbSink(project="mine", mode="offline")  # doctest: +SKIP
        >>> recorder = gradilocks.Recorder("runs/a.jsonl", sinks=[sink])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        project: str = "gradilocks",
        mode: str | None = None,
        detail: bool = True,
        **more: Any,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPackage(
                "Weights & Biases is not installed: pip install 'gradilocks[wandb]'"
            ) from error
        self.detail = detail
        self._wandb: Any = wandb
        self._arguments = {"project": project, "mode": mode, **more}
        self._run: Any = None
        self._begun_here = False
        self._optimizers: dict[int, OptimizerInfo] = {}
        self._spoilt = SpoiltWeights()

    def open(self, header: Header) -> None:
        """Joins the active run, or begins one; its configuration tells what the header does."""
        self._begun_here = self._wandb.run is None
        self._run = self._wandb.init(**self._arguments) if self._begun_here else self._wandb.run
        told = {
            "command": " ".join(header.command),
            "settings": dict(header.settings),
            "versions": dict(header.versions),
            "hardware": dict(header.hardware),
            "config": dict(header.config or {}),
            "git": dict(header.git or {}),
        }
        self._run.config.update({"gradilocks": told}, allow_val_change=True)
        self._run.define_metric("gradilocks/step")
        self._run.define_metric("gradilocks/*", step_metric="gradilocks/step")

    def optimizer(self, info: OptimizerInfo) -> None:
        """Keeps the names that the detail of its steps is logged under."""
        self._optimizers[info.index] = info

    def step(self, step: Step) -> None:
        """Logs the numbers of a step and, if it was skipped, why."""
        info = self._optimizers.get(step.optimizer) if self.detail else None
        numbers: dict[str, Any] = {"step": step.step, "time": step.time}
        numbers |= named_numbers(step, info)
        before = self._spoilt.describe(step.optimizer)
        self._spoilt.take(step)
        if step.skipped:
            numbers["why_skipped"] = describe_skip(step, most=32, spoilt=before)
        self._run.log({f"gradilocks/{name}": value for name, value in numbers.items()})

    def resume(self, resume: Resume) -> None:
        """Weights & Biases keeps what it was told: `gradilocks/step` goes back in its history."""
        self._spoilt.forget()

    def log(self, logged: Logged) -> None:
        """Logs numbers of the user's own, as `gradilocks/log/<name>`."""
        numbers = {f"log/{name}": v for name, v in logged.values.items() if v is not None}
        numbers |= {"step": logged.step, "time": logged.time}
        self._run.log({f"gradilocks/{name}": value for name, value in numbers.items()})

    def close(self, end: End | None) -> None:
        """Finishes the run if it was begun here; one that was active before stays open."""
        if self._run is not None and self._begun_here:
            self._run.finish(exit_code=0 if end is None else end.exit)
        self._run = None
