"""The run file: what a training run leaves behind, one JSON object a line.

Running writes it, reporting reads it, and they share nothing else. `records.py` says what the lines
hold, `writing.py` makes lines, `reading.py` makes records of them again; none imports torch.
docs/run-file.md describes the format for those who read it with something else.
"""

from gradilocks.runfile.bad_steps import BadSteps, Spoilt, SpoiltWeights, has_bad_gradients
from gradilocks.runfile.origins import FORWARD_OR_LOSS, Origin, beside, is_bad, origin_of
from gradilocks.runfile.reading import read_run, refuse_foreign
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
from gradilocks.runfile.words import describe_bad

__all__ = [
    "FORWARD_OR_LOSS",
    "BadSteps",
    "Culprit",
    "Detail",
    "End",
    "Header",
    "OptimizerInfo",
    "Origin",
    "Run",
    "Spoilt",
    "SpoiltWeights",
    "Step",
    "Trace",
    "beside",
    "describe_bad",
    "has_bad_gradients",
    "is_bad",
    "origin_of",
    "read_run",
    "refuse_foreign",
]
