"""One script under watch: a program enters, a run file and what its listeners found leave.

`gradilocks run` records the steps of its optimizers, `run --trace` traces its models besides, and
`gradilocks audit` counts its gradients: each is a listener to the same StepEvents.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradilocks.errors import BadRunFile, BadScript
from gradilocks.git_state import git_state
from gradilocks.observe import interpreter
from gradilocks.observe.process_end import Ending, ProcessEnd
from gradilocks.observe.stopping import Stopper
from gradilocks.runfile import (
    fresh_file,
    is_abandoned,
    rank_file,
    refuse_foreign,
    refuse_source_name,
)

__all__ = ["Options", "ScriptSession", "Summary", "check_target", "run_script"]


BAD_STEP = 70
"""The exit status of a script that `--guard stop` has ended."""


@dataclass(frozen=True)
class Options:
    """What `gradilocks run` was asked for."""

    output: Path | None = None
    """The run file; None for a fresh name under runs/."""
    exists: str = "refuse"
    """As the Recorder has it."""
    detail_every: int = 10
    flush_every: int = 50
    trace: str | None = "light"
    """'light': a bad step is run once more where nothing has to wait for that. 'always': also on a
    GPU without a scaler, which is waited for at each step. None: never."""
    guard: str | None = None
    """'skip': a step with NaN or Inf is not taken. 'stop': the script ends there."""
    snapshot: bool = True
    """Whether the first bad step is written to a file, if there is a guard."""
    all_ranks: bool = False
    per_step: Mapping[str, float] = field(default_factory=dict)
    """What a step works on, as in 'tokens', and how many of them."""
    log: bool = True
    swap: bool = False
    swap_optimizers: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    check: Callable[[Path], None] | None = None
    """Called with the run file's absolute path before the script runs; may refuse it."""
    sinks: Callable[[Path], Sequence[Any]] | None = None
    """Makes what hears of the run too, at the first step; given that path."""


class ScriptSession:
    """Runs a program, and records its optimizers' steps.

    Args:
        ways: what else can be done about a run file that is there already.
        warn, note: told if something had to end early; at the first step, where it is recorded.
        failure: what a failure of ours means, in words.
        after_failure: called whenever we would do something and have failed; may raise.
        every_rank: whether ranks that do not record speak too.
        keeps_calls: whether what it takes to run a model's calls once more is kept.

    Attributes:
        shown: the run file, as it is to be typed from the folder in which the session began.
        target: the same from anywhere.
        rank: of this process.
        records: whether this process has a run file. The others tell rank 0 of their steps.
        imported_torch: whether the script imported torch at all.
        guard: around all that is done while the script runs; None until it imports torch.
        steps: what records the steps; None likewise.
        calls: those of the script's models; None likewise.
        end: concludes when the process ends, or when it is told to; there once the program runs.
    """

    def __init__(
        self,
        program: interpreter.Program,
        options: Options,
        *,
        settings: Mapping[str, Any],
        ways: str,
        warn: Callable[[str], None],
        note: Callable[[str], None],
        failure: str,
        after_failure: Callable[[], None] | None = None,
        every_rank: bool = False,
        keeps_calls: bool = False,
    ) -> None:
        interpreter.check(program)
        self._program, self._options, self._settings = program, options, settings
        self._warn, self._note = warn, note
        self._failure, self._after_failure = failure, after_failure
        self._every_rank, self._keeps_calls = every_rank, keeps_calls
        rank = os.environ.get("RANK", "0")
        self.rank = int(rank) if rank.isdigit() else 0
        self.records = records = self.rank == 0 or options.all_ranks
        given = options.output or fresh_file(Path("runs"), program.stem)
        self._path = Path(os.path.abspath(given))
        self.shown = rank_file(given, self.rank if options.all_ranks else 0)
        self.target = Path(os.path.abspath(self.shown))
        self._made: list[Path] = []
        self._git: Mapping[str, Any] | None = None
        if records:
            self._made = check_target(self.target, self.shown, options.exists, ways=ways)
            if options.check is not None:
                options.check(self.target)
            # Now, and not at the first step: git may take a moment.
            script = Path(program.name).absolute().parent
            self._git = git_state(*(() if program.module else (script,)), Path.cwd())
        self.imported_torch = False
        self.end: ProcessEnd
        self.guard: Any = None
        self.steps: Any = None
        self.calls: Any = None
        self._hooks: tuple[Any, ...] = ()
        self._patches: Any = None
        self._listeners: Sequence[Any] = ()

    def run(
        self,
        listeners: Callable[[], Sequence[Any]],
        conclude: Callable[[Ending], None],
        *,
        guards: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        """Runs the program to its end, and leaves as `run_script` does.

        Args:
            listeners: called on every rank when torch is there; what it returns hears of every
                step, after the recorder.
            conclude: called last, with how the script ended; calls `close`.
            guards: likewise on every rank; hear of every step before the recorder, and go on if
                watching has failed.
        """
        self.end = ProcessEnd(conclude)
        self.end.prepare()
        interpreter.when_imported("torch", lambda: self._begin(listeners, guards))
        try:
            interpreter.execute(self._program, note=self.end.note)
        except BadScript:
            self.end.cancel()
            raise

    def _begin(
        self, listeners: Callable[[], Sequence[Any]], guards: Callable[[], Sequence[Any]]
    ) -> None:
        """torch is there."""
        self.imported_torch = True
        options = self._options
        from gradilocks.observe.fastai_hooks import FastaiHooks
        from gradilocks.observe.script_calls import ScriptCalls
        from gradilocks.observe.step_recorder import Guard, StepRecorder
        from gradilocks.observe.torch_hooks import TorchHooks
        from gradilocks.step.events import EVENTS

        self.guard = Guard(
            lambda error: self.warn(f"{self._failure}: {type(error).__name__}: {error}"),
            self._after_failure,
        )
        self.steps = StepRecorder(self._recorder, self.warn)
        self.calls = ScriptCalls(keeps=self._keeps_calls, began=self.steps.data_wait.forward_begins)
        every = (self.steps.losses, self.calls, self.steps, *listeners())
        self._listeners = [*guards(), self.guard.around(every)]
        for listener in self._listeners:
            EVENTS.add(listener)
        self._hooks = (TorchHooks(), FastaiHooks())
        for hooks in self._hooks:
            hooks.install()
        self.steps.data_wait.install()
        if options.swap or options.swap_optimizers:
            from gradilocks.observe.patches import Patches, swap

            self._patches = Patches()
            swap(self._patches, parts=options.swap, optimizers=options.swap_optimizers)

    def warn(self, message: str) -> None:
        """A warning; only ranks that record speak, as they share a terminal."""
        if self.records or self._every_rank:
            self._warn(message)

    def stop_listening(self) -> None:
        """Leaves torch as it was: nobody hears of anything any more."""
        if self._patches is not None:
            self._patches.undo()
        if self._hooks:
            from gradilocks.step.events import EVENTS

            self.guard.closed = True
            for hooks in self._hooks:
                hooks.remove()
            self.steps.data_wait.close()
            self.calls.close()
            for listener in self._listeners:
                EVENTS.discard(listener)

    def close(self, ending: Ending) -> Any:
        """Closes the run file, if there is one, and returns its recorder."""
        recorder = None if self.steps is None else self.steps.recorder
        if recorder is not None:
            recorder.end_facts = {"unwatched": self.has_failed() or None, **self._left_out()}
            try:
                recorder.finish(status=ending.status, exit=ending.exit, error=ending.error)
            except Exception as error:  # The script has ended; nothing must keep it from leaving.
                self.warn(f"{self.shown} could not be closed: {type(error).__name__}: {error}")
        for folder in self._made:  # That nothing was put into.
            with suppress(OSError):
                folder.rmdir()
        return recorder

    def _left_out(self) -> dict[str, int]:
        """The backward passes that the script has left out by itself, as End has them."""
        found = None
        with suppress(Exception):  # Of a device that has failed nothing can be read.
            found = self.steps.losses.left_out()
        return {} if found is None else {"left_out": found[0], "left_out_after": found[1]}

    def has_failed(self) -> bool:
        """Whether watching had to end before the script did."""
        return self.guard is not None and self.guard.failed

    def _recorder(self) -> Any:
        from gradilocks.observe.step_recorder import ScriptRecorder

        options = self._options
        recorder = ScriptRecorder(
            self._path,
            flush_every=options.flush_every,
            detail_every=options.detail_every,
            exists=options.exists,
            settings=self._settings,
            command=options.command or None,
            log=options.log and self.records,
            all_ranks=options.all_ranks,
            config={"argv": [self._program.name, *self._program.arguments]},
            git=self._git,
            sinks=self._sinks(),
        )
        if options.sinks is not None:
            # Now, when they are open: a package that ends its own work as Python leaves, as wandb
            # does, has registered that before, so this comes first.
            atexit.register(self._end_sinks)
        # A script may number its ranks otherwise than torchrun does, as under mpirun.
        self.records = self.records and recorder.writes
        if self.records:
            self._note(f"recording to {self.name_of(recorder)}")
        return recorder

    def _sinks(self) -> Sequence[Any]:
        if self._options.sinks is None or not self.records:
            return ()
        try:
            return self._options.sinks(self.target)
        except Exception as error:  # The run file does not depend on them.
            self.warn(f"nothing but the run file is fed: {type(error).__name__}: {error}")
            return ()

    def _end_sinks(self) -> None:
        ending, recorder = self.end.ending, self.steps.recorder
        with suppress(Exception):  # The run file is closed later, and says what is wrong.
            recorder.end_sinks(status=ending.status, exit=ending.exit, error=ending.error)

    def name_of(self, recorder: Any) -> Path:
        """The run file as it is to be typed: with --all-ranks each rank has a name of its own."""
        return self.shown if recorder is None else self.shown.with_name(recorder.path.name)


@dataclass(frozen=True)
class Summary:
    """What `gradilocks run` has recorded."""

    path: Path
    """As it is to be typed from the folder in which the session began."""
    file: Path
    """The same from anywhere: the script may have changed the folder."""
    steps: int
    logs: int
    """How often the script has logged numbers of its own."""
    skipped: int
    seen: int
    """How many steps came by; more than `steps` if some could not be recorded."""
    failed: bool
    """Whether watching had to end before the script did."""
    torch: bool
    """Whether the script imported torch at all."""
    watched: bool
    """Whether this process is one that records."""
    findings: tuple[str, ...]
    """What tracing has found and the log has not told, in sentences."""
    unseen: bool
    """Whether a step with NaN or Inf was taken that nobody has looked at, as that would have been a
    wait for a GPU."""
    taken: int
    """How many steps were taken though their gradients were NaN or Inf."""
    partly: int
    """How many steps were of what this rank holds of a model that is, or may be, on several."""
    untold: bool
    """Whether some were so because other ranks have not told of them."""
    rank: int
    stopped: bool
    """Whether `--guard stop` has ended the script."""
    held: int
    """How many steps `--guard` has held back."""
    snapshot: tuple[Path, int] | None
    """The file of the first bad step and its size in bytes, if there is one."""
    left_out: tuple[int, int] | None
    """How many backward passes on a loss that was NaN or Inf no step has taken, and after which
    step the first of them came; None if there was none."""
    bad_endings: tuple[str, ...]
    """How it ended in NaN or Inf, for each optimizer that did, in words."""
    ending: Ending


def run_script(
    program: interpreter.Program,
    options: Options,
    *,
    tell: Callable[[Summary], None],
    warn: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Runs a program and records its optimizers' steps.

    Args:
        program, options: what to run, and how.
        tell: called last, when the run file is closed.
        warn, note: called if watching had to end early; at the first step, with where it goes.

    Raises:
        BadScript: it cannot be run.
        BadRunFile: the run file is there already, or cannot be.
        SystemExit: as the script's own, or 1 after an exception, which has been shown.
    """
    session = ScriptSession(
        program,
        options,
        settings={
            "watched": True,
            "swap": options.swap,
            "trace": options.trace or False,
            **({} if options.guard is None else {"guard": options.guard}),
            **({"per_step": dict(options.per_step)} if options.per_step else {}),
        },
        ways="Choose another name, --append to go on in it, or --force to overwrite it.",
        warn=warn,
        note=note,
        failure="watching ended, the script goes on",
        keeps_calls=options.trace is not None or options.guard is not None,
    )
    tracers: list[Any] = []
    guards: list[Any] = []
    stop = Stopper(BAD_STEP)

    def held(step: Any) -> None:
        if stop.calls:
            stop()  # The script goes on all the same.
        for tracer in tracers:
            session.guard(tracer.step_held, step)
        if options.guard == "stop":
            from gradilocks.step.events import EVENTS

            step.skip = True
            EVENTS.end_step(step)  # So that it is written down: nothing of it comes after this.
            stop()

    def listeners() -> Sequence[Any]:
        # Rank 0 writes its own; others, whose inputs are others, if they have made it.
        target = session.target if session.records else rank_file(session.target, session.rank)
        if options.trace is not None or options.guard is not None:
            session.steps.measures = True
            from gradilocks.observe.script_tracer import ScriptTracer

            tracers.append(
                ScriptTracer(
                    session.calls,
                    session.steps.recorder_now,
                    waits=options.trace == "always" or options.guard == "stop",
                    replays=options.trace is not None,
                    snapshot=_snapshot(target, options),
                    warn=warn,
                    innocent=session.records,
                )
            )
        return tracers

    def guarding() -> Sequence[Any]:
        if options.guard is not None:
            from gradilocks.observe.held_steps import HeldSteps

            guards.append(HeldSteps(held, waits=options.guard == "stop", warn=session.warn))
        return guards

    def conclude(ending: Ending) -> None:
        for tracer in tracers:
            session.guard(tracer.finish)
        session.stop_listening()
        if stop.calls:
            ending = Ending("exit", BAD_STEP, "stopped by --guard stop at a step with NaN or Inf")
        for each in (*tracers, *guards):
            each.close()
        recorder = session.close(ending)
        bad = {} if recorder is None else recorder.bad
        findings = tuple(text for tracer in tracers for text in tracer.findings())
        told = set() if recorder is None else recorder.told
        tell(
            Summary(
                path=session.name_of(recorder),
                file=session.shown.absolute() if recorder is None else recorder.path,
                steps=0 if recorder is None else recorder.steps,
                logs=0 if recorder is None else recorder.logs,
                skipped=0 if recorder is None else recorder.skipped,
                seen=0 if session.steps is None else session.steps.seen,
                failed=session.has_failed(),
                torch=session.imported_torch,
                watched=session.records,
                findings=tuple(text for text in findings if text not in told),
                unseen=not findings
                and any(tracer.passed_by for tracer in tracers)
                and any(b.seen for b in bad.values()),
                partly=0 if recorder is None else recorder.partly,
                untold=recorder is not None and recorder.untold,
                rank=session.rank,
                taken=sum(each.taken for each in bad.values()),
                stopped=stop.calls > 0,
                held=sum(each.count() for each in guards),
                snapshot=next(
                    (
                        (session.shown.with_name(path.name), size)
                        for path, size in (each.snapshot for each in tracers if each.snapshot)
                    ),
                    None,
                ),
                left_out=None if recorder is None else _left_out_of(recorder.end_facts),
                bad_endings=tuple(
                    f"optimizer {index}: {each.ending}" if len(bad) > 1 else each.ending
                    for index, each in sorted(bad.items())
                    if each.ending is not None
                ),
                ending=ending,
            )
        )

    try:
        session.run(listeners, conclude, guards=guarding)
    finally:
        if stop.calls:
            stop()  # Also if the script has caught it and ended in its own way.


def _left_out_of(facts: Mapping[str, Any]) -> tuple[int, int] | None:
    many = facts.get("left_out")
    return (many, facts["left_out_after"]) if many else None


def _snapshot(run_file: Path, options: Options) -> Path | None:
    """Where the first bad step is written. That of another run goes only if its run file does."""
    if options.guard is None or not options.snapshot:
        return None
    from gradilocks.lab.trace import fresh_place

    path = run_file.with_name(f"{run_file.stem}-first-bad-step.pt")
    return path if options.exists == "replace" else fresh_place(path)


def check_target(path: Path, shown: Path, exists: str, *, ways: str) -> list[Path]:
    """Refuses a run file before the script runs, and not after an hour of it.

    `shown` is its `path` as it was typed. Returns the folders that were made for it, innermost
    first.
    """
    if path.is_dir():
        raise BadRunFile(f"{shown} is a folder. Expected the name of a run file.")
    if path.exists():
        if path.is_file():
            refuse_foreign(shown)  # It may be the script itself.
        if exists == "refuse" and not is_abandoned(path):
            raise BadRunFile(f"{shown} is there already. {ways}")
        if not os.access(path, os.W_OK):
            raise BadRunFile(f"{shown} cannot be written. Choose another name.")
        return []
    refuse_source_name(shown)
    missing = [path.parent, *path.parent.parents]
    missing = [folder for folder in missing if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRunFile(
            f"{shown} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    if not os.access(path.parent, os.W_OK):
        raise BadRunFile(f"{shown} cannot be written: {path.parent} is read-only.")
    return missing
