"""The run file: what a training run leaves behind, one JSON object a line.

Running writes it, reporting reads it, and they share nothing else. `records.py` says what the lines
hold, `lines.py` makes lines of records and records of lines, `reader.py` reads a file and
`follower.py` one that still grows, `writing_process.py` knows whether somebody still writes it;
`bad_steps.py` and `describe.py` say what the steps of a run tell of NaN and Inf. None imports
torch. docs/run-file.md describes the format for those who read it with something else.
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
    describe_bad,
    describe_damage,
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
    log_line,
    losses_line,
    optimizer_line,
    precision_line,
    step_line,
    trace_line,
)
from gradilocks.runfile.reader import (
    Reader,
    line_batches,
    open_run_file,
    rank_file,
    read_quietly,
    read_run,
    read_start,
    refuse_foreign,
    refuse_source_name,
)
from gradilocks.runfile.records import (
    VERSION,
    Culprit,
    Detail,
    End,
    Header,
    Logged,
    OptimizerInfo,
    Precision,
    RankLosses,
    Run,
    Step,
    Trace,
)
from gradilocks.runfile.writing_process import is_running, process_here

__all__ = [
    "FORWARD_OR_LOSS",
    "VERSION",
    "BadSteps",
    "Culprit",
    "Detail",
    "End",
    "Follower",
    "Header",
    "Logged",
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
    "describe_bad",
    "describe_damage",
    "describe_ending",
    "describe_error",
    "describe_skip",
    "describe_trace",
    "end_line",
    "format_scale",
    "has_bad_gradients",
    "header_line",
    "is_bad",
    "is_running",
    "line_batches",
    "log_line",
    "losses_line",
    "named_numbers",
    "on_ranks",
    "open_run_file",
    "optimizer_line",
    "origin_of",
    "precision_line",
    "process_here",
    "rank_file",
    "read_quietly",
    "read_run",
    "read_start",
    "refuse_foreign",
    "refuse_source_name",
    "step_line",
    "trace_line",
]
