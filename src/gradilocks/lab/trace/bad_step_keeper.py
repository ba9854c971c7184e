"""`GradientControl(keep_bad_step=path)`: steps enter; the file of the first bad one leaves.

What the model was called with is kept at every step, as a trace keeps it (`kept_calls`). A step
that the control skips for NaN or Inf changes no parameter, so what it began with is still there
when that is known: on a CPU when the step ends, on a GPU one or more steps later, without a wait.
If a good step came in between, the file says so. After the first one nothing is kept any more.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from gradilocks.lab.trace.bad_step_file import write_bad_step
from gradilocks.lab.trace.kept_calls import KeptStep
from gradilocks.lab.trace.tracer import Tracer, called_modules
from gradilocks.runfile import rank_file
from gradilocks.step.events import Step
from gradilocks.values import ROW

__all__ = ["BadStepKeeper", "checked_place", "fresh_place"]

_logger = logging.getLogger("gradilocks")


class BadStepKeeper(Tracer):
    """Writes the first bad step of a control.

    Args:
        control: whose steps; listened to until the file is written.
        models: outermost modules, by what the names in them begin with.
        optimizers: of the control.
        path: the file. One that is there already stays, and a number is added to the name.
        rank: of this process: others than 0 add it to the name.
        waits: whether the control waits for each step anyway, as it does to raise.
    """

    def __init__(
        self,
        control: Any,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Any],
        path: Path,
        *,
        rank: int,
        waits: bool,
    ) -> None:
        super().__init__(list(models.values()))
        self._named, self._optimizers = models, optimizers
        self._path, self._waits = rank_file(path, rank), waits
        self.replays = False
        self.looked = self._write
        self.kept.follow(called_modules(models.values()))
        self._control = weakref.ref(control)
        control._events.add(self)

    def step_ended(self, step: Step) -> None:
        if step.record is not None:
            row = step.record.row.cpu() if self._waits else step.record.row
            self.note(row, step=row[ROW.index("step")].clone())

    def _write(self, number: int, kept: KeptStep, found: str, doubt: str) -> str:
        self.close()  # Once is enough, whatever comes of it.
        path = fresh_place(self._path)
        try:
            size = write_bad_step(
                path,
                step=number,
                models=self._named,
                optimizers=self._optimizers,
                kept=kept,
                loss=None,
                found=found,
                doubt=doubt,
            )
        except Exception as error:  # A full disk, say: training goes on.
            why = f"{type(error).__name__}: {error}"
            _logger.warning("step %d was bad, and could not be kept in %s: %s", number, path, why)
            return ""
        where = f"{path} ({size / 2**20:,.3g} MiB)"
        later = f"; {doubt}" if doubt else ""
        _logger.warning("step %d was bad and is kept in %s%s", number, where, later)
        return ""


def checked_place(path: object) -> Path:
    """The place of a file that will perhaps be written, tried now rather than after hours.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "keep_bad_step must be the path of a file, as in 'runs/first-bad-step.pt', got "
            f"{type(path).__name__}."
        )
    place = Path(os.path.abspath(path))
    if place.is_dir() or not os.fspath(path):
        raise ValueError(f"keep_bad_step must be the path of a file, got the folder {path!s}.")
    parent = next(each for each in place.parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"keep_bad_step={path!s} cannot be written: {parent} takes no files.")
    return place


def fresh_place(path: Path) -> Path:
    """`path`, or if a file is there `bad-2.pt` for `bad.pt`, and so on: none is lost."""
    number, place = 1, path
    while place.exists():
        number += 1
        place = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return place
