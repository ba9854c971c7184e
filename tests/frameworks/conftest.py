"""Imports the frameworks once, without their warnings, and with stand-ins for two packages.

torchvision (timm) has no build for every torch; datasets (torchtitan) needs twenty packages more.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


class _Empty(type):
    """A class whose attributes are such classes too: `InterpolationMode.NEAREST`."""

    def __getattr__(cls, name: str) -> type:
        return _empty(name)


def _empty(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_one = name.partition(".")[0] in ("torchvision", "datasets")
        return ModuleSpec(name, self, is_package=True) if is_one else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__getattr__=_empty, __version__="0", __path__=[])


sys.meta_path.append(_StandIns())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for framework in ("fastai.basics", "fastai.callback.fp16", "ignite.engine", "timm.utils", "torchtitan.trainer"):
        importlib.import_module(framework)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "frameworks" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # Of the frameworks about themselves.
