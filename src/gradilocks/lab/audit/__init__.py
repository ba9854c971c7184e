"""Which number format will hold the gradients? ``gradilocks.audit`` and ``gradilocks audit``.

The folder reads along the data: ``module_hooks`` (hooks on a model) → ``counting`` (values by their
exponent, on the device) → ``judging`` (format, scale, what to keep out) → ``audit_text`` →
``result`` (the Audit: a `lab/audit_record` that can be asked). ``audit_model`` does it for a model
and batches; ``script`` and ``script_gradients`` for a script that is run. Such a script may want to
be the first to import torch, so whatever needs torch is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradilocks.lab.audit.audit_text import footnotes, heading, tables
from gradilocks.lab.audit.judging import refuse_blocks
from gradilocks.lab.audit.result import Audit
from gradilocks.lab.audit.script import AuditOptions, ScriptAudit, audit_script
from gradilocks.lab.audit_record import (
    FormatFinding,
    Histogram,
    ModuleGradients,
    Outputs,
    Recommendation,
    Shares,
)

if TYPE_CHECKING:
    from gradilocks.lab.audit.audit_model import audit

__all__ = [
    "Audit",
    "AuditOptions",
    "FormatFinding",
    "Histogram",
    "ModuleGradients",
    "Outputs",
    "Recommendation",
    "ScriptAudit",
    "Shares",
    "audit",
    "audit_script",
    "footnotes",
    "heading",
    "refuse_blocks",
    "tables",
]


def __getattr__(name: str) -> object:
    if name != "audit":
        raise AttributeError(f"module 'gradilocks.lab.audit' has no attribute {name!r}")
    from gradilocks.lab.audit.audit_model import audit

    return audit
