"""Imports the frameworks once, with what they deprecate silenced."""

from __future__ import annotations

import warnings

import pytest
import stand_ins  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fastai.basics
    import fastai.callback.fp16
    import ignite.engine
    import timm.utils  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "frameworks" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # Of the frameworks about themselves.
