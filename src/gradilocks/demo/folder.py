"""The folder of an experiment: freed of an older one's files, then filled with its own.

An Experiment and its Results enter; run files, written while it runs, a page for each arm, the page
of them all and ``summary.json`` stand in the folder at the end.

The demo replaces its own files, other run files and pages of Gradilocks' if it is asked to, and no
others. Each of them says whose it is: run files in their settings, pages in a ``meta`` element, the
summary in a key.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import gradilocks.report as report
from gradilocks._version import __version__
from gradilocks.demo.arms import ARMS, MADE_BY, Arm, Experiment, Result
from gradilocks.demo.verdicts import judge
from gradilocks.errors import BadRunFile, GradilocksError
from gradilocks.runfile import read_run, refuse_foreign

PAGE, SUMMARY = "report.html", "summary.json"
VERSION = 1
"""Of the summary's format."""
_HEAD = 4096


def prepare(experiment: Experiment, *, force: bool) -> None:
    """Makes the folder, and removes from it what an earlier demo has left.

    Raises:
        GradilocksError: it cannot be made or written, or a file of somebody else is in the way.
    """
    folder = experiment.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".{os.getpid()}.part"
        trial.touch()
        trial.unlink()
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}."
        if isinstance(error, FileExistsError):
            why = f"is a file; expected a folder, as {folder.with_name('demo')}."
        raise GradilocksError(f"-o {folder} {why}") from error
    wanted = [folder / PAGE, folder / SUMMARY, *map(experiment.page, experiment.arms)]
    wanted += [Path(job.path) for job in experiment.jobs]
    for path in wanted:
        if not path.exists() or (path.is_file() and _is_of_demo(path)):
            continue
        may = path.is_file() and _is_replaceable(path)
        if not may or not force:
            raise GradilocksError(
                f"{path} is there and was not written by the demo; choose another folder with -o"
                + (", or replace it with --force." if may else ".")
            )
    for path in _earlier_files(folder):
        path.unlink(missing_ok=True)


def write_all(
    experiment: Experiment, results: Sequence[Result], *, started: float, seconds: float
) -> dict[str, Any]:
    """Writes the pages and the summary; returns the summary."""
    drawn, pages, versions = [], {}, {}
    for arm in experiment.arms:
        for seed in experiment.seeds:
            run = read_run(experiment.run_file(arm, seed))
            reported = report.report_on(run, arm.title)
            drawn.append(report.Drawn(arm.name, seed, reported))
            if seed == min(experiment.seeds):
                page = experiment.page(arm)
                drawing = partial(report.render, [reported])
                report.write(page, drawing, identity=report.identity([reported]), force=True)
                pages[arm.name] = page.name
                versions = {"torch": str(run.header.versions.get("torch"))}
    summary = summarize(experiment, results, started=started, seconds=seconds, versions=versions)
    report.write(
        experiment.folder / PAGE,
        lambda: report.experiment_page(summary, drawn, pages=pages, generator=MADE_BY),
        identity="",
        force=True,
    )
    path = experiment.folder / SUMMARY
    with report.written_whole(path, given=path) as unfinished:
        told = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        unfinished.write_text(told, encoding="utf-8")
    return summary


def summarize(
    experiment: Experiment,
    results: Sequence[Result],
    *,
    started: float,
    seconds: float,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Returns what ``json.dumps(..., allow_nan=False)`` takes; docs/demo.md says what is in it."""
    arms, setup = experiment.arms, experiment.setup
    order = [arm.name for arm in arms]
    ran = sorted(results, key=lambda result: (order.index(result.arm), result.seed))
    return {
        "made_by": MADE_BY,
        "version": VERSION,
        "command": list(experiment.command),
        "started": started,
        "seconds": round(seconds, 1),
        "versions": {"gradilocks": __version__, "python": platform.python_version(), **versions},
        "setup": {
            **asdict(setup),
            "text": "pydoc_data.topics",
            "micro_batch": setup.micro_batch,
            "global_batch": setup.global_batch,
            "computed": setup.computed,
        },
        "seeds": list(experiment.seeds),
        "arms": [{**asdict(arm), "final_loss": _spread(arm, ran)} for arm in arms],
        "runs": [result.to_plain() for result in ran],
        "verdicts": [verdict.to_plain() for verdict in judge(ran)],
    }


def _spread(arm: Arm, results: Sequence[Result]) -> dict[str, float | int | None]:
    """Mean and standard deviation over the seeds; None where a loss was not finite."""
    finals = [result.final_loss for result in results if result.arm == arm.name]
    whole = bool(finals) and all(map(math.isfinite, finals))
    return {
        "mean": fmean(finals) if whole else None,
        "deviation": stdev(finals) if whole and len(finals) > 1 else None,
        "seeds": len(finals),
        "finite": sum(map(math.isfinite, finals)),
    }


def _earlier_files(folder: Path) -> Iterator[Path]:
    """What an earlier demo has left, by name and by content."""
    names = "|".join(re.escape(arm.name) for arm in ARMS)
    ours = re.compile(rf"(({names})(-\d+\.jsonl|\.html)|{re.escape(SUMMARY)}|{re.escape(PAGE)})")
    for path in sorted(folder.iterdir()):
        if ours.fullmatch(path.name) and path.is_file() and _is_of_demo(path):
            yield path


def _is_replaceable(path: Path) -> bool:
    """Whether it is a run file or empty; pages of all of Gradilocks' commands count as ours."""
    if path.suffix == ".jsonl":
        with suppress(BadRunFile):
            refuse_foreign(path)
            return True
    return not path.stat().st_size


def _is_of_demo(path: Path) -> bool:
    if path.suffix == ".html":
        return report.is_page(path)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            if path.suffix == ".jsonl":
                found = json.loads(file.readline(_HEAD)).get("settings")
            else:
                found = json.load(file)
    except OSError as error:
        raise GradilocksError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, AttributeError):
        return False
    return isinstance(found, dict) and found.get("made_by") == MADE_BY
