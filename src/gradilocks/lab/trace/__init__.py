"""Tracing: a model enters; when a step is bad, the module in which NaN or Inf arose leaves.

`kept_calls.py` keeps what a step was computed from, `replay.py` runs it once more, `step_trace.py`
follows what runs by hooks, `finding.py` says what was found, `bad_step_file.py` writes the step
down and reads it again, `bad_step_keeper.py` does so for a control, `tracer.py` brings them
together.
"""

from gradilocks.lab.trace.bad_step_file import BadStep, write_bad_step
from gradilocks.lab.trace.bad_step_keeper import BadStepKeeper, checked_place, fresh_place
from gradilocks.lab.trace.kept_calls import KeptCalls, KeptStep
from gradilocks.lab.trace.tracer import Tracer, called_modules, skipped_for_nonfinite, trace

__all__ = [
    "BadStep",
    "BadStepKeeper",
    "KeptCalls",
    "KeptStep",
    "Tracer",
    "called_modules",
    "checked_place",
    "fresh_place",
    "skipped_for_nonfinite",
    "trace",
    "write_bad_step",
]
