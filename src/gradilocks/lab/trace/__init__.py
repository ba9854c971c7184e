"""Tracing: a model enters; after a skip, the module in which NaN or Inf was born leaves.

    tracer ─arms─▶ following ─hooks─▶ magnitudes ─first that is not finite─▶ finding ─▶ Trace

`gradilocks.trace` makes the handle, `following.py` is there only while a step is traced, and
`finding.py` says what was found.
"""

from gradilocks.lab.trace.tracer import Tracer, trace

__all__ = ["Tracer", "trace"]
