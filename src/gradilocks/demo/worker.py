"""The process that trains: Jobs come in as lines of JSON, Steps and Results go out as such.

Started by ``crew``, with standard input and output as the two pipes. It ends when its input does,
or when nobody reads its output any more: a parent that was killed leaves no worker behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from dataclasses import asdict
from typing import Any

__all__ = ["main"]


def main() -> int:
    """Trains what it is told to, until there is nothing more."""
    # An interrupt is the parent's to handle, which then tells this process: see `crew`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # Whatever else prints would spoil the lines.

    def tell(kind: str, what: Any) -> None:
        out.write(json.dumps([kind, what]) + "\n")

    try:
        return _work(tell)
    except BrokenPipeError:
        return 1


def _work(tell: Any) -> int:
    from gradilocks.demo.values import Job, Step
    from gradilocks.errors import GradilocksError

    with warnings.catch_warnings():
        # torch says this, once, where there is no NumPy; the demo needs none.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch

        from gradilocks.demo.train import train

    def on_step(step: Step) -> None:
        tell("step", asdict(step))

    tell("ready", {"torch": torch.__version__})
    for line in sys.stdin:
        job = Job.from_plain(json.loads(line))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            tell("result", train(job, on_step).to_plain())
        except GradilocksError as error:
            tell("error", str(error))
        except KeyboardInterrupt:
            return 1
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    return 0
