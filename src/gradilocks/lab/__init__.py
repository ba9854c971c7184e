"""Number formats, and what they would do to a training: formats, emulate, audit, trace.

The record of an audit is handed out here, apart from `lab.audit`, whose Audit draws itself with
`report`: so `report` can read an audit, and needs no torch for it.
"""

from gradilocks.lab.audit_record import (
    AuditRecord,
    Fate,
    FormatFinding,
    Histogram,
    ModuleGradients,
    Shares,
    UnreadableAudit,
)

__all__ = [
    "AuditRecord",
    "Fate",
    "FormatFinding",
    "Histogram",
    "ModuleGradients",
    "Shares",
    "UnreadableAudit",
]
