"""Version 0.3 of Gradilocks, and 0.2 if it is there, in one process.

    git worktree add build/v0.2 74cd5e0    # adds 0.2 to all benchmarks

Both packages are called `gradilocks` and import their modules on first use. Each version has its own set of entries in
`sys.modules`, which `Version.active` installs for the duration of a call.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.nn.utils.clip_grad as torch_clip

ROOT = Path(__file__).resolve().parents[1]

# 0.2 builds its C++ library in the background on first use; a benchmark has to wait for it.
os.environ.setdefault("GRADILOCKS_NATIVE", "wait")


class Version:
    """One version of the package.

    Args:
        name: as in tables.
        source: folder that contains the package.
    """

    def __init__(self, name: str, source: Path) -> None:
        self.name, self.source = name, source
        self._modules: dict[str, Any] = {}
        self._patches: dict[str, Any] = {}

    @contextmanager
    def active(self) -> Iterator[Any]:
        """Makes `import gradilocks` mean this version; yields the package."""
        sys.path.insert(0, str(self.source))
        sys.modules.update(self._modules)
        # A control of 0.2 wraps a function of torch's clip module, which must not slow down torch or 0.3.
        original = dict(vars(torch_clip))
        vars(torch_clip).update(self._patches)
        try:
            yield importlib.import_module("gradilocks")
        finally:
            self._patches = {name: value for name, value in vars(torch_clip).items() if original.get(name) is not value}
            vars(torch_clip).update(original)
            for name in [name for name in sys.modules if name.split(".")[0] == "gradilocks"]:
                self._modules[name] = sys.modules.pop(name)
            sys.path.remove(str(self.source))

    def describe(self) -> str:
        """Version number and kernels, without paths of this machine."""
        with self.active() as package:
            kernels = [f"{name}: {re.sub(r'/[^ ]*/', '', text)}" for name, text in package.kernels.describe().items()]
            return "; ".join([package.__version__, *kernels])


V2 = Version("0.2", ROOT / "build" / "v0.2" / "src")
V3 = Version("0.3", ROOT / "src")
VERSIONS = [version for version in (V2, V3) if version.source.exists()]
