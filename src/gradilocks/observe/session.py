"""One `gradilocks run`: options and a program enter, a run file and a Summary leave."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradilocks.errors import BadScript
from gradilocks.observe import launch
from gradilocks.observe.ending import Ending, Last
from gradilocks.observe.importing import when_imported
from gradilocks.observe.places import check_target, fresh_name, rank_of_process

if TYPE_CHECKING:
    from gradilocks.record import Recorder

__all__ = ["Options", "Summary", "run_script"]

_WAYS = "Choose another name, --append to go on in it, or --force to overwrite it."


@dataclass(frozen=True)
class Options:
    """What `gradilocks run` was asked for."""

    output: Path | None = None
    """The run file; None for a fresh name under runs/."""
    exists: str = "refuse"
    """As the Recorder has it."""
    detail_every: int = 10
    flush_every: int = 50
    trace: bool = False
    all_ranks: bool = False
    log: bool = True
    swap: bool = False
    swap_optimizers: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """What a session has recorded."""

    path: Path
    """As it is to be typed from the folder in which the session began."""
    steps: int
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
    """What tracing has found, in sentences."""
    unseen: bool
    """Whether it was to find something, there was NaN or Inf, and it found nothing."""
    taken: int
    """How many steps were taken though their gradients were NaN or Inf."""
    bad_endings: tuple[str, ...]
    """How it ended in NaN or Inf, for each optimizer that did, in words."""
    ending: Ending


def run_script(
    program: launch.Program,
    options: Options,
    *,
    tell: Callable[[Summary], None],
    warn: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Runs a program and records its optimizers' steps.

    Args:
        program: the script or module.
        options: as asked for.
        tell: called last, when the run file is closed.
        warn: called if watching had to end early.
        note: called at the first step, with where it is recorded.

    Raises:
        BadScript: it cannot be run.
        BadRunFile: the run file is there already, or cannot be.
        SystemExit: as the script's own, or 1 after an exception, which has been shown.
    """
    launch.check(program)
    session = _Session(program, options, tell, warn, note)
    last = Last(session.conclude)
    last.prepare()
    when_imported("torch", session.begin)
    try:
        launch.execute(program, note=last.note)
    except BadScript:
        last.cancel()
        raise


class _Session:
    def __init__(
        self,
        program: launch.Program,
        options: Options,
        tell: Callable[[Summary], None],
        warn: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._options, self._tell, self._warn, self._note = options, tell, warn, note
        self._rank = rank_of_process()
        self._watched = self._rank == 0 or options.all_ranks
        self._shown = options.output or fresh_name(program.stem)
        self._path = Path(os.path.abspath(self._shown))
        self._made: list[Path] = []
        if self._watched:
            rank = self._rank if options.all_ranks else 0
            self._made = check_target(
                self._path, self._shown, options.exists, rank=rank, ways=_WAYS
            )
        self._hooks: Any = None
        self._watch: Any = None
        self._replaced: Any = None
        self._imported = False

    def begin(self) -> None:
        """torch is there."""
        self._imported = True
        options = self._options
        if self._watched:
            from gradilocks.observe.hooks import Hooks
            from gradilocks.observe.watching import Watch

            self._watch = Watch(self._recorder, trace=options.trace, warn=self._warn)
            self._hooks = Hooks(self._watch)
            self._hooks.install()
        if options.swap or options.swap_optimizers:
            from gradilocks.observe.replacing import Replacements
            from gradilocks.observe.swapping import swap

            self._replaced = Replacements()
            swap(self._replaced, parts=options.swap, optimizers=options.swap_optimizers)

    def conclude(self, ending: Ending) -> None:
        """Closes the run file, leaves torch as it was, and says what was recorded."""
        recorder = None
        if self._replaced is not None:
            self._replaced.undo()
        if self._hooks is not None:
            self._watch.close()
            self._hooks.remove()
            recorder = self._watch.recorder
        if recorder is not None:
            try:
                recorder.finish(status=ending.status, exit=ending.exit, error=ending.error)
            except Exception as error:  # The script has ended; nothing must keep it from leaving.
                self._warn(f"{self._shown} could not be closed: {type(error).__name__}: {error}")
        for folder in self._made:  # That nothing was put into.
            with suppress(OSError):
                folder.rmdir()
        bad = {} if recorder is None else recorder.bad
        findings = () if self._watch is None else self._watch.findings()
        self._tell(
            Summary(
                path=self._shown if recorder is None else _named(recorder.path, self._shown),
                steps=0 if recorder is None else recorder.steps,
                skipped=0 if recorder is None else recorder.skipped,
                seen=0 if self._watch is None else self._watch.seen,
                failed=False if self._watch is None else self._watch.failed,
                torch=self._imported,
                watched=self._watched,
                findings=findings,
                unseen=self._options.trace and not findings and any(b.seen for b in bad.values()),
                taken=sum(each.taken for each in bad.values()),
                bad_endings=tuple(
                    f"optimizer {index}: {each.ending}" if len(bad) > 1 else each.ending
                    for index, each in sorted(bad.items())
                    if each.ending is not None
                ),
                ending=ending,
            )
        )

    def _recorder(self) -> Recorder:
        from gradilocks.observe.lasting import LastingRecorder

        options = self._options
        recorder = LastingRecorder(
            self._path,
            flush_every=options.flush_every,
            detail_every=options.detail_every,
            exists=options.exists,
            settings={"watched": True, "swap": options.swap, "trace": options.trace},
            command=options.command or None,
            log=options.log,
            all_ranks=options.all_ranks,
        )
        self._note(f"recording to {_named(recorder.path, self._shown)}")
        return recorder


def _named(path: Path, shown: Path) -> Path:
    """The recorder's path as it was typed: a rank other than 0 has another name."""
    return shown.with_name(path.name)
