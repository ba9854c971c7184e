"""Records → a TensorBoard folder, while the run goes on or afterwards.

Needs the `tensorboard` package and nothing more: `pip install 'gradilocks[tensorboard]'`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from os import PathLike
from pathlib import Path
from typing import Any

from gradilocks.errors import GradilocksError, MissingPackage
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

__all__ = ["TensorBoardSink", "is_ours", "own_events"]

# torch's and TensorFlow's writers put the time in seconds there, ten digits; ours in nanoseconds.
_NAME = re.compile(r"events\.out\.tfevents\.\d{19}\..+")


def is_ours(path: Path) -> bool:
    """Whether an event file was written by a TensorBoardSink, by its name."""
    return _NAME.fullmatch(path.name) is not None


def own_events(folder: Path) -> list[Path]:
    """The event files in a folder, all of them a TensorBoardSink's; none if there is no folder.

    Raises:
        GradilocksError: it is a file, or holds what somebody else wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise GradilocksError(f"{folder} is a file; TensorBoard needs a folder: give another -o.")
    found = sorted(folder.glob("events.out.tfevents.*"))
    foreign = next((path for path in found if not is_ours(path)), None)
    if foreign is not None:
        raise GradilocksError(
            f"{folder} holds a TensorBoard run that gradilocks did not write ({foreign.name}), so "
            "it is never replaced; -o names another folder."
        )
    return found


class TensorBoardSink:
    """Writes every step as scalars, every skip and the header as text.

    The scalars are `loss`, `scale`, `norm`, `limit`, `lr`, `clipped`, `skipped`, `nan` and `inf`,
    and `detail/norm/<parameter>` and so on at the steps that have detail; numbers of the user's own
    are `log/<name>`. Times are those of the run. A step costs about 0.07 ms, and one with detail of
    200 tensors 13 ms (one core of a Xeon at 2.8 GHz), most of it TensorBoard's checksum, which is
    Python: `detail=False` leaves it out.

    Args:
        folder: TensorBoard's log folder; made if it is not there.
        detail: whether to write the numbers of every tensor.
        flush_seconds: how long a number may wait before it is written to disk.

    Raises:
        MissingPackage: the package `tensorboard` is not installed.

    Example:
        >>> sink = TensorBoardSink("runs/tb")  # doctest: +SKIP
        >>> recorder = gradilocks.Recorder("runs/a.jsonl", sinks=[sink])  # doctest: +SKIP
    """

    def __init__(
        self, folder: str | PathLike[str], *, detail: bool = True, flush_seconds: float = 10.0
    ) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise MissingPackage(
                "TensorBoard is not installed: pip install 'gradilocks[tensorboard]'"
            ) from error
        self.folder = Path(folder)
        self.detail = detail
        self._events, self._summaries = event_pb2, summary_pb2
        self._tensors, self._types = tensor_pb2, types_pb2
        self._new_writer = RecordWriter
        self._flush_seconds = flush_seconds
        self._writer: Any = None
        self._started = self._flushed = 0.0
        self._optimizers: dict[int, OptimizerInfo] = {}
        self._spoilt = SpoiltWeights()

    def open(self, header: Header) -> None:
        """Makes the folder and a new event file in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard's own file writer has a thread, which cannot report a full disk.
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = self._new_writer((self.folder / name).open("xb"))
        self._started = header.started
        self._write(self._events.Event(wall_time=header.started, file_version="brain.Event:2"))
        told = {
            "command": " ".join(header.command),
            "settings": dict(header.settings),
            "versions": dict(header.versions),
            "hardware": dict(header.hardware),
        }
        # Four spaces make a block of code of it, in TensorBoard's Markdown.
        text = "\n".join(f"    {line}" for line in json.dumps(told, indent=2).splitlines())
        self._add([self._text("run", text)], at=0.0, step=0)

    def optimizer(self, info: OptimizerInfo) -> None:
        """Keeps the names that the detail of its steps is written under."""
        self._optimizers[info.index] = info

    def step(self, step: Step) -> None:
        """Adds the numbers of a step and, if it was skipped, why."""
        info = self._optimizers.get(step.optimizer) if self.detail else None
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in named_numbers(step, info).items()
        ]
        before = self._spoilt.describe(step.optimizer)
        self._spoilt.take(step)
        if step.skipped:
            values.append(
                self._text(
                    "skips", f"step {step.step}: {describe_skip(step, most=32, spoilt=before)}"
                )
            )
        self._add(values, at=step.time, step=step.step)

    def resume(self, resume: Resume) -> None:
        """Has TensorBoard leave out what it has of later steps, which are superseded.

        By their numbers alone: of a run with several optimizers, which may count otherwise, later
        steps stay.
        """
        self._spoilt.forget()
        if len(self._optimizers) == 1:
            begins = self._events.SessionLog(status=self._events.SessionLog.START)
            at = self._started + resume.time
            self._write(self._events.Event(wall_time=at, step=resume.step + 1, session_log=begins))

    def log(self, logged: Logged) -> None:
        """Adds numbers of the user's own."""
        values = [
            self._summaries.Summary.Value(tag=f"log/{name}", simple_value=value)
            for name, value in logged.values.items()
            if value is not None
        ]
        self._add(values, at=logged.time, step=logged.step)

    def close(self, end: End | None) -> None:
        """Writes what is still waiting."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _add(self, values: list[Any], *, at: float, step: int) -> None:
        summary = self._summaries.Summary(value=values)
        self._write(self._events.Event(wall_time=self._started + at, step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        now = time.monotonic()
        if now - self._flushed >= self._flush_seconds:
            self._writer.flush()
            self._flushed = now

    def _text(self, tag: str, text: str) -> Any:
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        return self._summaries.Summary.Value(
            tag=tag,
            metadata=self._summaries.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensors.TensorProto(
                dtype=self._types.DT_STRING, string_val=[text.encode("utf-8", "replace")]
            ),
        )
