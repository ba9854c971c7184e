"""Stand-ins for packages that the frameworks import for layers and data sets that the tests do not use.

torchvision (timm) has no build for every torch; datasets (torchtitan) needs twenty packages more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = ("torchvision", "datasets")


class _Empty(type):
    """A class whose attributes are such classes too: `InterpolationMode.NEAREST`."""

    def __getattr__(cls, name: str) -> type:
        return _empty(name)


def _empty(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__getattr__=_empty, __version__="0", __path__=[])


sys.meta_path.append(_Finder())
