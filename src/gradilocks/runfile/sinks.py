"""Where else a run's records may go while it runs: what a `Recorder` asks of a sink."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gradilocks.runfile.records import End, Header, OptimizerInfo, Step

__all__ = ["Sink"]


@runtime_checkable
class Sink(Protocol):
    """Takes the records of one run: `open` first, `close` last.

    A sink may raise; whoever feeds it keeps that away from the training.
    """

    def open(self, header: Header) -> None:
        """The run begins."""

    def optimizer(self, info: OptimizerInfo) -> None:
        """An optimizer is about to take its first step."""

    def step(self, step: Step) -> None:
        """A step was taken or skipped."""

    def close(self, end: End | None) -> None:
        """The run ended; None if nobody knows how."""
