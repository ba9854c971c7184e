"""The report on one or several runs: a page, text for a terminal, or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradilocks.view.columns import DEFINITIONS, Columns, columns, facts, json_number, summarize, to_float
from gradilocks.view.findings import Finding, Verdict, find, verdict
from gradilocks.view.runfile import Run, read
from gradilocks.view.text import clean, moment, number

__all__ = ["Report", "to_json", "to_text", "write_page"]

MAX_OPTIMIZERS = 8
"""Largest number of optimizers shown; those with the most steps are chosen."""
STYLES = {"ok": "bold green", "problem": "bold red", "warning": "bold yellow", "note": "bold blue"}


@dataclass(frozen=True)
class Report:
    """One run and everything that a report shows of it."""

    run: Run
    name: str
    """The label of the run, unique in the report."""

    @cached_property
    def findings(self) -> list[Finding]:
        """Problems first."""
        return find(self.run)

    @cached_property
    def verdict(self) -> Verdict:
        """One sentence about the run."""
        return verdict(self.run, self.findings)

    @cached_property
    def optimizers(self) -> list[Columns]:
        """The optimizers with the most steps, in the order of their indices."""
        longest = sorted(columns(self.run), key=lambda steps: -len(steps))[:MAX_OPTIMIZERS]
        return sorted(longest, key=lambda steps: steps.optimizer)

    def facts(self, steps: Columns) -> dict[str, str]:
        """The main numbers of one optimizer."""
        return facts(self.run, summarize(self.run, steps))

    @cached_property
    def settings(self) -> dict[str, str]:
        """The command, the machine, the configuration and the settings of the optimizers."""
        header = self.run.header
        command = header.get("command")
        shown: dict[str, Any] = {"file": self.run.path}
        shown["command"] = " ".join(map(str, command)) if isinstance(command, list) else None
        shown["started"] = moment(to_float(header.get("time"))) or None
        shown["device"] = header.get("device")
        shown["ranks"] = header.get("world_size") if header.get("world_size") != 1 else None
        shown |= _flat(header.get("versions"))
        shown |= _flat(header.get("git"), "git ")
        for steps in self.optimizers:
            prefix = f"{steps.label} " if len(self.optimizers) > 1 else ""
            shown[prefix + "optimizer"] = steps.info.get("class")
            shown |= {prefix + name: steps.info.get(name) for name in ("parameters", "tensors")}
            shown |= {f"{prefix}{name} policy": steps.info.get(name) for name in ("scale", "clip")}
            shown |= _flat(steps.info.get("settings"), prefix)
        shown |= _flat(header.get("config"), "config ")
        # Ten digits: a schedule may turn 3e-07 into 3.0000000000000004e-07.
        text = {name: f"{value:.10g}" if isinstance(value, float) else clean(value) for name, value in shown.items()}
        return {clean(name): value for name, value in text.items() if shown[name] is not None}

    @cached_property
    def culprits(self) -> list[str]:
        """Every culprit record as text, without unknown origins that a finding reports."""
        several_ranks = len({rank for _, _, rank in self.run.culprits}) > 1
        texts = " ".join(finding.text for finding in self.findings)
        lines = []
        for (step, _, rank), record in sorted(self.run.culprits.items()):
            text = clean(record.get("text", ""))
            if record.get("known") or text[1:] not in texts:
                lines.append(f"step {step:,}{f', rank {rank}' if several_ranks else ''}: {text}")
        return lines

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The last value of each logged metric."""
        return {name: value for log in self.run.logs for name, value in log["values"].items()}

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "path": str(self.run.path),
            "name": self.run.name,
            "verdict": self.verdict.text,
            "severity": self.verdict.severity,
            "findings": [finding.to_json() for finding in self.findings],
            "optimizers": [summarize(self.run, steps).to_json() for steps in columns(self.run)],
            "culprits": [self.run.culprits[key] for key in sorted(self.run.culprits)],
            "metrics": {name: json_number(value) for name, value in self.metrics.items()},
            "header": self.run.header,
            "end": self.run.end,
        }


def _flat(values: object, prefix: str = "") -> dict[str, object]:
    """The entries of nested dictionaries under dotted names."""
    if not isinstance(values, dict):
        return {}
    found: dict[str, object] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def read_reports(paths: Sequence[Path | str]) -> list[Report]:
    """Reads run files; the names of runs with the same label include the file."""
    runs = [read(path) for path in paths]
    names = [run.name for run in runs]
    unique = [f"{name} ({run.path})" if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
    return [Report(run, clean(name)) for run, name in zip(runs, unique, strict=True)]


def comparison(reports: Sequence[Report]) -> dict[str, list[str]]:
    """Rows of the comparison table: main numbers, settings that differ, and the first step whose loss differs."""
    rows: dict[str, list[str]] = {}
    mains = [max(report.optimizers, key=len, default=None) for report in reports]
    numbers = [{} if steps is None else report.facts(steps) for report, steps in zip(reports, mains, strict=True)]
    if any(len(report.optimizers) > 1 for report in reports):
        rows["main numbers of"] = ["–" if steps is None else steps.label for steps in mains]
    for name in DEFINITIONS:
        rows[name] = [values.get(name, "–") for values in numbers]
    for name in dict.fromkeys(name for report in reports for name in report.settings):
        values = [report.settings.get(name, "–") for report in reports]
        # A setting that is False in one run and missing in another does not differ.
        present = set(values) - {"–", "False"}
        if len(set(values)) > 1 and len(present) > name.startswith("optimizer "):
            rows[name] = values
    rows["loss differs from the first run"] = [_first_difference(mains[0], steps) for steps in mains]
    return rows


def _first_difference(base: Columns | None, run: Columns | None) -> str:
    """The first step in which two runs have different losses, bit for bit."""
    if base is run or base is None or run is None:
        return "–"
    _, base_rows, rows = np.intersect1d(base.step, run.step, return_indices=True)
    both = base.has_loss[base_rows] & run.has_loss[rows]
    steps, first, second = run.step[rows[both]], base.loss[base_rows[both]], run.loss[rows[both]]
    if not len(steps):
        return "no common step"
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    if same.all():
        return f"identical in {len(steps):,} common steps"
    return f"from step {steps[np.flatnonzero(~same)[0]]:,} on"


def to_json(paths: Sequence[Path | str]) -> str:
    """The reports as JSON text. Numbers that are not finite are strings, as in run files."""
    return json.dumps([report.to_json() for report in read_reports(paths)], indent=2, default=str)


# --- terminal ---------------------------------------------------------------------------------------------------------


def to_text(paths: Sequence[Path | str]) -> RenderableType:
    """The reports for a terminal, to be printed by a rich Console."""
    reports = read_reports(paths)
    parts = [part for report in reports for part in _text_of(report, is_alone=len(reports) == 1)]
    if len(reports) > 1:
        table = Table(title="Comparison", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for report in reports:
            table.add_column(Text(report.name), overflow="fold")
        for name, values in comparison(reports).items():
            table.add_row(Text(name, "dim"), *map(Text, values))
        parts.append(table)
    return Group(*parts)


def _text_of(report: Report, *, is_alone: bool) -> Iterator[RenderableType]:
    yield Text(report.name, "bold")
    yield Padding(Text(report.verdict.text, STYLES[report.verdict.severity]), (0, 0, 1, 0), expand=False)
    for steps in report.optimizers if is_alone else []:
        table = Table(box=None, show_header=False, pad_edge=False)
        if len(report.optimizers) > 1:
            table.add_row(Text(steps.label, "bold"), "")
        for name, value in report.facts(steps).items():
            table.add_row(Text(name, "dim"), Text(value))
        yield Padding(table, (0, 0, 1, 0), expand=False)
    for finding in report.findings:
        title = Text.assemble((f"{finding.severity}: ", STYLES[finding.severity]), finding.title)
        yield title
        if finding.text:
            yield Padding(Text(finding.text, "dim"), (0, 0, 0, 2), expand=False)
    for culprit in report.culprits[:5]:
        yield Text.assemble(("culprit ", "bold"), culprit)
    if len(report.culprits) > 5:
        yield Text(f"and {len(report.culprits) - 5:,} more culprits")
    for metric, last in report.metrics.items():
        yield Text.assemble((f"{clean(metric)} ", "dim"), number(last))
    yield Text("")


# --- page -------------------------------------------------------------------------------------------------------------


def write_page(paths: Sequence[Path | str], output: Path | str) -> Path:
    """Writes an HTML page about the runs.

    plotly.js is written to the same folder, once per version of plotly; all pages in the folder share it.

    Args:
        paths: run files.
        output: path of the page.

    Returns:
        The path of the page.
    """
    import plotly
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape
    from plotly.offline import get_plotlyjs

    from gradilocks.view.figures import figure

    output = Path(output)
    reports = read_reports(paths)
    output.parent.mkdir(parents=True, exist_ok=True)
    script, source = output.parent / f"plotly-{plotly.__version__}.min.js", get_plotlyjs().encode()
    if not script.exists() or script.stat().st_size != len(source):  # A full disk may have cut it off.
        script.write_bytes(source)
    plots = figure([report.run for report in reports], [report.name for report in reports])
    options = {"displayModeBar": False, "responsive": True}
    drawn = "" if plots is None else plots.to_html(full_html=False, include_plotlyjs=False, config=options)
    environment = Environment(
        loader=PackageLoader("gradilocks.view"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["clean"] = clean
    # Text in backquotes is code.
    environment.filters["prose"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    page = environment.get_template("page.html").render(
        reports=reports,
        comparison=comparison(reports) if len(reports) > 1 else {},
        definitions=DEFINITIONS,
        plots=Markup(drawn),
        plotly=script.name,
        title=reports[0].name if len(reports) == 1 else f"{len(reports)} runs",
    )
    output.write_text(page, encoding="utf-8")
    return output
