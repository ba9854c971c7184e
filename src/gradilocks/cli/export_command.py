"""``gradilocks export``: a run file enters, a table or a TensorBoard folder leaves.

The steps are wide, as they are in the file; the detail is long, one row for each parameter of each
step that has detail, so that it can be filtered and grouped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from heapq import merge
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from gradilocks.cli.options import checked, flag, latest_runs, run_file
from gradilocks.cli.terminal import bar, forgive_encoding, read_with_bar
from gradilocks.errors import GradilocksError
from gradilocks.report import clean, settled, written_whole
from gradilocks.runfile import Detail, Run, Step


class Format(str, Enum):
    """What a run can be exported to; typer names them all where the option is missing."""

    csv = "csv"
    parquet = "parquet"
    tensorboard = "tensorboard"


def export(
    *,
    path: Annotated[
        Path | None, run_file("[RUN.jsonl]", help="The run file. Default: the latest in runs/.")
    ] = None,
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            parser=checked(Format, bool, "csv, parquet or tensorboard"),
            autocompletion=lambda: [each.value for each in Format],
            metavar="csv|parquet|tensorboard",
            show_default=False,
            help="What to make of it.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="The file, or for tensorboard the folder, to write. By default it has the run "
            "file's name and stands beside it.",
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Overwrite an earlier export.")] = False,
    superseded: Annotated[
        bool,
        flag("--superseded", "Export what counts no more: steps from before a resume, alone."),
    ] = False,
) -> None:
    """Export a run to CSV, Parquet or TensorBoard.

    CSV and Parquet get one row a step. If the run has detail of its tensors, a second file, whose
    name has .detail in it, gets one row a parameter and detailed step; numbers of your own go to a
    further one with .logged in its name. Steps that were superseded, when the run went on from an
    earlier one, are left out; --superseded exports them instead. Folders are made. Parquet needs
    pip install 'gradilocks[parquet]', TensorBoard pip install 'gradilocks[tensorboard]'.

    \b
    Examples:
      gradilocks export --to csv
      gradilocks export runs/a.jsonl --to parquet -o a.parquet --force
      gradilocks export runs/a.jsonl --to tensorboard -o tb && tensorboard --logdir tb
    """
    forgive_encoding()
    if path is None:
        (path,) = latest_runs()
    if output is not None:
        settled(output)  # says at once what is wrong with it: reading may take a while
    run = read_with_bar(path)
    if superseded:
        if not run.superseded:
            raise GradilocksError(f"{path} has no superseded steps: all of its steps count.")
        run = replace(run, steps=list(run.superseded), logs=run.superseded_logs)
    which = ".superseded" if superseded else ""
    target = output or path.with_suffix(f"{which}.{to.value}")
    if to is Format.tensorboard:
        written = [_to_tensorboard(run, target, force=force)]
    else:
        written = _to_tables(run, to, target, force=force)
    for place, what in written:
        print(clean(f"{place}: {what}"))


def _to_tables(run: Run, to: Format, steps: Path, *, force: bool) -> list[tuple[Path, str]]:
    write: Callable[..., None] = write_csv
    columns_of = csv_columns
    if to is Format.parquet:
        from gradilocks.integrations.parquet import parquet_columns, write_parquet

        write, columns_of = write_parquet, parquet_columns
    detail = steps.with_name(f"{steps.stem}.detail{steps.suffix}")
    entries = sum(len(step.detail.norm) for step in run.steps if step.detail is not None)
    jobs: list[tuple[Path, tuple[str, ...], Iterator[tuple[Any, ...]], int]] = [
        (steps, STEP_COLUMNS, step_rows(run), len(run.steps))
    ]
    if entries:
        jobs.append((detail, DETAIL_COLUMNS, detail_rows(run), entries))
    if run.logs:
        logged = steps.with_name(f"{steps.stem}.logged{steps.suffix}")
        jobs.append(
            (logged, LOGGED_COLUMNS, logged_rows(run), sum(len(e.values) for e in run.logs))
        )
    for place, columns, *_ in jobs:
        _refuse(run, settled(place), place, columns, columns_of, force=force)
    try:
        steps.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradilocksError(f"{steps} cannot be written: {error.strerror or error}.") from error
    for place, columns, rows, total in jobs:
        target = settled(place)
        with bar(f"writing {place}") as show, written_whole(target, given=target) as unfinished:
            write(unfinished, columns, rows, progress=lambda done, of=total: show(done, of))
    return [(place, f"{total:,} rows") for place, _, _, total in jobs]


def _to_tensorboard(run: Run, folder: Path, *, force: bool) -> tuple[Path, str]:
    from gradilocks.integrations.tensorboard import TensorBoardSink, own_events

    sink = TensorBoardSink(folder)
    before = own_events(folder)
    if before and not force:
        raise GradilocksError(
            f"{folder} already holds a TensorBoard run; --force replaces it, -o names another."
        )
    try:
        for old in before:
            old.unlink()
        sink.open(run.header)
        for info in run.optimizers:
            sink.optimizer(info)
        with bar(f"writing {folder}") as show:
            records: Iterator[Any] = merge(run.steps, run.logs, key=attrgetter("time"))
            for done, record in enumerate(records, start=1):
                (sink.step if isinstance(record, Step) else sink.log)(record)
                if done % 1000 == 0:
                    show(done, len(run.steps))
        sink.close(run.end)
    except OSError as error:
        raise GradilocksError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return folder, f"{len(run.steps):,} steps; see them with: tensorboard --logdir {folder}"


def _refuse(
    run: Run,
    place: Path,
    given: Path,
    columns: Sequence[str],
    columns_of: Callable[[Path], list[str]],
    *,
    force: bool,
) -> None:
    if place.is_dir():
        raise GradilocksError(f"{given} is a folder; give the path of a file with -o.")
    if not place.exists():
        return
    if place.samefile(run.path):
        raise GradilocksError(f"{given} is the run file itself; name another with -o.")
    try:
        ours = not place.stat().st_size or columns_of(place) == list(columns)
    except OSError as error:
        raise GradilocksError(f"{given} cannot be read: {error.strerror or error}.") from error
    if not ours:
        raise GradilocksError(
            f"{given} is already there and was not written by gradilocks export, so it is never "
            "overwritten; name another with -o, or remove it first."
        )
    if not force:
        raise GradilocksError(f"{given} is already there; --force replaces it, -o names another.")


# --- tables ---------------------------------------------------------------------------------------

STEP_COLUMNS = tuple(name for name in Step._fields if name != "detail")
LOGGED_COLUMNS = ("step", "time", "name", "value")
DETAIL_COLUMNS = ("step", "optimizer", "parameter", *Detail._fields)


def step_rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """A row a step, along `STEP_COLUMNS`."""
    return map(attrgetter(*STEP_COLUMNS), run.steps)


def detail_rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """A row for each parameter of each step that has detail, along `DETAIL_COLUMNS`."""
    for step in run.steps:
        if step.detail is not None:
            names = run.optimizers[step.optimizer].names
            for name, *numbers in zip(names, *step.detail, strict=True):
                yield (step.step, step.optimizer, name, *numbers)


def logged_rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """A row for each of the user's own numbers, along `LOGGED_COLUMNS`."""
    for each in run.logs:
        for name, value in each.values.items():
            yield (each.step, each.time, name, value)


def write_csv(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    progress: Callable[[int], None],
) -> None:
    """Writes rows as CSV: nothing for None, true and false, culprits and ranks as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for done, row in enumerate(rows, start=1):
            writer.writerow(map(_cell, row))
            if done % 1000 == 0:
                progress(done)


def csv_columns(path: Path) -> list[str]:
    """The first line of a file, split as `write_csv` joins it."""
    with path.open("rb") as file:
        first = file.readline(1 << 16)
    return first.decode("utf-8", "replace").rstrip("\n").split(",")


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        named = [each if isinstance(each, int) else each._asdict() for each in value]
        return json.dumps(named, ensure_ascii=False, separators=(",", ":")) if named else None
    return value
