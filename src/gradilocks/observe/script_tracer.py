"""A script's steps enter; those with NaN or Inf are run once more, and where it arose leaves.

What it takes for that is kept at every step, and nothing waits for it. A bad step is run again if
its parameters are still those that it began with when it is known to be bad: on a CPU before the
optimizer takes it; on a GPU if a scaler has held it back, and at every step under `--trace`, which
waits for the device to know. Every rank does so by itself, and rank 0 tells what they found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from gradilocks.lab.trace import KeptStep, Tracer, called_modules, write_bad_step
from gradilocks.observe.script_models import owners_of
from gradilocks.record import Recorder
from gradilocks.step.events import PerDriver, Step, StepListener

__all__ = ["ScriptTracer"]

_MOST_SEARCHES = 4
"""How often it is looked for which modules a script calls, once its models are known."""


class ScriptTracer(StepListener):
    """Finds where the NaN or Inf of a bad step arose, for every optimizer of a script.

    Args:
        make_recorder: called when there is something to tell; findings are written there.
        waits: whether to wait for a GPU at each step, to know of a bad one before it is taken.
        replays: whether a bad step is run once more.
        guards: whether bad steps are held back, whoever was to take them.
        snapshot: a file for the first bad step that is held back; None for none.
        innocent: whether it is written too if this rank has found nothing.

    Attributes:
        snapshot: the file and its size in bytes, once it is there.
    """

    def __init__(
        self,
        make_recorder: Callable[[], Recorder],
        *,
        waits: bool,
        replays: bool = True,
        guards: bool = False,
        snapshot: Path | None = None,
        innocent: bool = True,
    ) -> None:
        self._make_recorder, self._waits, self._guards = make_recorder, waits, guards
        numbers = itertools.count()
        self._drivers = PerDriver(lambda: _Driver(next(numbers)))
        self._fresh: WeakSet[Any] = WeakSet()  # Optimizers that have not stepped yet.
        self._searches = 0
        self._called: dict[int, ref[nn.Module]] = {}
        self.snapshot: tuple[Path, int] | None = None
        self._latest: Step | None = None
        self._tracer = Tracer([])
        self._tracer.replays = replays
        if snapshot is not None:
            self._tracer.looked = partial(self._write, snapshot, innocent=innocent)
        self._tracer.kept.follow_all()

    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences, each of them once."""
        return tuple(dict.fromkeys(each.text for each in self._tracer.findings))

    def close(self) -> None:
        """Takes every hook away."""
        self._tracer.close()

    # --- whose calls are kept ------------------------------------------------------------------

    def optimizer_made(self, optimizer: Any) -> None:
        self._fresh.add(optimizer)

    def _meet(self, step: Step) -> None:
        """Finds out which models a step trains, and which modules the script calls for it."""
        tracer = self._tracer
        if tracer.recorder is None:
            tracer.recorder = self._make_recorder()
            tracer.meet_ranks()  # Now, while all of them train: a bad step may be one rank's alone.
        tracer.follow(self._drivers.of(step).models_of(list(step.parameters())))
        for optimizer in step.optimizers:
            self._fresh.discard(optimizer)
        kept = tracer.kept
        if not kept.follows_all:
            if not kept.calls and self._searches < _MOST_SEARCHES:
                kept.follow_all()  # The script calls others than before.
            return
        trained = {id(part) for model in tracer.models for part in model.modules()}
        for call in kept.calls:
            module = call.module()
            if module is not None and id(module) in trained:
                self._called[id(module)] = ref(module)
        if not self._fresh and kept.calls:
            self._searches += 1
            called = (find() for find in self._called.values())
            kept.follow(called_modules(each for each in called if each is not None))

    # --- steps ---------------------------------------------------------------------------------

    def step_begins(self, step: Step) -> None:
        self._latest = step
        self._meet(step)
        if not step.is_of_control and not step.has_closure:
            self._look_before(step)

    def closure_ended(self, step: Step, loss: object, *, failed: bool) -> None:
        if not failed and not step.is_of_control:
            self._look_before(step)

    def _look_before(self, step: Step) -> None:
        """The gradients have been measured, and the parameters are as they were."""
        found = step.statistics
        driver = self._drivers.of(step)
        if found is None or driver.looked is step:
            return
        if found.nan.device.type != "cpu" and not self._waits:
            return
        driver.looked = step
        if not bool((found.nan + found.inf).sum() > 0):
            self._tracer.well()
            return
        self._tracer.look(
            driver.steps + 1,
            self._tracer.kept.take(),
            driver=driver.number,
            loss_is_bad=None if step.loss is None else not bool(step.loss.isfinite().all()),
            gone=step.driver is step.optimizers[0] and not self._guards,
        )

    def _write(self, path: Path, number: int, kept: KeptStep, found: str, *, innocent: bool) -> str:
        """The first bad step has been looked at: writes it down; what to add to what was found."""
        step = self._latest
        if self.snapshot is not None or step is None or not (found or innocent):
            return ""
        models = self._tracer.models
        size = write_bad_step(
            path,
            step=number,
            models=models,
            optimizers=step.optimizers,
            kept=kept,
            loss=None if step.loss is None else float(step.loss),
            found=found,
        )
        self.snapshot = path, size
        return "" if innocent else f". That rank's step is in {path}"

    def step_ended(self, step: Step) -> None:
        driver = self._drivers.of(step)
        driver.steps += 1
        tracer = self._tracer
        if step.record is not None:
            tracer.note(step.record.row, step=driver.steps, driver=driver.number)
        elif driver.looked is step or step.statistics is None:
            tracer.kept.take()
        elif step.driver is not step.optimizers[0] and step.frame is None:
            # A scaler has held it back, and no optimizer was called: the host has waited for that.
            tracer.look(driver.steps, tracer.kept.take(), driver=driver.number)
        elif isinstance(step.skip, Tensor):
            flag = step.skip.reshape(1).to(torch.float32)
            tracer.note(flag, step=driver.steps, driver=driver.number)
        else:
            tracer.kept.take()
        driver.looked = None
        tracer.settle()


class _Driver:
    """A control or an optimizer: how many steps it has taken, and the models that it trains.

    Attributes:
        number: which one of the script, counted from 0 by their first steps, alike on every rank.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0
        self.looked: Step | None = None
        """The step that goes on, if it has been looked at."""
        self._models: list[ref[nn.Module]] = []
        self._params: tuple[int, int] | None = None  # How many, and the id of the first.

    def models_of(self, params: Sequence[Tensor]) -> list[nn.Module]:
        """The owners of its parameters, looked for again when it has others or a model is gone."""
        models = [model for find in self._models if (model := find()) is not None]
        same = self._params == (len(params), id(params[0])) and len(models) == len(self._models)
        # A model may have been given other parameters, and left the id of this one to somebody's.
        # Most often it is the first of all, so that this is a short look.
        owned = (param is params[0] for model in models for param in model.parameters())
        if not same or (models and not any(owned)):
            models = owners_of(params)
            self._models = [ref(model) for model in models]
            self._params = len(params), id(params[0])
        return models
