"""Which number format will hold the gradients? ``gradilocks.audit`` and ``gradilocks audit``.

The folder reads along the data: ``listening`` (hooks on a model) → ``counting`` (values by their
exponent, on the device) and ``flowing`` (outputs, and who takes them) → ``gathering`` →
``histogram`` (what a format makes of them), ``modules`` → ``judging`` (format, scale, what to keep
out) → ``words`` → ``findings`` (the Audit) → ``text``.
``measuring`` does it for a model and batches, with ``unchanged`` around it; ``script`` and
``watching`` for a script that is run, which may want to be the first to import torch: so the names
here are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "Audit": "findings",
    "FormatFinding": "findings",
    "Histogram": "histogram",
    "ModuleGradients": "modules",
    "Recommendation": "findings",
    "Shares": "histogram",
    "audit": "measuring",
}

__all__ = [
    "Audit",
    "FormatFinding",
    "Histogram",
    "ModuleGradients",
    "Recommendation",
    "Shares",
    "audit",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradilocks.lab.audit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gradilocks.lab.audit.{_HOME[name]}"), name)


if TYPE_CHECKING:
    from gradilocks.lab.audit.findings import Audit, FormatFinding, Recommendation
    from gradilocks.lab.audit.histogram import Histogram, Shares
    from gradilocks.lab.audit.measuring import audit
    from gradilocks.lab.audit.modules import ModuleGradients
