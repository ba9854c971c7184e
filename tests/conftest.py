"""Settings for every test: hypothesis draws the same examples each time, and takes its time."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# Helper modules beside the tests are imported by their plain names.
for folder in ("control", "dropin", "ranks"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")
