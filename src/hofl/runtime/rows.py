# SPDX-License-Identifier: Apache-2.0
"""``rounds.jsonl``: one strict JSON object a round, appended and synced, cut back on resume."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hofl.errors import RecordError
from hofl.runtime import files

Row = dict[str, Any]

LINE_LIMIT = 16_000_000
"""Bytes of one line."""

LOST = "put it back from a copy, or start a new folder"
"""What to do about a file of a run that is gone or short."""


def finite(value: Any) -> Any:
    """``value`` with every non-finite number in it replaced by None: strict JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def append_row(path: Path, row: Row) -> None:
    """Add one row; it is on the device when this returns."""
    files.append(path, json.dumps(row, allow_nan=False).encode() + b"\n")


def read_rows(path: Path) -> Iterator[Row]:
    """The complete rows in file order; a last line without its end was torn by a kill and is left out.

    Raises:
        RecordError: a line before the last is no row, or is longer than ``LINE_LIMIT``.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number in range(1, 1 << 62):
            line = file.readline(LINE_LIMIT + 1)
            if len(line) > LINE_LIMIT:
                raise RecordError(f"{path}:{number}: a line of over {LINE_LIMIT} bytes is no row")
            if not line.endswith(b"\n"):
                return
            yield _parse(path, number, line)


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("round"), int):
        raise RecordError(f"{path}:{number}: not a row: it has no round number")
    return row


def kept_rows(path: Path, last: int) -> bytes:
    """The first row of each of rounds ``0 .. last`` (none if ``last`` is -1), as a file's contents.

    Raises:
        RecordError: one of them is missing.
    """
    kept: dict[int, bytes] = {}
    for row in read_rows(path):
        if row["round"] <= last:
            kept.setdefault(row["round"], json.dumps(row, allow_nan=False).encode() + b"\n")
    if missing := [number for number in range(last + 1) if number not in kept]:
        raise RecordError(
            f"{path}: the row of round {missing[0]} is missing, the checkpoint is of round {last}; {LOST}"
        )
    return b"".join(kept[number] for number in range(last + 1))
