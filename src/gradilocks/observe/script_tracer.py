"""A script's steps enter; those with NaN or Inf are run once more, and where it arose leaves.

What it takes for that is kept at every step, and nothing waits for it. A bad step is run again if
its parameters are still those that it began with when it is known to be bad: on a CPU before the
optimizer takes it; on a GPU if a scaler has held it back, and at every step under `--trace`, which
waits for the device to know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from gradilocks._torch import parameters_in
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
    ) -> None:
        self._make_recorder, self._waits, self._guards = make_recorder, waits, guards
        self._drivers = PerDriver(_Driver)
        self._fresh: WeakSet[Any] = WeakSet()  # Optimizers that have not stepped yet.
        self._searches = 0
        self._called: dict[int, ref[nn.Module]] = {}
        self.snapshot: tuple[Path, int] | None = None
        self._latest: Step | None = None
        self._tracer = Tracer([])
        self._tracer.replays = replays
        if snapshot is not None:
            self._tracer.looked = partial(self._write, snapshot)
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

    def _meet(self, step: Step, driver: _Driver) -> None:
        """Finds out which models a step trains, and which modules the script calls for it."""
        tracer = self._tracer
        if tracer.recorder is None:
            tracer.recorder = self._make_recorder()
        if not driver.knows_models_of(step):
            tracer.follow(driver.find_models_of(step))
        if self._fresh:
            self._fresh.difference_update(step.optimizers)
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
        silent = (find() for find in kept.silent.values())
        kept.others = kept.others or any(
            each is not None and id(each) not in trained for each in silent
        )
        if not self._fresh and kept.calls:
            self._searches += 1
            called = (find() for find in self._called.values())
            kept.follow(called_modules(each for each in called if each is not None))

    # --- steps ---------------------------------------------------------------------------------

    def step_begins(self, step: Step) -> None:
        self._latest = step
        driver = self._drivers.of(step)
        self._meet(step, driver)
        if not step.is_of_control and not step.has_closure:
            self._look_before(step, driver)

    def closure_ended(self, step: Step, loss: object, *, failed: bool) -> None:
        if not failed and not step.is_of_control:
            self._look_before(step, self._drivers.of(step))

    def _look_before(self, step: Step, driver: _Driver) -> None:
        """The gradients have been measured, and the parameters are as they were."""
        found = step.statistics
        if found is None or driver.looked is step:
            return
        if found.nan.device.type != "cpu" and not self._waits:
            return
        driver.looked = step
        if not any((found.nan + found.inf).tolist()):  # A sum would take longer than to read them.
            self._tracer.well()
            return
        self._tracer.look(
            driver.steps + 1,
            self._tracer.kept.take(),
            loss_is_bad=None if step.loss is None else not bool(step.loss.isfinite().all()),
            gone=step.driver is step.optimizers[0] and not self._guards,
        )

    def _write(self, path: Path, number: int, kept: KeptStep, found: str) -> None:
        """The first bad step has been looked at: writes it down."""
        step = self._latest
        if self.snapshot is not None or step is None:
            return
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

    def step_ended(self, step: Step) -> None:
        driver = self._drivers.of(step)
        driver.steps += 1
        tracer = self._tracer
        if step.record is not None:
            tracer.note(step.record.row, step=driver.steps)
        elif driver.looked is step or step.statistics is None:
            tracer.kept.take()
        elif step.driver is not step.optimizers[0] and step.frame is None:
            # A scaler has held it back, and no optimizer was called: the host has waited for that.
            tracer.look(driver.steps, tracer.kept.take())
        elif isinstance(step.skip, Tensor):
            tracer.note(step.skip.reshape(1).to(torch.float32), step=driver.steps)
        else:
            tracer.kept.take()
        driver.looked = None


class _Driver:
    """A control or an optimizer: how many steps it has taken, and the models that it trains."""

    def __init__(self) -> None:
        self.steps = 0
        self.looked: Step | None = None
        """The step that goes on, if it has been looked at."""
        self._models: list[ref[nn.Module]] = []
        self._params: tuple[int, int] | None = None  # How many, and the id of the first.
        self._home: tuple[ref[nn.Module], str] | None = None  # Of the first: whose, and its name.

    def knows_models_of(self, step: Step) -> bool:
        """Whether a step is of the same parameters as before, and their models are still there."""
        many = 0
        for optimizer in step.optimizers:
            for group in optimizer.param_groups:
                many += len(group["params"])
        first = next(iter(step.parameters()), None)
        if self._params != (many, id(first)):
            return False
        for find in self._models:
            if find() is None:
                return False
        if self._home is None:
            return not self._models
        # A model may have been given other parameters, and left the id of this one to somebody's.
        owner, name = self._home
        module = owner()
        return module is not None and parameters_in(module).get(name) is first

    def find_models_of(self, step: Step) -> list[nn.Module]:
        """The owners of its parameters."""
        params = list(step.parameters())
        models = owners_of(params)
        self._models = [ref(model) for model in models]
        self._params = len(params), id(params[0]) if params else id(None)
        parts = (part for model in models for part in model.modules())
        homes = (
            (ref(part), name)
            for part in parts
            for name, param in parameters_in(part).items()
            if param is params[0]
        )
        self._home = next(homes, None)
        return models
