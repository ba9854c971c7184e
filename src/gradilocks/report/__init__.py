"""A run file → what happened, in sentences and on one page. Imports no torch.

`tracks.py` turns a Run into columns of numbers, `findings.py` judges them by the rules in `rules/`,
`series.py` makes of them what a plot shows, `figures.py` the plots, `page.py` the HTML.
`document.py` puts everything a page needs around it. The plain data of an audit pass `audited.py`,
and become a panel in `audit_panel.py` and a page in `audit.py`.
`summary.py` makes the numbers of one run, `comparison.py` those of several beside each other.
The names here are loaded on first use: whoever formats a number need not wait for the plots.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "BARS": "sparklines",
    "DETAIL_COLUMNS": "tables",
    "PLAIN_BARS": "sparklines",
    "STEP_COLUMNS": "tables",
    "Comparison": "comparison",
    "Drawn": "experiment_figures",
    "Loss": "summary",
    "Parting": "comparison",
    "Reported": "facts",
    "Summary": "summary",
    "Trail": "sparklines",
    "check_audit_page": "audit",
    "choose": "output",
    "clean": "words",
    "compare": "comparison",
    "csv_columns": "tables",
    "detail_rows": "tables",
    "experiment_page": "experiment",
    "identity": "page",
    "labels": "output",
    "main_numbers": "facts",
    "mean": "sparklines",
    "mentioned": "audited",
    "number": "words",
    "power": "words",
    "recommended": "audited",
    "render": "page",
    "report_on": "facts",
    "settled": "places",
    "sparkline": "sparklines",
    "step_rows": "tables",
    "write": "output",
    "write_csv": "tables",
}

__all__ = [
    "BARS",
    "DETAIL_COLUMNS",
    "PLAIN_BARS",
    "STEP_COLUMNS",
    "Comparison",
    "Drawn",
    "Loss",
    "Parting",
    "Reported",
    "Summary",
    "Trail",
    "check_audit_page",
    "choose",
    "clean",
    "compare",
    "csv_columns",
    "detail_rows",
    "experiment_page",
    "identity",
    "labels",
    "main_numbers",
    "mean",
    "mentioned",
    "number",
    "power",
    "recommended",
    "render",
    "report_on",
    "settled",
    "sparkline",
    "step_rows",
    "write",
    "write_csv",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gradilocks.report' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gradilocks.report.{_HOME[name]}"), name)


if TYPE_CHECKING:
    from gradilocks.report.audit import check_audit_page
    from gradilocks.report.audited import mentioned, recommended
    from gradilocks.report.comparison import Comparison, Parting, compare
    from gradilocks.report.experiment import experiment_page
    from gradilocks.report.experiment_figures import Drawn
    from gradilocks.report.facts import Reported, main_numbers, report_on
    from gradilocks.report.output import choose, labels, write
    from gradilocks.report.page import identity, render
    from gradilocks.report.places import settled
    from gradilocks.report.sparklines import BARS, PLAIN_BARS, Trail, mean, sparkline
    from gradilocks.report.summary import Loss, Summary
    from gradilocks.report.tables import (
        DETAIL_COLUMNS,
        STEP_COLUMNS,
        csv_columns,
        detail_rows,
        step_rows,
        write_csv,
    )
    from gradilocks.report.words import clean, number, power
