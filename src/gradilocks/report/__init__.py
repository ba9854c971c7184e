"""A run file → what happened, in sentences and on one page. Imports no torch.

`tracks.py` turns a Run into columns, the five `*_findings.py` judge them, and `run_report.py`
collects what is to be said. `series.py` makes of columns what a plot shows, `figures.py` the plots,
`page.py` the HTML, by the templates in `templates/`, for a report, an audit and the demo.
`comparison.py` makes the numbers of runs beside each other. The names here are loaded on first use:
whoever formats a number need not wait for the plots.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "audit_page": (
        "check_audit_page",
        "recommendation_as_line",
        "recommendation_as_plain",
        "write_audit_page",
    ),
    "comparison": (
        "Comparison",
        "Loss",
        "OwnNumber",
        "Parting",
        "Summary",
        "compare",
        "own_numbers",
    ),
    "destination": (
        "choose",
        "is_page",
        "is_page_about",
        "labels",
        "settled",
        "write",
        "written_whole",
    ),
    "experiment": ("Drawn", "experiment_page"),
    "formatting": ("clean", "number", "power", "short_name", "size"),
    "health": ("Finding", "Health"),
    "page": ("plotly_script",),
    "report_page": ("identity", "identity_of_headers", "render"),
    "run_list": ("ListedRun", "find_runs", "list_runs"),
    "runs_page": ("render_runs", "runs_identity"),
    "run_report": ("Reported", "examine", "main_numbers", "own_rows", "report_on"),
}

__all__ = [
    "Comparison",
    "Drawn",
    "Finding",
    "Health",
    "ListedRun",
    "Loss",
    "OwnNumber",
    "Parting",
    "Reported",
    "Summary",
    "check_audit_page",
    "choose",
    "clean",
    "compare",
    "examine",
    "experiment_page",
    "find_runs",
    "identity",
    "identity_of_headers",
    "is_page",
    "is_page_about",
    "labels",
    "list_runs",
    "main_numbers",
    "number",
    "own_numbers",
    "own_rows",
    "plotly_script",
    "power",
    "recommendation_as_line",
    "recommendation_as_plain",
    "render",
    "render_runs",
    "report_on",
    "runs_identity",
    "settled",
    "short_name",
    "size",
    "write",
    "write_audit_page",
    "written_whole",
]


def __getattr__(name: str) -> object:
    for home, names in _HOME.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f"gradilocks.report.{home}"), name)
            return globals()[name]
    raise AttributeError(f"module 'gradilocks.report' has no attribute {name!r}")


if TYPE_CHECKING:
    from gradilocks.report.audit_page import (
        check_audit_page,
        recommendation_as_line,
        recommendation_as_plain,
        write_audit_page,
    )
    from gradilocks.report.comparison import (
        Comparison,
        Loss,
        OwnNumber,
        Parting,
        Summary,
        compare,
        own_numbers,
    )
    from gradilocks.report.destination import (
        choose,
        is_page,
        is_page_about,
        labels,
        settled,
        write,
        written_whole,
    )
    from gradilocks.report.experiment import Drawn, experiment_page
    from gradilocks.report.formatting import clean, number, power, short_name, size
    from gradilocks.report.health import Finding, Health
    from gradilocks.report.page import plotly_script
    from gradilocks.report.report_page import identity, identity_of_headers, render
    from gradilocks.report.run_list import ListedRun, find_runs, list_runs
    from gradilocks.report.run_report import Reported, examine, main_numbers, own_rows, report_on
    from gradilocks.report.runs_page import render_runs, runs_identity
