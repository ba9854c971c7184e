"""Warnings of the frameworks about themselves, and their log lines."""

from __future__ import annotations

import logging

import pytest

_OF_LIGHTNING = (
    "ignore:.*does not have many workers:",
    "ignore:The number of training batches:",
    "ignore:.*is not supported by the model summary:",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:",
    "ignore:.*`training_step` returned `None`",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:You are trying to `self.log.. `",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in ("test_lightning.py", "test_fabric.py"):
            for text in _OF_LIGHTNING:
                item.add_marker(pytest.mark.filterwarnings(text))
