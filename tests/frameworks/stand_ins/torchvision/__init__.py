"""A stand-in for torchvision: every name that is asked for is an empty class.

There is no torchvision for the torch that the tests are pinned to. timm imports it at its door for
layers and image transforms that nothing here uses: its scaler, its clips and its plain models need
none of them. Only the tests of timm have this folder on their path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0"
__path__: list[str] = []


class _Empty(type):
    """A class whose attributes are such classes too: `InterpolationMode.NEAREST`."""

    def __getattr__(cls, name: str) -> type:
        return _empty(name)


def _empty(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Parts(MetaPathFinder, Loader):
    """`torchvision.anything`, however deep."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _empty


sys.meta_path.append(_Parts())
__getattr__ = _empty
