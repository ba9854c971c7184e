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
    "FORMAT_COLUMNS": "text",
    "MODULE_COLUMNS": "text",
    "Audit": "findings",
    "FormatFinding": "findings",
    "Heard": "script",
    "Histogram": "histogram",
    "ModuleGradients": "modules",
    "Recommendation": "findings",
    "Shares": "histogram",
    "Wishes": "script",
    "audit": "measuring",
    "audit_script": "script",
    "footnotes": "text",
    "format_rows": "text",
    "heading": "text",
    "module_rows": "text",
    "refuse_blocks": "findings",
}

__all__ = [
    "FORMAT_COLUMNS",
    "MODULE_COLUMNS",
    "Audit",
    "FormatFinding",
    "Heard",
    "Histogram",
    "ModuleGradients",
    "Recommendation",
    "Shares",
    "Wishes",
    "audit",
    "audit_script",
    "footnotes",
    "format_rows",
    "heading",
    "module_rows",
    "refuse_blocks",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradilocks.lab.audit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gradilocks.lab.audit.{_HOME[name]}"), name)


if TYPE_CHECKING:
    from gradilocks.lab.audit.findings import (
        Audit,
        FormatFinding,
        Recommendation,
        refuse_blocks,
    )
    from gradilocks.lab.audit.histogram import Histogram, Shares
    from gradilocks.lab.audit.measuring import audit
    from gradilocks.lab.audit.modules import ModuleGradients
    from gradilocks.lab.audit.script import Heard, Wishes, audit_script
    from gradilocks.lab.audit.text import (
        FORMAT_COLUMNS,
        MODULE_COLUMNS,
        footnotes,
        format_rows,
        heading,
        module_rows,
    )
