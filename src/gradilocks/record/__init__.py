"""Recording: what every step leaves behind → a run file, without a wait for the device.

    control ─journal─▶ Sample ─batch─▶ Step, on the host ─file_writer─▶ run file
    log() ─own_numbers─────────┘           ├─skip_log─▶ logging
                                           └─Sink─▶ TensorBoard, Weights & Biases, yours

`recorder.py` holds it together and is what users see; `environment.py` knows what a header tells of
the machine. Training is bit for bit the same with recording and without.
"""

from gradilocks.record.journal import log
from gradilocks.record.recorder import LogSink, Recorder, ResumeSink, Sink
from gradilocks.record.sample import RankPart, Sample, Weights

__all__ = ["LogSink", "RankPart", "Recorder", "ResumeSink", "Sample", "Sink", "Weights", "log"]
