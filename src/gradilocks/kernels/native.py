"""The native library: C++ that walks over tensors, CPU kernels and launches, built on this machine.

`library()` is the module once it is built, else None; whoever asks goes on in Python then.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from gradilocks.kernels import native_build

__all__ = ["library"]

_library: Any = None
_tried = False


def library() -> Any:
    """The module `gradilocks_native`, or None as long as it is not there."""
    global _library, _tried
    if _tried:
        return _library
    _tried = True
    if os.environ.get("GRADILOCKS_NATIVE", "") == "off":
        return None
    path = native_build.build()
    if path is not None:
        spec = importlib.util.spec_from_file_location("gradilocks_native", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _library = module
    return _library
