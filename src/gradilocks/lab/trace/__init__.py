"""Tracing: a model enters; after a skip, the module in which NaN or Inf was born leaves.

`tracer.py` follows a step by hooks, `finding.py` says what was found.
"""

from gradilocks.lab.trace.tracer import Tracer, called_modules, trace

__all__ = ["Tracer", "called_modules", "trace"]
