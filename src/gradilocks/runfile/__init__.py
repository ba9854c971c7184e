"""The run file: what a training run leaves behind, one JSON object a line.

Running writes it, reporting reads it, and they share nothing else. `records.py` says what the lines
hold, `lines.py` makes lines of records and records of lines, `reader.py` reads a file and
`follower.py` one that still grows; `bad_steps.py` and `describe.py` say what the steps of a run
tell of NaN and Inf. None imports torch. docs/run-file.md describes the format for those who read it
with something else.
"""

from gradilocks.runfile.bad_steps import (
    FORWARD_OR_LOSS,
    BadSteps,
    Origin,
    Spoilt,
    SpoiltWeights,
    backward_groups,
    has_bad_gradients,
    is_bad,
    origin_of,
)
from gradilocks.runfile.describe import (
    certainty_of,
    describe_bad,
    describe_ending,
    describe_error,
    describe_skip,
    describe_trace,
    format_scale,
    named_numbers,
    on_ranks,
)
from gradilocks.runfile.follower import Follower
from gradilocks.runfile.lines import (
    audit_line,
    end_line,
    header_line,
    losses_line,
    optimizer_line,
    precision_line,
    step_line,
    trace_line,
)
from gradilocks.runfile.reader import Reader, line_batches, open_run_file, read_run, refuse_foreign
from gradilocks.runfile.records import (
    VERSION,
    Culprit,
    Detail,
    End,
    Header,
    OptimizerInfo,
    Precision,
    RankLosses,
    Run,
    Step,
    Trace,
)

__all__ = [
    "FORWARD_OR_LOSS",
    "VERSION",
    "BadSteps",
    "Culprit",
    "Detail",
    "End",
    "Follower",
    "Header",
    "OptimizerInfo",
    "Origin",
    "Precision",
    "RankLosses",
    "Reader",
    "Run",
    "Spoilt",
    "SpoiltWeights",
    "Step",
    "Trace",
    "audit_line",
    "backward_groups",
    "certainty_of",
    "describe_bad",
    "describe_ending",
    "describe_error",
    "describe_skip",
    "describe_trace",
    "end_line",
    "format_scale",
    "has_bad_gradients",
    "header_line",
    "is_bad",
    "line_batches",
    "losses_line",
    "named_numbers",
    "on_ranks",
    "open_run_file",
    "optimizer_line",
    "origin_of",
    "precision_line",
    "read_run",
    "refuse_foreign",
    "step_line",
    "trace_line",
]
