# SPDX-License-Identifier: Apache-2.0
"""One reader a file format: (path, wanted columns) -> columns by name. Local bytes in, no network.

Every reader raises DataError, one line, for a file it cannot read: bad encoding, ragged rows, a line or
cell above its limit, a truncated Parquet file. A wanted column that is missing is the caller's to report:
readers return the names that are there.
"""

import csv
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, AnyStr

from hofl.errors import DataError

Columns = dict[str, list[Any]]

LINE_LIMIT = 16 * 2**20
"""Bytes of the longest line of a JSONL or text file, and of a whole JSON file."""
COLUMN_LIMIT = 4096
"""Columns of the widest file."""


def _one_line_errors(
    read: Callable[..., Columns],
) -> Callable[..., Columns]:
    """Turn whatever a parser raises on bad bytes into a DataError that names the file."""

    @functools.wraps(read)
    def wrapped(path: Path, wanted: Sequence[str], *options: Any) -> Columns:
        """The reader, with its errors in one line."""
        try:
            table = read(path, wanted, *options)
        except (
            OSError,
            ValueError,
            csv.Error,
            RecursionError,
            MemoryError,
        ) as error:  # pyarrow's are ValueErrors
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({reason})") from None
        if len(table) > COLUMN_LIMIT:
            raise DataError(f"{path}: {len(table)} columns: allowed are up to {COLUMN_LIMIT}")
        return table

    return wrapped


@_one_line_errors
def read_parquet(path: Path, wanted: Sequence[str]) -> Columns:
    """Only the wanted columns are decoded; the others come back empty, as names."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        read = file.read(columns=[name for name in wanted if name in names])
    return {name: read[name].to_pylist() if name in wanted else [] for name in names}


@_one_line_errors
def read_csv(path: Path, wanted: Sequence[str], delimiter: str = ",") -> Columns:
    """A header row, then rows of as many cells; every cell is text, quotes may hold line breaks."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(_lines(file), delimiter=delimiter, strict=True)
        header = next(rows, [])
        if len(set(header)) < len(header) or len(header) > COLUMN_LIMIT:
            raise ValueError(f"{len(header)} columns, {len(set(header))} different names")
        places = [(name, header.index(name)) for name in wanted if name in header]
        table: Columns = {name: [] for name in header}
        for row in rows:
            if len(row) != len(header) and row:
                raise ValueError(f"line {rows.line_num}: {len(row)} cells under {len(header)} columns")
            for name, place in places if row else ():
                table[name].append(row[place])
    return table


def read_tsv(path: Path, wanted: Sequence[str]) -> Columns:
    """As :func:`read_csv`, cells divided by tabs."""
    return read_csv(path, wanted, "\t")


@_one_line_errors
def read_jsonl(path: Path, wanted: Sequence[str]) -> Columns:
    """One JSON object a line; a key an object lacks is None there."""
    with path.open("rb") as file:
        rows = [json.loads(line) for line in _lines(file) if line.strip()]
    return _from_objects(rows, wanted)


@_one_line_errors
def read_json(path: Path, wanted: Sequence[str]) -> Columns:
    """One JSON array of objects, up to ``LINE_LIMIT`` bytes."""
    if path.stat().st_size > LINE_LIMIT:
        raise ValueError(f"over {LINE_LIMIT >> 20} MiB: write it as .jsonl, one object a line")
    rows = json.loads(path.read_bytes())
    return _from_objects(rows if isinstance(rows, list) else [rows], wanted)


@_one_line_errors
def read_text(path: Path, wanted: Sequence[str]) -> Columns:
    """One example a line in the column ``text``; blank lines are skipped."""
    with path.open("rb") as file:
        lines = [line.decode().rstrip("\r\n") for line in _lines(file)]
    return {"text": [line for line in lines if line.strip()]}


READERS: dict[str, Callable[[Path, Sequence[str]], Columns]] = {
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".txt": read_text,
}


def _lines(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of a file; never holds more than the limit of one of them."""
    number = 1
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            raise ValueError(f"line {number} is over {LINE_LIMIT >> 20} MiB")
        yield line
        number += 1


def _from_objects(rows: list[Any], wanted: Sequence[str]) -> Columns:
    """Wanted columns of a list of objects; every key that occurs is named."""
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError('each row must be a JSON object, as in {"text": ..., "label": ...}')
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] if name in wanted else [] for name in names}
