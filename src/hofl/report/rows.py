# SPDX-License-Identifier: Apache-2.0
"""What a run folder says, read back: configuration, manifest, one row a round, the summary."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hofl.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """One run folder.

    Attributes:
        folder: where it is.
        config: the resolved configuration, as nested dictionaries.
        manifest: versions, fingerprints, mode.
        rows: one object a round, in order; a torn last line is left out.
        summary: the totals, None while the run is unfinished.
    """

    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    rows: tuple[Row, ...]
    summary: dict[str, Any] | None

    @property
    def status(self) -> str:
        """``done``, ``diverged@r2``, ``failed@r3`` or ``unfinished@r7``."""
        last = int(self.rows[-1]["round"]) if self.rows else 0
        if self.summary is None:
            return f"unfinished@r{last}"
        state = str(self.summary.get("status", "done"))
        return state if state == "done" else f"{state}@r{self.summary.get('diverged_round', last)}"

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config.get("seed", 0))


def read_run(folder: str | Path) -> RunData:
    """Read a run folder.

    Raises:
        DataError: it is no run folder, or one of its files is not what it should be.
    """
    path = Path(folder)
    if not (path / "config.toml").is_file():
        raise DataError(f"{path} is no run folder: it has no config.toml; give a folder written by hofl run")
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path / 'config.toml'} is damaged: {error}") from None
    return RunData(
        folder=path,
        config=config,
        manifest=_read_object(path / "manifest.json") or {},
        rows=tuple(read_rows(path / "rounds.jsonl")),
        summary=_read_object(path / "summary.json"),
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``rounds.jsonl``; a torn last line (a power cut) is left out.

    Raises:
        DataError: a line before the last is no JSON object.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None and number < len(lines):
            raise DataError(f"{path}:{number}: is no JSON object; the file is damaged")
        if row is not None:
            rows.append(row)
    return rows


def cumulative(rows: Sequence[Row], key: str) -> list[float]:
    """A running total of a per-round column; an object counts as the sum of its values."""
    total, totals = 0.0, []
    for row in rows:
        total += amount(row.get(key))
        totals.append(total)
    return totals


def amount(value: Any) -> float:
    """A number, the sum of an object of numbers, or 0 for None."""
    if isinstance(value, dict):
        return float(sum(amount(v) for v in value.values()))
    return float(value) if isinstance(value, int | float) else 0.0


def _parse(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is no such file."""
    if not path.is_file():
        return None
    value = _parse(path.read_bytes())
    if value is None:
        raise DataError(f"{path} is damaged: it is no JSON object")
    return value
