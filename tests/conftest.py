"""Settings for every test: hypothesis draws the same examples each time, and takes its time."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():  # Before anything imports Triton, which reads it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and stops.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helper modules beside the tests are imported by their plain names.
FOLDERS = [
    "cli",
    "control",
    "demo",
    "dropin",
    "integrations",
    "ranks",
    "recording",
    "runfile",
    "running",
]
for folder in FOLDERS:
    sys.path.insert(0, str(Path(__file__).parent / folder))

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
