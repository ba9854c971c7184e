"""Recording: what every step leaves behind → a run file, without a wait and without a trace.

    control ─journal─▶ Sample ─batch─▶ numbers on the host ─rows─▶ Step ─file─▶ run file
                                                              └──skips─▶ logging

`recorder.py` holds it together and is what users see; the others do one thing each. Training is
bit for bit the same with recording and without.
"""

from gradilocks.record.recorder import Recorder
from gradilocks.record.sample import Sample
from gradilocks.record.sinks import Sink

__all__ = ["Recorder", "Sample", "Sink"]
