"""Run files: JSON Lines with one object per step, log entry or culprit.

    header, optimizer, start, step, log, culprit, end

Lines are flat. Later lines win: a `start` line discards the steps after its own number, so a resumed run appends to
its file. Non-finite numbers are the strings "nan", "inf" and "-inf"; missing values are left out.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradilocks._version import __version__
from gradilocks.checks import check_number
from gradilocks.errors import GradilocksError
from gradilocks.events import StepRecord
from gradilocks.kernels import STATISTICS
from gradilocks.ranks.layout import local
from gradilocks.step.decide import ROW
from gradilocks.step.gradients import parameters

__all__ = ["FORMAT", "Recorder", "WeightSample", "log"]

FORMAT = 3
_STEPS, _SECONDS = 50, 5.0  # Largest batch, at most 1,000 (what the device keeps), and longest time between two writes.
_FLAGS = ("skipped", "rejected", "clipped")
_INTEGERS = ("step", "nan", "inf")
_open: set[Recorder] = set()
"""Recorders that `log` writes to. Strong references, so that an unreferenced recorder still writes at exit."""


def log(**numbers: float | Tensor) -> None:
    """Adds numbers to every open run file under its latest step: `gradilocks.log(accuracy=0.9)`.

    Args:
        numbers: Python numbers or tensors of one element, which are read with the next batch of lines.
    """
    _check_numbers(numbers)
    for recorder in list(_open):
        recorder.log(**numbers)


class Recorder:
    """Writes the steps of a training run to a file. Recording changes no bit of the training.

    Numbers stay on the device until a batch is full; then one copy brings them to the host and one `os.write` appends
    whole lines. A process that is killed loses at most 50 steps or five seconds of steps. A
    forked child writes nothing. Rank r > 0 writes `run.rankR.jsonl`, without its finite steps.

    Args:
        path: path of the run file; folders are created. An existing file is continued.
        detail_every: number of steps between records of norms, zeros and updates of each tensor; 0 for never.
        config: your own settings, shown in the report.
        overwrite: replace an existing file.
        label: name of the run in the report; by default the script with its arguments.

    Examples:
        >>> recorder = Recorder("runs/a.jsonl", config={"batch": 32})
        >>> control = GradientControl(optimizer, model=model, record=recorder)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        detail_every: int = 10,
        config: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        *,
        label: str | None = None,
        source: str = "control",
        command: Sequence[str] | None = None,
    ) -> None:
        check_number("detail_every", detail_every, at_least=0, integer=True)
        self.detail_every = detail_every
        self.rank, world_size = _rank()
        self.path = Path(path)
        """Path of the file that this process writes."""
        if self.rank:
            self.path = self.path.with_name(f"{self.path.stem}.rank{self.rank}{self.path.suffix}")
        self._file: int | None = _open_file(self.path, overwrite=overwrite)
        self._process = os.getpid()
        """The process that writes; -1 after an error."""
        self._pending: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
        """Lines and the tensors that complete them."""
        self._last_write = self._last_step_time = -math.inf
        self._latest_step: dict[int, int] = {}
        """Latest step of each optimizer."""
        self._step_count: dict[int, int] = {}
        """Number of recorded steps of each optimizer."""
        self._optimizers: dict[Any, int] = {}
        """Index in the file, by control and indices of its optimizers."""
        self._samples: dict[int, WeightSample] = {}
        self._steps, self._final_loss, self._has_start = 0, math.nan, False
        command = list(sys.argv if command is None else command)
        self._header: dict[str, Any] = {
            "kind": "header",
            "format": FORMAT,
            "version": __version__,
            "source": source,
            "label": label or (" ".join([os.path.basename(command[0]), *command[1:]]) if command else ""),
            "command": command,
            "rank": self.rank,
            "world_size": world_size,
            "time": time.time(),
            "device": _device(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "git": _git_state(),
            "config": None if config is None else dict(config),
        }
        self.write(self._header)
        _open.add(self)
        atexit.register(self.close)

    def __call__(self, record: StepRecord) -> None:
        """Records one step of a control."""
        if record.outcome.is_captured:  # Replays of the user's CUDA graph run no host code.
            return
        index = self.index_of(record)
        sample = self._samples[index]
        tensors = {"row": record.outcome.row}
        fields: dict[str, Any] = {"kind": "step", "optimizer": index, "time": record.time}
        fields |= {"is_unscaled": record.is_unscaled, "is_largest_scaled": True}
        if record.loss is not None:
            tensors["loss"] = record.loss.detach().clone()  # The script may write to its loss later.
        rate = next(iter(record.learning_rates), None)
        if isinstance(rate, Tensor):
            tensors["lr"] = rate.detach().clone()
        elif rate is not None:
            fields["lr"] = float(rate)
        if record.control._state.policy is None:
            fields["scale"] = None
        if self.is_detailed(index):
            tensors |= {"statistics": record.outcome.statistics.clone(), "updates": sample.updates()}
            fields["sizes"] = sample.sizes
        self.step(fields, tensors)
        if self.is_detailed(index):
            sample.take()  # Before the next step.

    def index_of(self, record: StepRecord) -> int:
        """The index of a record's optimizers in the file. Their line is written on the first call."""
        key = weakref.ref(record.control), record.optimizers
        if key not in self._optimizers:
            control = record.control
            optimizers = [control.optimizers[i] for i in record.optimizers]
            policy = control._state.policy
            index = self.add_optimizer(
                " + ".join(type(optimizer).__name__ for optimizer in optimizers),
                optimizers,
                record.outcome.names,
                scale=None if policy is None else repr(policy),
                clip=", ".join(map(repr, control._clip)) or None,
            )
            self._optimizers[key], self._samples[index] = index, WeightSample(parameters(optimizers))
        return self._optimizers[key]

    def is_detailed(self, index: int) -> bool:
        """True if the next step of an optimizer is recorded with per-tensor statistics."""
        return self.detail_every > 0 and self._step_count[index] % self.detail_every == 0

    def step(self, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Adds one step line, completed by the values of some tensors when the batch is written."""
        self._add(fields, tensors)
        self._step_count[fields["optimizer"]] += 1
        now = time.monotonic()
        is_slow = now - self._last_step_time > _SECONDS / 5  # The next step may come late.
        self._last_step_time = now
        if is_slow or len(self._pending) >= _STEPS or now - self._last_write >= _SECONDS:
            self.flush()

    def log(self, **numbers: float | Tensor) -> None:
        """Adds a log line with your own numbers, under the latest step."""
        _check_numbers(numbers)
        tensors = {name: value.detach().clone() for name, value in numbers.items() if isinstance(value, Tensor)}
        values = {name: float(value) for name, value in numbers.items() if not isinstance(value, Tensor)}
        self._add({"kind": "log", "time": time.time(), "values": values}, tensors)

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line immediately, after the pending lines."""
        self.flush()
        # A start line after a culprit would discard it.
        start = self._start_lines(line["optimizer"], line["step"]) if line["kind"] == "culprit" else []
        self._write([*start, line])

    def flush(self) -> None:
        """Writes all pending lines. Waits for the device."""
        if self._pending:
            pending, self._pending = self._pending, []
            numbers = _to_host([tensor for _, tensors in pending for tensor in tensors.values()])
            lines = []
            for fields, tensors in pending:
                values = {name: next(numbers) for name in tensors}
                lines += self._log_line(fields, values) if fields["kind"] == "log" else self._step_lines(fields, values)
            self._write(lines)
        self._last_write = time.monotonic()

    def close(self, status: str | None = None, **fields: Any) -> None:
        """Writes the end line and closes the file. Called at exit unless called before.

        Args:
            status: "finished" or an error; by default the exception that ended the script, if there is one.
            fields: more fields of the line.
        """
        if self._file is None:
            return
        if os.getpid() == self._process:
            if status is None:
                error = getattr(sys, "last_value", None)
                status = "finished" if error is None else f"{type(error).__name__}: {error}"
            self.flush()
            line = {"kind": "end", "time": time.time(), "steps": self._steps, "status": status, **fields}
            self.write({**line, "final_loss": None if math.isnan(self._final_loss) else self._final_loss})
        os.close(self._file)
        self._file = None
        _open.discard(self)
        atexit.unregister(self.close)

    @property
    def steps(self) -> int:
        """Number of steps written."""
        return self._steps

    def add_optimizer(self, kind: str, optimizers: Sequence[Any], names: Sequence[str], **fields: Any) -> int:
        """Writes an optimizer line; returns the optimizer's index in the file."""
        index = len(self._latest_step)
        self._latest_step[index], self._step_count[index] = -1, 0
        params = parameters(optimizers)
        group = optimizers[0].param_groups[0]
        settings = {
            name: value
            for name, value in group.items()
            if name != "params" and isinstance(value, (bool, int, float, str))
        }
        line = {"kind": "optimizer", "optimizer": index, "class": kind, "tensors": len(params)}
        line["parameters"] = sum(param.numel() for param in params)
        self.write({**line, "names": list(names), **fields, "settings": settings})
        return index

    def _add(self, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if self._file is None:
            raise GradilocksError(f"{self.path} is closed. Create a new Recorder to record more steps.")
        if os.getpid() == self._process:
            self._pending.append((fields, tensors))

    def _log_line(self, fields: dict[str, Any], values: dict[str, list[float]]) -> list[dict[str, Any]]:
        numbers = fields["values"] | {name: value[0] for name, value in values.items()}
        return [{**fields, "step": max([0, *self._latest_step.values()]), "values": numbers}]

    def _step_lines(self, fields: dict[str, Any], values: dict[str, list[float]]) -> list[dict[str, Any]]:
        fields = dict(fields)
        sizes, is_unscaled = fields.pop("sizes", None), fields.pop("is_unscaled", False)
        is_largest_scaled = fields.pop("is_largest_scaled", not is_unscaled)
        line = {"kind": "step", **dict(zip(ROW, values.pop("row", []), strict=False)), **fields}
        line |= {name: value[0] for name, value in values.items() if name in ("loss", "lr")}
        if is_largest_scaled and line["scale"] is not None:
            line["largest"] /= line["scale"]
        if sizes is not None:
            count = len(sizes)
            rows = {name: values["statistics"][i * count : (i + 1) * count] for i, name in enumerate(STATISTICS)}
            gradient_scale = 1.0 if is_unscaled or line["scale"] is None else line["scale"]
            line["norms"] = [norm / gradient_scale for norm in rows["norm"]]
            line["zeros"] = [zeros / size for zeros, size in zip(rows["zeros"], sizes, strict=True)]
        if not all(map(math.isnan, values.get("updates", []))):
            line["updates"] = values["updates"]
        line |= {name: line[name] > 0 for name in _FLAGS} | {name: int(line[name]) for name in _INTEGERS}
        line["limit"] = None if line["limit"] == math.inf else line["limit"]
        index, step = line["optimizer"], line["step"]
        lines = []
        if self._header["device"] != (device := _device()):  # CUDA may be initialized after the header is written.
            self._header["device"] = device
            lines.append(self._header)
        lines += self._start_lines(index, step)
        self._latest_step[index] = step
        self._steps += 1
        if math.isfinite(line.get("loss", math.nan)):
            self._final_loss = line["loss"]
        return lines if self.rank and not line["nan"] + line["inf"] else [*lines, line]

    def _start_lines(self, index: int, step: int) -> list[dict[str, Any]]:
        """A start line before the first step and wherever step numbers restart; otherwise none."""
        if self._has_start and step > self._latest_step[index]:
            return []
        self._has_start, self._latest_step[index] = True, step - 1
        return [{"kind": "start", "step": step - 1, "time": time.time()}]

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        if os.getpid() == self._process and self._file is not None:
            text = "".join(json.dumps(_plain(line), separators=(",", ":")) + "\n" for line in lines)
            data = text.encode()
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:  # A full disk must not end a training of many hours.
                self._process = -1
                warnings.warn(f"{self.path} cannot be written, so recording stops: {error}.", stacklevel=2)


class WeightSample:
    """Up to 128 elements of each parameter before and after a step, to estimate the size of its update.

    Args:
        params: the parameters.
    """

    _COUNT = 128

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._before: Tensor | None = None
        self._segments: Tensor | None = None
        self._addresses: list[int] = []
        self._views: list[Tensor] = []
        self.sizes = [max(1, local(param).numel()) for param in params]
        """Number of elements of each parameter."""

    def take(self) -> None:
        """Samples the parameters before a step."""
        self._before = self._sample()

    @torch.no_grad()
    def updates(self) -> Tensor:
        """1-d: norm of each parameter's change divided by the norm of the parameter.

        NaN without an earlier `take`, and for a sparse gradient: its step changes few of the elements.
        """
        if self._before is None:
            return torch.full((len(self._params),), math.nan)
        before, after = self._before.double(), self._sample().double()
        self._before = None
        if self._segments is None:
            counts = torch.tensor([min(size, self._COUNT) for size in self.sizes])
            self._segments = torch.repeat_interleave(torch.arange(len(counts)), counts).to(before.device)
        sums = before.new_zeros(2, len(self._params))
        sums[0].index_add_(0, self._segments, after.sub_(before).square_())
        sums[1].index_add_(0, self._segments, before.square_())
        updates = (sums[0] / sums[1]).sqrt()
        if sparse := [i for i, param in enumerate(self._params) if param.grad is not None and param.grad.is_sparse]:
            updates[sparse] = math.nan
        return updates

    @torch.no_grad()
    def _sample(self) -> Tensor:
        tensors = [local(param) for param in self._params]
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses != self._addresses:  # The views of 578 parameters take 3 ms.
            views = [self._view(tensor.detach(), size) for tensor, size in zip(tensors, self.sizes, strict=True)]
            self._addresses, self._views = addresses, views
        device = self._views[0].device
        return torch.cat([view if view.device == device else view.to(device) for view in self._views])

    def _view(self, tensor: Tensor, size: int) -> Tensor:
        """Up to 128 elements. Parameters are dense in memory; the order of their elements does not matter here."""
        count = min(size, self._COUNT)
        view = tensor.as_strided((count,), (size // count,)) if tensor.numel() else tensor.new_zeros(1)
        return view.real if view.is_complex() else view


def _to_host(tensors: list[Tensor]) -> Any:
    """An iterator over the values of each tensor, as lists. One copy per device."""
    flat = [tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors]
    values: dict[torch.device, list[float]] = {}
    for device in {tensor.device for tensor in flat}:
        values[device] = torch.cat([tensor for tensor in flat if tensor.device == device]).tolist()
    position = dict.fromkeys(values, 0)
    for tensor in flat:
        begin = position[tensor.device]
        position[tensor.device] = begin + tensor.numel()
        yield values[tensor.device][begin : begin + tensor.numel()]


def _plain(value: Any) -> Any:
    """A value for JSON: non-finite numbers become strings, None is left out of mappings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _check_numbers(numbers: Mapping[str, object]) -> None:
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not is_number:
            raise TypeError(f"log({name}=) takes a number or a tensor of one element, got {type(value).__name__}.")


def _open_file(path: Path, *, overwrite: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if overwrite else 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise GradilocksError(f"{path} cannot be written: {error.strerror}.") from error


def _rank() -> tuple[int, int]:
    """Rank and number of ranks, from the process group, else from the launcher's environment."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _device() -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    return f"cpu ({torch.get_num_threads()} threads)"


def _git_state() -> dict[str, Any] | None:
    """Commit and modified state of the working directory; None outside of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=2, check=True, stdin=subprocess.DEVNULL
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
