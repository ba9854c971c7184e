"""Rows of a run → a Parquet file. Needs `pyarrow`: `pip install 'gradilocks[parquet]'`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gradilocks.errors import MissingPackage

__all__ = ["parquet_columns", "write_parquet"]

ROWS_AT_ONCE = 50_000
_WHOLE = {"step", "optimizer", "nan", "inf", "finite_gradients", "loss_ranks"}
_WHOLE |= {"memory", "gpu_memory"}
_TEXT = {"reason", "parameter", "finite_after", "name"}
_TRUTH = {"clipped", "skipped", "loss_nonfinite", "of_rank"}


def write_parquet(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    progress: Callable[[int], None],
) -> None:
    """Writes rows, with `culprits` as a list of name and counts, ranks as a list of numbers.

    Raises:
        MissingPackage: the package `pyarrow` is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPackage(
            "pyarrow is not installed: pip install 'gradilocks[parquet]'"
        ) from error
    arrow: Any = pyarrow
    fields = [arrow.field(name, _type(arrow, name)) for name in columns]
    schema = arrow.schema(fields)
    left, done = iter(rows), 0
    # Opened here: what pyarrow says of a file that it cannot open is no system's error.
    with path.open("wb") as file, parquet.ParquetWriter(file, schema) as writer:
        while part := list(islice(left, ROWS_AT_ONCE)):
            arrays = [
                arrow.array([_plain(value) for value in column], type=field.type)
                for field, column in zip(fields, zip(*part, strict=True), strict=True)
            ]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            done += len(part)
            progress(done)


def parquet_columns(path: Path) -> list[str]:
    """The columns of a Parquet file; none of a file that is something else."""
    try:
        from pyarrow import lib, parquet
    except ImportError as error:
        raise MissingPackage(
            "pyarrow is not installed: pip install 'gradilocks[parquet]'"
        ) from error
    with path.open("rb") as file:
        try:
            return list(parquet.read_schema(file).names)
        except lib.ArrowException:
            return []


def _type(arrow: Any, name: str) -> Any:
    if name in _WHOLE:
        return arrow.int64()
    if name in _TEXT:
        return arrow.string()
    if name in _TRUTH:
        return arrow.bool_()
    if name == "culprits":
        counts = [("name", arrow.string()), ("nan", arrow.int64()), ("inf", arrow.int64())]
        return arrow.list_(arrow.struct(counts))
    if name == "bad_loss_ranks":
        return arrow.list_(arrow.int64())
    return arrow.float64()


def _plain(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return [each if isinstance(each, int) else each._asdict() for each in value]
