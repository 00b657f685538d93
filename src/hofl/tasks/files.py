# SPDX-License-Identifier: Apache-2.0
"""Tables from local files, installed packages, the hub or memory; no socket is opened except for the hub.

A source is one line::

    place [ "?" option { "&" option } ]

    place    data/train.parquet             .parquet .csv .tsv .jsonl .json .txt
             clients/*.csv                  a glob: one file a client, the client's id is the file's stem
             package:NAME:relative/path.csv a file inside an installed package, found without importing it
             hub:NAME[/CONFIG]:SPLIT        a hub data set, e.g. hub:glue/sst2:train or hub:org/name:train
    option   column=value                   keep the rows whose column, as text, is exactly value
             split=train:0.9                keep the rows whose text hashes into the first 0.9 of all hashes
             split=rest:0.9                 keep the others

``split`` goes by the SHA-256 of the text with case and white space evened out, so a text that occurs
twice lands on one side: a table trained on ``train:x`` and scored on ``rest:x`` shares no text. In a
value, write ``%26`` for ``&`` and ``%25`` for ``%``. CSV cells are always text; ``.txt`` is one column,
``text``.
"""

import difflib
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hofl.core.keys import Key
from hofl.errors import ConfigError, DataError
from hofl.tasks.hub import load_rows
from hofl.tasks.readers import READERS

Table = dict[str, list[Any]]
"""Columns by name, all of one length."""


class MissingColumn(DataError):
    """A table without a column that was asked for; ``column`` is its name."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


Source = str | Path | Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] | Any
"""A source line, or data at hand: columns, a list or map-style data set of dicts, a pandas DataFrame."""

CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIONS = re.compile(r"\?(?=[^?/]*=)")  # "?" alone is a glob's any-character
_SHARE = re.compile(r"(train|rest):(0\.\d{1,9})")


def read_table(
    source: Source, columns: Sequence[str], hashed: Sequence[str] = (), idle: bool = False
) -> Table:
    """The asked columns of a source, in the order of its rows; a glob's files are joined by name.

    Args:
        source: a source line (see the module) or data in memory.
        columns: which columns to read; nothing else is kept.
        hashed: the columns ``split`` goes by; the first of ``columns`` by default.
        idle: a table without rows is none to complain of.

    Raises:
        DataError: nothing there, unreadable, a missing column, or no row left; one line.
        ConfigError: the source line is malformed.
    """
    tables = list(_tables(source, columns, hashed).values())
    joined: Table = {name: [cell for table in tables for cell in table[name]] for name in columns}
    if not count(joined) and not idle:
        raise DataError(f"{_shown(source)}: no rows: give a file with data, or a filter that keeps some")
    return joined


def client_tables(source: Source, columns: Sequence[str], hashed: Sequence[str] = ()) -> dict[str, Table]:
    """One table a file of a glob, by client id, sorted by id; a file without rows is an idle client.

    Raises:
        DataError: as :func:`read_table`, and where a file's stem is no client id or occurs twice.
    """
    tables = _tables(source, columns, hashed)
    _require_ids(tables, source)
    if not any(map(count, tables.values())):
        raise DataError(f"{_shown(source)}: none of the {len(tables)} client files has a row")
    return tables


def client_sources(source: str) -> dict[str, str]:
    """The source line of each file of a glob, by client id in the clients' order; no file is opened.

    Raises:
        DataError: no file is there, or one has no client id for a stem or another's.
    """
    place, _ = _parse(source)
    rest = source[len(place) :]
    found = {stem: f"{path}{rest}" for stem, path in _by_stem(place).items()}
    _require_ids(found, source)
    return found


def count(table: Table) -> int:
    """How many rows a table has."""
    return len(next(iter(table.values()), ()))


def drawn(total: int, size: int, key: Key, setting: str = "rows") -> list[int]:
    """``size`` of ``total`` row numbers, drawn by the key, ascending; all of them for size 0.

    ``setting`` is what a message calls the size.

    Raises:
        ConfigError: there are fewer.
    """
    if not 0 <= size <= total:
        raise ConfigError(f"{setting} = {size}: the data has {total} rows; allowed is 0 (all) to {total}")
    return sorted(key.permutation(total)[:size].tolist()) if size else list(range(total))


def taken(table: Table, rows: Sequence[int]) -> Table:
    """The table of the given rows, in that order."""
    return {name: [column[row] for row in rows] for name, column in table.items()}


def text_hash(*texts: Any) -> bytes:
    """SHA-256 of texts with case and white space evened out: equal for what a reader calls a duplicate."""
    return hashlib.sha256(
        "\0".join(" ".join(str(text).casefold().split()) for text in texts).encode(errors="replace")
    ).digest()


def _tables(source: Source, columns: Sequence[str], hashed: Sequence[str]) -> dict[str, Table]:
    """The source's tables by file stem, filtered and cut to the columns."""
    if not isinstance(source, str | Path):
        return {"memory": _asked(_from_memory(source), columns, "the data given")}
    place, options = _parse(str(source))
    hashed = hashed or columns[:1]
    wanted = list(
        dict.fromkeys([*columns, *hashed, *(name for name, value in options if not _share(name, value))])
    )
    if place.startswith("hub:"):
        found = {"hub": _asked(load_rows(place, wanted), wanted, place)}
    else:
        found = _local(place, wanted)
    return {name: _asked(_kept(table, options, hashed), columns, name) for name, table in found.items()}


def _parse(source: str) -> tuple[str, list[tuple[str, str]]]:
    """The place, and each option as (column, value)."""
    place, *rest = _OPTIONS.split(source, maxsplit=1)
    options = []
    for option in "&".join(rest).split("&") if rest else ():
        name, _, value = option.partition("=")
        options.append((unquote(name), unquote(value)))
    bad = [f"{name}={value}" for name, value in options if not name or not value]
    bad += [
        f"split={value}"
        for name, value in options
        if name == "split" and re.match("(train|rest):", value) and not _share(name, value)
    ]
    if bad or not place:
        raise ConfigError(
            f"{source!a}: {(bad or ['no place'])[0]!a} is not understood: "
            "allowed are column=value, split=train:0.9 and split=rest:0.9"
        )
    return place, options


def _share(name: str, value: str) -> re.Match[str] | None:
    """Whether an option is a hash split rather than a column's value."""
    return _SHARE.fullmatch(value) if name == "split" else None


def _kept(table: Table, options: Sequence[tuple[str, str]], hashed: Sequence[str]) -> Table:
    """The rows that pass every option."""
    keep = list(range(count(table)))
    for name, value in options:
        if share := _share(name, value):
            first, below = share[1] == "train", int(float(share[2]) * 2**64)
            keep = [i for i in keep if (_position(table, hashed, i) < below) == first]
        else:
            keep = [i for i in keep if str(table[name][i]) == value]
    return taken(table, keep) if options else table


def _position(table: Table, hashed: Sequence[str], row: int) -> int:
    """Where a row's text falls among all hashes, 0 .. 2**64 - 1."""
    return int.from_bytes(text_hash(*(table[name][row] for name in hashed))[:8], "big")


def _require_ids(names: Iterable[str], source: Source) -> None:
    bad = [name for name in names if not CLIENT_ID.fullmatch(name)]
    if bad:
        raise DataError(
            f"{_shown(source)}: file name {bad[0]!a} is no client id: allowed are 1 to 64 of A-Z a-z 0-9 _ -"
        )


def _local(place: str, wanted: Sequence[str]) -> dict[str, Table]:
    """Tables by file stem, sorted; wanted columns must be in each file that has rows."""
    return {stem: _read(path, wanted) for stem, path in _by_stem(place).items()}


def _by_stem(place: str) -> dict[str, Path]:
    """The files of a place by stem, sorted."""
    paths = [_in_package(place)] if place.startswith("package:") else _expand(place)
    found: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (path.stem, str(path))):
        if path.stem in found:
            raise DataError(
                f"{place}: two files are called {path.stem!a}: a client's file name must be its own"
            )
        found[path.stem] = path
    return found


def _expand(place: str) -> list[Path]:
    """The files a path or glob stands for."""
    try:
        path = Path(place).expanduser()
        exact = path.is_file()
        matches = [path] if exact else [Path(name) for name in glob(str(path), recursive=True)]
        matches = [match for match in matches if match.is_file()]
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a name too long, no home
        raise DataError(f"{place!a}: not a usable path ({error})") from None
    if not matches:
        raise DataError(f"{place!a}: no such file: give a path, a glob, package:NAME:PATH or hub:NAME:SPLIT")
    return matches


def _in_package(place: str) -> Path:
    """``package:NAME:PATH`` as a file; only the top-level name is looked up, which imports nothing."""
    _, name, path = [*place.split(":", 2), "", ""][:3]
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or not path:
        raise ConfigError(f"{place!a}: allowed is package:NAME:relative/path, NAME a top-level package")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{place!a}: package {name} is not installed: pip install it, or give a path")
    folder = Path(spec.submodule_search_locations[0]).resolve()
    file = _expand(str(folder / path))[0].resolve()
    if not file.is_relative_to(folder):
        raise DataError(f"{place!a}: leads outside the package {name}: give a path inside it")
    return file


def _read(path: Path, wanted: Sequence[str]) -> Table:
    """One local file; no bytes at all is a table without rows."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without suffix'}: allowed are {' '.join(READERS)}"
        )
    if not path.stat().st_size:
        return {name: [] for name in wanted}
    return _asked(reader(path, wanted), wanted, str(path))


def _asked(table: Table, columns: Sequence[str], place: str) -> Table:
    """The asked columns only.

    Raises:
        MissingColumn: one is missing; lists what is there and the nearest name.
    """
    for name in columns:
        if name not in table:
            near = difflib.get_close_matches(name, list(table), 1, 0.4)
            hint = f": did you mean {near[0]!a}?" if near else ""
            there = ", ".join(map(ascii, table)) or "none"
            raise MissingColumn(f"{place}: no column {name!a}; there are {there}{hint}", name)
    return {name: table[name] for name in columns}


def _from_memory(source: Any) -> Table:
    """Columns from a DataFrame, a mapping of columns, or anything indexable whose items are dicts."""
    if isinstance(source, Mapping) or hasattr(source, "columns"):
        names = source if isinstance(source, Mapping) else source.columns
        return {str(name): list(source[name]) for name in names}
    rows = [source[i] for i in range(len(source))]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _shown(source: Source) -> str:
    return ascii(str(source)) if isinstance(source, str | Path) else "the data given"
