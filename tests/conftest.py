"""Settings for every test: hypothesis draws the same examples each time, and takes its time."""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():  # Before anything imports Triton, which reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and stops.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # A machine that runs only the `gpu` tests may have none.
    pass
else:
    settings.register_profile(
        "steady",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("steady")
