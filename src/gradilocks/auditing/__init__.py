"""Which number format will hold the gradients? ``gradilocks.audit`` and ``gradilocks audit``.

The folder reads along the data: ``listening`` (hooks on a model) → ``counting`` (values by their
exponent, on the device) → ``histogram`` (what a format makes of them) → ``judging`` (format, scale,
what to keep out) → ``words`` → ``findings`` (the Audit) → ``text``. ``measuring`` does it for a
model and batches, with ``unchanged`` around it; ``script`` for a script that is run.
"""

from gradilocks.auditing.findings import Audit, FormatFinding, ModuleGradients, Recommendation
from gradilocks.auditing.histogram import Histogram, Shares
from gradilocks.auditing.measuring import audit

__all__ = [
    "Audit",
    "FormatFinding",
    "Histogram",
    "ModuleGradients",
    "Recommendation",
    "Shares",
    "audit",
]
