"""Who else may hear of a run while it goes on: TensorBoard, Weights & Biases, anything of yours.

A sink is told what is written, when it is written: batch by batch, on the host. One that raises is
let go with a warning; the run file and the training go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradilocks.runfile import End, Header, OptimizerInfo, Step
from gradilocks.runfile.sinks import Sink

__all__ = ["Sinks"]

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

    def open(self, header: Header) -> None:
        """The run begins."""
        self._tell(lambda sink: sink.open(header))

    def optimizer(self, info: OptimizerInfo) -> None:
        """An optimizer joins."""
        self._tell(lambda sink: sink.optimizer(info))

    def steps(self, steps: Iterable[Step]) -> None:
        """A batch of steps."""
        for step in steps:
            self._tell(lambda sink, step=step: sink.step(step))  # type: ignore[misc]

    def close(self, end: End) -> None:
        """The run has ended."""
        self._tell(lambda sink: sink.close(end))

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                what(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self._warn(
                    f"the sink {type(sink).__name__} raised {type(error).__name__}: {error}. It "
                    "hears nothing more; recording and training go on."
                )
