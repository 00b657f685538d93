# SPDX-License-Identifier: Apache-2.0
"""What a run folder says, read back: configuration, manifest, one row a round, the summary."""

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hofl.errors import DataError

Row = dict[str, Any]
Reader = Callable[[Path], Iterable[Row]]
"""The rows of a ``rounds.jsonl``, checked."""


@dataclass(frozen=True)
class RunData:
    """One run folder.

    Attributes:
        folder: where it is.
        config: the resolved configuration, as nested dictionaries.
        manifest: versions, fingerprints, mode.
        rows: one object a round, in order.
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


def read_run(folder: str | Path, read_rows: Reader) -> RunData:
    """Read a run folder.

    Args:
        folder: where it is.
        read_rows: the runtime's reader, which this layer does not know.

    Raises:
        HoflError: it is no run folder, or one of its files is not readable or not what it should be.
    """
    try:
        return _read_run(Path(folder), read_rows)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); mend its permissions") from None


def _read_run(path: Path, read_rows: Reader) -> RunData:
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
        summary=_summary(path / "summary.json"),
    )


def _summary(path: Path) -> dict[str, Any] | None:
    """The totals; those of a finished run have a metric."""
    found = _read_object(path)
    if found is None:
        return None
    metric = found.get("metric")
    given: dict[str, Any] = metric if isinstance(metric, dict) else {}
    named = isinstance(given.get("name"), str) and _finite(given.get("n", 0))
    if not named or (found.get("status", "done") == "done" and not _finite(given.get("value"))):
        raise DataError(f"{path} is damaged: a finished run has a metric with a name, a value and a count")
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


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


def spent(run: RunData, against: str) -> list[float]:
    """What a run had spent by the end of each of its rows.

    Args:
        run: a run folder.
        against: ``examples_seen``, ``bytes_up``, ``bytes_down``, or ``bytes_total`` for both ways.
    """
    if against == "examples_seen":
        return [float(row.get(against) or 0) for row in run.rows]
    if against == "bytes_total":
        ways = (cumulative(run.rows, way) for way in ("bytes_up", "bytes_down"))
        return [up + down for up, down in zip(*ways, strict=True)]
    return cumulative(run.rows, against)


def curve(run: RunData, against: str, metric: str) -> tuple[list[float], list[float]]:
    """Where a run was evaluated, as :func:`spent` says it, and the metric there.

    Args:
        run: a run folder.
        against: see :func:`spent`.
        metric: a name in the rows' ``metrics``.
    """
    measured = [(row.get("metrics") or {}).get(metric) for row in run.rows]
    found = [(x, float(y)) for x, y in zip(spent(run, against), measured, strict=True) if y is not None]
    return [x for x, _ in found], [y for _, y in found]


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it is no JSON object")
    return value
