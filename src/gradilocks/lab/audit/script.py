"""One `gradilocks audit`: a script enters, runs for a few steps, and an Audit of it leaves.

It runs as under `gradilocks run`, and is recorded as there. After so many steps of an optimizer it
is stopped by an exception that `except Exception` does not catch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradilocks.errors import BadScript
from gradilocks.lab.formats import Format
from gradilocks.observe import launch
from gradilocks.observe.ending import Ending, Last
from gradilocks.observe.importing import when_imported
from gradilocks.observe.places import check_target, fresh_name, rank_of_process

if TYPE_CHECKING:
    from gradilocks.lab.audit.result import Audit
    from gradilocks.record import Recorder

__all__ = ["Heard", "Stopped", "Wishes", "audit_script"]

_PATIENCE = 3


class Stopped(SystemExit):
    """Raised out of a step to end the script: it has been audited."""


@dataclass(frozen=True)
class Wishes:
    """What `gradilocks audit` was asked for."""

    steps: int = 10
    formats: tuple[Format, ...] = ()
    output: Path | None = None
    """The run file; None for a fresh name under runs/."""
    command: tuple[str, ...] = ()
    log: bool = True


@dataclass(frozen=True)
class Heard:
    """What came of it."""

    audit: Audit | None
    path: Path
    """The run file, as it is to be typed from the folder in which the session began."""
    steps: int
    recorded: bool
    """Whether there is a run file."""
    torch: bool
    """Whether the script imported torch at all."""
    failed: bool
    """Whether auditing had to end early, for a reason that was given."""
    main: bool
    """Whether this process is the one that speaks: rank 0."""
    stopped: bool
    """Whether the script was stopped, and did not end by itself."""
    ending: Ending


def audit_script(
    program: launch.Program,
    wishes: Wishes,
    *,
    tell: Callable[[Heard], None],
    warn: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Heard:
    """Runs a program until an optimizer has stepped often enough, and audits its gradients.

    Args:
        program: the script or module.
        wishes: as asked for.
        tell: called last, when the run file is closed.
        warn: called if auditing had to end early.
        progress: called with the steps done, and how many there are to be.

    Raises:
        BadScript: it cannot be run.
        BadRunFile: the run file is there already, or cannot be.
    """
    launch.check(program)
    session = _Session(program, wishes, tell, warn, progress)
    last = Last(session.conclude)
    last.prepare()
    when_imported("torch", session.begin)
    try:
        launch.execute(program, note=last.note)
    except BadScript:
        last.cancel()
        raise
    except SystemExit:
        pass  # How it ended is noted.
    last.finish()
    assert session.heard is not None
    return session.heard


class _Session:
    def __init__(
        self,
        program: launch.Program,
        wishes: Wishes,
        tell: Callable[[Heard], None],
        warn: Callable[[str], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self._wishes, self._tell, self._warn, self._progress = wishes, tell, warn, progress
        self._main = rank_of_process() == 0
        self._shown = wishes.output or fresh_name(program.stem)
        self._path = Path(os.path.abspath(self._shown))
        self._made: Sequence[Path] = ()
        if self._main:
            ways = "Choose another name."
            self._made = check_target(self._path, self._shown, "refuse", rank=0, ways=ways)
        self._watch: Any = None
        self._raised = 0
        self._imported = False
        self.heard: Heard | None = None

    def begin(self) -> None:
        """torch is there."""
        from gradilocks.lab.audit.watching import AuditHooks, AuditWatch

        self._imported = True
        self._watch = AuditWatch(
            self._recorder, warn=self._warn, stepped=self._stepped, stop=self._stop
        )
        self._hooks = AuditHooks(self._watch)
        self._hooks.install()

    def conclude(self, ending: Ending) -> None:
        """Judges what was counted, closes the run file, and leaves torch as it was."""
        found, recorder, watch = None, None, self._watch
        if watch is not None:
            watch.close()
            self._hooks.remove()
            recorder = watch.recorder
            if watch.steps and not watch.failed and self._main:
                found = watch.gather(self._wishes.formats)
                found = found if found.modules else None
        if recorder is not None:
            if found is not None:
                recorder.audit(found.to_plain())
            recorder.finish(status=ending.status, exit=ending.exit, error=ending.error)
        for folder in self._made:  # That nothing was put into.
            with suppress(OSError):
                folder.rmdir()
        self.heard = Heard(
            audit=found,
            path=self._shown,
            steps=0 if watch is None else watch.steps,
            recorded=recorder is not None and self._path.exists(),
            torch=self._imported,
            failed=watch is not None and watch.failed,
            main=self._main,
            stopped=self._raised > 0,
            ending=ending,
        )
        self._tell(self.heard)

    def _stepped(self, done: int) -> None:
        if self._main:
            self._progress(min(done, self._wishes.steps), self._wishes.steps)
        if done >= self._wishes.steps:
            self._stop()

    def _stop(self) -> None:
        self._raised += 1
        if self._raised > _PATIENCE:  # A bare `except` in a loop takes every exception.
            os._exit(0)
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(0)  # The only one that a thread ends with in silence.
        raise Stopped(0)

    def _recorder(self) -> Recorder:
        from gradilocks.observe.lasting import LastingRecorder

        return LastingRecorder(
            self._path,
            settings={"watched": True, "audited": True},
            command=self._wishes.command or None,
            log=self._wishes.log,
        )
