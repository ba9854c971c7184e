"""Settings of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import torch

TESTS = Path(__file__).parent

# Processes that tests start import this tree, too, and not an installed version.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])

if not torch.cuda.is_available():  # Triton reads it when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # A machine that runs only the `gpu` tests may not have it.
    pass
else:
    # The same examples in every run, and no dependence on the machine's speed.
    settings.register_profile(
        "gradilocks", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("gradilocks")
