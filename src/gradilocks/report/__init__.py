"""A run file → what happened, in sentences and on one page. Imports no torch.

`tracks.py` turns a Run into columns, the four `*_findings.py` judge them, and `run_report.py`
collects what is to be said. `series.py` makes of columns what a plot shows, `figures.py` the plots,
`page.py` the HTML, by the templates in `templates/`. The plain data of an audit pass `audited.py`.
`comparison.py` makes the numbers of runs beside each other, `tables.py` rows to export.
"""

from gradilocks.report.audit_page import audit_page, check_audit_page, write_audit_page
from gradilocks.report.audited import mentioned, recommended
from gradilocks.report.comparison import Comparison, Loss, Parting, Spread, Summary, compare
from gradilocks.report.destination import choose, labels, settled, write
from gradilocks.report.experiment_page import Drawn, experiment_page
from gradilocks.report.formatting import clean, number, power
from gradilocks.report.health import Finding, Health
from gradilocks.report.report_page import identity, render
from gradilocks.report.run_report import Reported, examine, main_numbers, report_on
from gradilocks.report.sparkline import BARS, PLAIN_BARS, Trail, mean, sparkline
from gradilocks.report.tables import (
    DETAIL_COLUMNS,
    STEP_COLUMNS,
    csv_columns,
    detail_rows,
    step_rows,
    write_csv,
)

__all__ = [
    "BARS",
    "DETAIL_COLUMNS",
    "PLAIN_BARS",
    "STEP_COLUMNS",
    "Comparison",
    "Drawn",
    "Finding",
    "Health",
    "Loss",
    "Parting",
    "Reported",
    "Spread",
    "Summary",
    "Trail",
    "audit_page",
    "check_audit_page",
    "choose",
    "clean",
    "compare",
    "csv_columns",
    "detail_rows",
    "examine",
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
    "write_audit_page",
    "write_csv",
]
