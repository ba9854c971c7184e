"""Tests with fastai, timm, Ignite and torchtitan: `make test-frameworks`."""

import warnings
from pathlib import Path

with warnings.catch_warnings():  # They use what torch deprecates, at their import too.
    warnings.simplefilter("ignore")
    import fastai.basics  # noqa: F401
    import ignite.engine  # noqa: F401

STAND_INS = Path(__file__).parent / "stand_ins"
"""To be on the path where timm is imported: a torchvision, which is not installed."""
