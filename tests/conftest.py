"""Settings for every test: hypothesis draws the same examples each time, and takes its time."""

from __future__ import annotations

import os
import signal
import sys

import torch

from tests.interpreter import replace_once_a_launch

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


def pytest_collection_finish() -> None:
    """The kernels are interpreted where there is no GPU."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        replace_once_a_launch()
