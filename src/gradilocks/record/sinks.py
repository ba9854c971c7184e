"""Records of a run enter; whoever else wants them hears: TensorBoard, W&B, anything of yours.

A sink is told what is written, when it is written: batch by batch, on the host. One that raises is
dropped with a warning; the run file and the training go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, runtime_checkable

from gradilocks.runfile import End, Header, OptimizerInfo, Step

__all__ = ["Sink", "Sinks"]


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


_METHODS = ("open", "optimizer", "step", "close")


class Sinks:
    """All sinks of a recorder."""

    def __init__(self, sinks: Iterable[Sink], warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn
        for sink in self._sinks:
            missing = [name for name in _METHODS if not callable(getattr(sink, name, None))]
            if missing:
                raise TypeError(
                    f"a sink needs the methods {', '.join(_METHODS)}; {type(sink).__name__} has no "
                    f"{', '.join(missing)}."
                )

    def tell(self, method: Literal["open", "optimizer", "step", "close"], record: Any) -> None:
        """Calls one method of every sink with a record."""
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(record)
            except Exception as error:
                self._sinks.remove(sink)
                self._warn(
                    f"the sink {type(sink).__name__} raised {type(error).__name__}: {error}. It "
                    "hears nothing more; recording and training go on."
                )
