"""A training loop in plain torch enters; its run file leaves, as `gradilocks run` would write it.

In this process: importing torch for each of many tiny runs would take longer than they train.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from gradilocks.observe.step_recorder import Guard, ScriptRecorder, StepRecorder
from gradilocks.observe.torch_hooks import TorchHooks
from gradilocks.runfile import Run, read_run
from gradilocks.step.events import EVENTS

_hooks: list[TorchHooks] = []


@contextmanager
def hooks_kept() -> Iterator[None]:
    """Several runs within it share torch's hooks: putting them everywhere takes a quarter second.

    What the process holds already is left out where the models of a run are looked for.
    """
    hooks = TorchHooks()
    gc.freeze()
    hooks.install()
    _hooks.append(hooks)
    try:
        yield
    finally:
        _hooks.remove(hooks)
        hooks.remove()
        gc.unfreeze()


def watched(
    train: Callable[[], object],
    path: Path,
    *,
    detail_every: int = 5,
    told: list[str] | None = None,
) -> Run:
    """Trains under watch, with the seed 0, and reads the run file.

    Warnings are failures, unless there is a list of what was `told`.
    """
    failures: list[Exception] = []
    guard = Guard(failures.append)

    def recorder() -> ScriptRecorder:
        return ScriptRecorder(
            path,
            all_ranks=False,
            git=None,
            detail_every=detail_every,
            log=False,
            command=(getattr(train, "__name__", "train"),),
            settings={"watched": True, "swap": False, "trace": False},
        )

    def warn(words: str) -> None:
        if told is None:
            failures.append(RuntimeError(words))
        else:
            told.append(words)

    steps = StepRecorder(recorder, warn)
    listeners = [guard.around((steps.losses, steps))]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for listener in listeners:
        EVENTS.add(listener)
    try:
        with nullcontext() if _hooks else hooks_kept(), torch.random.fork_rng():
            torch.manual_seed(0)
            train()
    finally:
        for listener in listeners:
            EVENTS.discard(listener)
        torch.set_num_threads(threads)
        if steps.recorder is not None:
            steps.recorder.finish(status="finished", exit=0, error=None)
    assert not failures, failures
    return read_run(path)
