"""The run file: what a training run leaves behind, one JSON object a line.

Running writes it, reporting reads it, and they share nothing else. `records.py` says what the lines
hold, `writing.py` makes lines, `reading.py` makes records of them again; none imports torch.
docs/run-file.md describes the format for those who read it with something else.
"""

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

__all__ = [
    "Culprit",
    "Detail",
    "End",
    "Header",
    "OptimizerInfo",
    "Run",
    "Step",
    "Trace",
    "read_run",
    "refuse_foreign",
]
