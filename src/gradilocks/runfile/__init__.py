"""The run file: what a training run leaves behind, one JSON object a line.

Running writes it, reporting reads it, and they share nothing else. `records.py` says what the lines
hold, `writing.py` makes lines, `reading.py` makes records of them again; none imports torch.
docs/run-file.md describes the format for those who read it with something else.
"""

from gradilocks.runfile.bad_steps import BadSteps, SpoiltWeights
from gradilocks.runfile.following import Follower
from gradilocks.runfile.opening import opened
from gradilocks.runfile.reading import Reader, read_run, refuse_foreign
from gradilocks.runfile.records import (
    Culprit,
    Detail,
    End,
    Header,
    OptimizerInfo,
    Run,
    Step,
    Trace,
)
from gradilocks.runfile.words import describe_skip, format_scale, named_numbers

__all__ = [
    "BadSteps",
    "Culprit",
    "Detail",
    "End",
    "Follower",
    "Header",
    "OptimizerInfo",
    "Reader",
    "Run",
    "SpoiltWeights",
    "Step",
    "Trace",
    "describe_skip",
    "format_scale",
    "named_numbers",
    "opened",
    "read_run",
    "refuse_foreign",
]
