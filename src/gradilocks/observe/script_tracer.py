"""A script's steps enter; those with NaN or Inf are run once more, and where it arose leaves.

What it takes for that is kept at every step, and nothing waits for it. A bad step is run again if
its parameters are still those that it began with when it is known to be bad: on a CPU before the
optimizer takes it; on a GPU if a scaler has held it back, and at every step under `--trace`, which
waits for the device to know. Every rank does so by itself, and rank 0 tells what they found.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gradilocks.lab.trace import KeptStep, Tracer, skipped_for_nonfinite, write_bad_step
from gradilocks.names import prefixed
from gradilocks.observe.gradient_reader import bad_elements
from gradilocks.observe.process_end import SignalsHeld
from gradilocks.observe.script_calls import ScriptCalls
from gradilocks.record import Recorder
from gradilocks.step.events import PerDriver, Step, StepListener

__all__ = ["ScriptTracer"]


class ScriptTracer(StepListener):
    """Finds where the NaN or Inf of a bad step arose, for every optimizer of a script.

    Args:
        calls: of the models that the script trains; hears of a step before this does.
        make_recorder: called when there is something to tell; findings are written there.
        waits: whether to wait for a GPU at each step, to know of a bad one before it is taken.
        replays: whether a bad step is run once more.
        snapshot: a file for the first bad step that is held back; None for none.
        warn: told if that cannot be written.
        innocent: whether it is written too if this rank has found nothing.

    Attributes:
        snapshot: the file and its size in bytes, once it is there.
    """

    def __init__(
        self,
        calls: ScriptCalls,
        make_recorder: Callable[[], Recorder],
        *,
        waits: bool,
        replays: bool = True,
        snapshot: Path | None = None,
        warn: Callable[[str], None] = lambda message: None,
        innocent: bool = True,
    ) -> None:
        self._calls, self._met = calls, 0
        self._make_recorder, self._waits = make_recorder, waits
        numbers = itertools.count()
        self._drivers = PerDriver(lambda: _Driver(next(numbers)))
        self.passed_by = False
        """Whether a step was taken that nobody has looked at, as that would have been a wait."""
        self.snapshot: tuple[Path, int] | None = None
        self._warn = warn
        self._latest: Step | None = None
        self._tracer = Tracer([], kept=calls.kept)
        self._tracer.replays = replays
        if snapshot is not None:
            self._tracer.looked = partial(self._write, snapshot, innocent=innocent)

    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences, each of them once."""
        return tuple(dict.fromkeys(each.text for each in self._tracer.findings))

    def finish(self) -> None:
        """The script has ended: waits for what is not known yet of its steps, and looks at it."""
        self._tracer.catch_up(wait=True)

    def close(self) -> None:
        """Takes every hook away."""
        self._tracer.close()

    # --- steps ---------------------------------------------------------------------------------

    def loss_counted(self, control: Any, loss: Tensor, *, first: bool, averaged: int = 0) -> None:
        self._tracer.note_loss(loss)

    def step_begins(self, step: Step) -> None:
        self._latest = step
        if self._tracer.is_behind:
            with SignalsHeld():
                self._tracer.catch_up()
        driver = self._drivers.of(step)
        if not step.has_closure:
            self._meet(step, driver)
            if not step.is_of_control:
                self._look_before(step, driver)

    def _meet(self, step: Step, driver: _Driver) -> None:
        if self._tracer.recorder is None:
            self._tracer.recorder = self._make_recorder()
            # Now, while all of them train: a bad step may be one rank's alone.
            self._tracer.meet_ranks()
        recorder = self._tracer.recorder
        if not driver.steps and recorder is not None:  # It may go on in a file.
            driver.steps = recorder.last_step(step.optimizers[0])
        if self._met != self._calls.met:
            self._met = self._calls.met
            if len(self._calls.models) > 1:  # One that the script is done with may wait for it.
                gc.collect()
            self._tracer.follow(self._calls.models)

    def closure_begins(self, step: Step) -> None:
        if self._drivers.of(step).evaluated is step:
            self._tracer.kept.take()  # Those of an evaluation before it, which was not bad.

    def closure_ended(self, step: Step, loss: object, *, failed: bool) -> None:
        driver = self._drivers.of(step)
        driver.evaluated = step
        if not failed and not step.is_of_control:
            self._meet(step, driver)
            self._look_before(step, driver)

    def _look_before(self, step: Step, driver: _Driver) -> None:
        """The gradients have been measured, and the parameters are as they were."""
        found = step.found
        if found is None or driver.looked is step:
            return
        if step.is_finite is None and not self._waits:
            self.passed_by = True
            return
        driver.looked = step
        bad_gradients = not step.is_finite
        if step.is_finite is None:
            bad_gradients = bool(bad_elements(found))
        if not bad_gradients:
            self._tracer.well()
        if bad_gradients or _is_bad(step):
            self._look(step, driver, bad_gradients=bad_gradients)

    def step_held(self, step: Step) -> None:
        """A step is held back, and the parameters are those that its gradients were made with."""
        driver = self._drivers.of(step)
        if driver.told is not step:
            driver.looked = step
            self._look(step, driver, bad_gradients=True)

    def _look(self, step: Step, driver: _Driver, *, bad_gradients: bool) -> None:
        driver.told = step
        with SignalsHeld():
            self._tracer.look(
                driver.steps + 1,
                self._tracer.kept.take(driver.number),
                driver=driver.number,
                loss_is_bad=_is_bad(step),
                gone=bad_gradients and step.driver is step.optimizers[0] and not step.guarded,
            )

    def _write(
        self, path: Path, number: int, kept: KeptStep, found: str, doubt: str, *, innocent: bool
    ) -> str:
        """The first bad step has been looked at: writes it down; what to add to what was found.

        A scaler skips steps until it has found its scale: there a bad loss makes a bad step.
        """
        step = self._latest
        if step is None or step.is_of_control or not (found or innocent):
            return ""
        loss = None if step.loss is None else float(step.loss)
        by_scaler = step.driver is not step.optimizers[0] and step.held is not True
        if by_scaler and (loss is None or math.isfinite(loss)):
            return ""
        self._tracer.looked = None
        try:
            size = write_bad_step(
                path,
                step=number,
                models=prefixed(self._tracer.models),
                optimizers=step.optimizers,
                kept=kept,
                loss=None if doubt else loss,
                found=found,
                doubt=doubt,
            )
        except Exception as error:  # A full disk, or whatever people keep in a model.
            why = f"{type(error).__name__}: {error}"
            self._warn(f"the first bad step could not be written to {path}: {why}")
            return ""
        self.snapshot = path, size
        return "" if innocent else f". That rank's step is in {path.name}"

    def step_ended(self, step: Step) -> None:
        driver = self._drivers.of(step)
        driver.steps += 1
        tracer = self._tracer
        if step.record is not None:
            tracer.note(step.record.row, step=driver.steps, driver=driver.number)
        elif driver.looked is step or step.found is None:
            tracer.kept.take(driver.number)
        elif step.driver is not step.optimizers[0] and step.frame is None:
            # A scaler has held it back, and no optimizer was called: the host has waited for that.
            with SignalsHeld():
                tracer.look(
                    driver.steps,
                    tracer.kept.take(driver.number),
                    driver=driver.number,
                    loss_is_bad=_is_bad(step),
                )
        elif isinstance(step.skip, Tensor):
            if step.loss is not None:
                tracer.note_loss(step.loss)
            tracer.note(skipped_for_nonfinite(step), step=driver.steps, driver=driver.number)
        else:
            tracer.kept.take(driver.number)
        driver.looked = driver.told = driver.evaluated = self._latest = None
        tracer.settle()


def _is_bad(step: Step) -> bool | None:
    """Whether its loss is NaN or Inf; None if nobody knows. Waits for the device."""
    return None if step.loss is None else not math.isfinite(step.loss.item())


class _Driver:
    """A control or an optimizer: how many steps it has taken, as the run file counts them.

    Attributes:
        number: which one of the script, counted from 0 by their first steps, alike on every rank.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0
        self.looked: Step | None = None
        """The step that goes on, if it has been looked at."""
        self.told: Step | None = None
        """Likewise, if it was bad."""
        self.evaluated: Step | None = None
        """Likewise, if its closure has been evaluated."""
