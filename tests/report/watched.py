"""A training loop in plain torch enters; its run file leaves, as `gradilocks run` would write it.

In this process: importing torch for each of many tiny runs would take longer than they train.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gradilocks.observe.step_recorder import Guard, ScriptRecorder, StepRecorder
from gradilocks.observe.torch_hooks import TorchHooks
from gradilocks.runfile import Run, read_run
from gradilocks.step.events import EVENTS


def watched(train: Callable[[], object], path: Path, *, detail_every: int = 5) -> Run:
    """Trains under watch, with the seed 0, and reads the run file."""
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

    steps = StepRecorder(recorder, lambda words: failures.append(RuntimeError(words)))
    listeners = [guard.around(each) for each in (steps.losses, steps)]
    hooks, threads = TorchHooks(), torch.get_num_threads()
    torch.set_num_threads(1)
    for listener in listeners:
        EVENTS.add(listener)
    hooks.install()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            train()
    finally:
        hooks.remove()
        for listener in listeners:
            EVENTS.discard(listener)
        torch.set_num_threads(threads)
        if steps.recorder is not None:
            steps.recorder.finish(status="finished", exit=0, error=None)
    assert not failures, failures
    return read_run(path)
