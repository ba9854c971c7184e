"""Which number format will hold the gradients? ``gradilocks.audit`` and ``gradilocks audit``.

The folder reads along the data: ``module_hooks`` (hooks on a model) → ``counting`` (values by their
exponent, on the device) → ``judging`` (format, scale, what to keep out) → ``audit_text`` →
``result`` (the Audit, a `lab/audit_record` that can be asked). ``audit_model`` does it for a model
and batches; ``script`` and ``watching`` for a script that is run, which may want to be the first to
import torch: so the names here are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "Audit": "audit.result",
    "FormatFinding": "audit_record",
    "Histogram": "audit_record",
    "ModuleGradients": "audit_record",
    "Outputs": "audit_record",
    "Recommendation": "audit_record",
    "Shares": "audit_record",
    "audit": "audit.audit_model",
    "footnotes": "audit.audit_text",
    "heading": "audit.audit_text",
    "refuse_blocks": "audit.judging",
    "tables": "audit.audit_text",
}

__all__ = [
    "Audit",
    "FormatFinding",
    "Histogram",
    "ModuleGradients",
    "Outputs",
    "Recommendation",
    "Shares",
    "audit",
    "footnotes",
    "heading",
    "refuse_blocks",
    "tables",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradilocks.lab.audit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gradilocks.lab.{_HOME[name]}"), name)


if TYPE_CHECKING:
    from gradilocks.lab.audit.audit_model import audit
    from gradilocks.lab.audit.audit_text import footnotes, heading, tables
    from gradilocks.lab.audit.judging import refuse_blocks
    from gradilocks.lab.audit.result import Audit
    from gradilocks.lab.audit_record import (
        FormatFinding,
        Histogram,
        ModuleGradients,
        Outputs,
        Recommendation,
        Shares,
    )
