"""One `gradilocks audit`: a script enters, runs for a few steps, and an Audit of it leaves.

It runs as under `gradilocks run`, and is recorded as there. After so many steps of an optimizer it
is stopped by an exception that `except Exception` does not catch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradilocks.lab.formats import Format
from gradilocks.observe.interpreter import Program
from gradilocks.observe.process_end import Ending
from gradilocks.observe.session import Options, ScriptSession
from gradilocks.observe.stopping import Stopper

if TYPE_CHECKING:
    from gradilocks.lab.audit.counted import Counted
    from gradilocks.lab.audit.result import Audit
    from gradilocks.lab.audit.script_gradients import ScriptGradients
    from gradilocks.observe.rank_post import RankPost

__all__ = ["AuditOptions", "ScriptAudit", "audit_script"]

_PATIENCE_WITH_RANKS = 20.0
"""Seconds that rank 0 waits for what others have counted: they step as often, if not at once."""
_FAREWELL = 5.0
"""Seconds that a rank tries to tell it."""


@dataclass(frozen=True)
class AuditOptions(Options):
    """What `gradilocks audit` was asked for, as it is recorded like `gradilocks run`."""

    steps: int = 10
    formats: tuple[Format, ...] = ()


@dataclass(frozen=True)
class ScriptAudit:
    """The audit of a script, and how the script ended."""

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
    ending: Ending


def audit_script(
    program: Program,
    options: AuditOptions,
    *,
    tell: Callable[[ScriptAudit], None],
    warn: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> ScriptAudit:
    """Runs a program until an optimizer has stepped often enough, and audits its gradients.

    Args:
        program, options: what to run, and what was asked for.
        tell: called last, when the run file is closed.
        warn: called if auditing had to end early.
        progress: called with the steps done, and how many there are to be.

    Raises:
        BadScript: it cannot be run.
        BadRunFile: the run file is there already, or cannot be.
    """
    stop = Stopper(0)
    gradients: list[Any] = []
    found: list[ScriptAudit] = []

    def stepped(done: int) -> None:
        if session.rank == 0:
            progress(min(done, options.steps), options.steps)
        if done >= options.steps:
            stop()

    session = ScriptSession(
        program,
        options,
        settings={"watched": True, "audited": True},
        ways="Choose another name.",
        warn=warn,
        note=lambda said: None,
        failure="the audit failed",
        after_failure=stop,
        every_rank=True,
    )

    def listeners() -> Sequence[Any]:
        from gradilocks.lab.audit.script_gradients import ScriptGradients

        gradients.append(ScriptGradients(session.guard, stepped))
        return gradients

    def conclude(ending: Ending) -> None:
        """Judges what was counted, closes the run file, and leaves torch as it was."""
        session.stop_listening()
        audit = None
        steps = 0
        for each in gradients:
            each.close()
            steps = each.steps
            if steps and not session.has_failed():
                audit = _audit_of_all(each, options.formats, rank=session.rank)
            elif each.post is not None and session.rank:
                each.post.send({"rank": session.rank, "counted": None})
            if each.post is not None:
                each.post.close(_FAREWELL)
        if audit is not None and session.steps.recorder is not None:
            session.steps.recorder.audit(audit.to_plain())
        recorder = session.close(ending)
        found.append(
            ScriptAudit(
                audit=audit,
                path=session.shown,
                steps=steps,
                recorded=recorder is not None and recorder.path.exists(),
                torch=session.imported_torch,
                failed=session.has_failed(),
                main=session.rank == 0,
                ending=ending,
            )
        )
        tell(found[0])

    with suppress(SystemExit):  # How it ended is noted.
        session.run(listeners, conclude)
    session.end.finish()
    return found[0]


def _audit_of_all(
    gradients: ScriptGradients, formats: Sequence[Format], *, rank: int
) -> Audit | None:
    """On rank 0 an audit of what all ranks have counted; None on others, and if that is nothing."""
    own, post = gradients.counted(), gradients.post
    whole, said = own, tuple[str, ...]()
    if post is not None and rank:
        partners = gradients.partners()
        post.send({"rank": rank, "partners": partners, "counted": own.to_plain()})
        return None
    if post is not None:
        whole, sentence = _with_other_ranks(own, gradients.partners(), post)
        said = (sentence,)
    audit = whole.judged(steps=gradients.steps, formats=formats)
    words = (*audit.recommendation.words, *said)
    audit = replace(audit, recommendation=replace(audit.recommendation, words=words))
    return audit if audit.modules else None


def _with_other_ranks(own: Counted, partners: list[int], post: RankPost) -> tuple[Counted, str]:
    """What rank 0 and the others have counted, and a sentence on whose it is."""
    from gradilocks.lab.audit.counted import Counted, counted_together
    from gradilocks.ranks.all_parameters import on_ranks
    from gradilocks.ranks.layout import world_size

    ranks = world_size()
    told: dict[int, Any] = {}
    until = time.monotonic() + _PATIENCE_WITH_RANKS
    while len(told) < ranks - 1 and time.monotonic() < until:
        time.sleep(0.02)
        told.update((letter["rank"], letter) for letter in post.received())
    heard = {rank: letter for rank, letter in told.items() if letter["counted"] is not None}
    counted = {0: own} | {r: Counted.from_plain(heard[r]["counted"]) for r in sorted(heard)}
    known = {0: partners} | {rank: letter["partners"] for rank, letter in heard.items()}
    whole = counted_together(counted, known, ranks=ranks)
    said = f"Counted {on_ranks(list(counted), ranks)}"
    if len(counted) == ranks:
        return whole, f"{said}: the gradients of their batches and of their parts of the model."
    return whole, (
        f"{said} of {ranks}: the others have told of nothing. Their batches and, where the model "
        "is spread over ranks, their parts of it are not in this audit."
    )
