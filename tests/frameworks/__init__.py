"""Tests with fastai, timm, Ignite and torchtitan: `make test-frameworks`."""

from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"
"""To be on the path where timm is imported: a torchvision, which is not installed."""
