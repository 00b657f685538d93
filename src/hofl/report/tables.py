# SPDX-License-Identifier: Apache-2.0
"""Tables for people: one set of cells, shown in a terminal or written as Markdown."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

GAP = 2
"""Blanks between two columns in a terminal."""


@dataclass(frozen=True)
class Table:
    """A titled table of text cells; ``columns`` after the first are aligned right unless ``left``.

    ``widths`` are those of the columns in a terminal; None leaves them to rich.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})
    widths: tuple[int, ...] | None = None


def clean(text: object) -> str:
    """One line without control or format characters: escape codes and bidi overrides cannot act."""
    line = " ".join(str(text).split())
    return "".join(c for c in line if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co"))


def to_rich(table: Table) -> RichTable:
    """For a terminal, without the title. Cells are plain text: no markup in them is obeyed."""
    shown = RichTable(box=None, pad_edge=False)
    shown.show_header = any(table.columns)
    for place, column in enumerate(table.columns):
        shown.add_column(
            Text(column),
            justify="left" if place in table.left else "right",
            overflow="fold",
            width=table.widths[place] if table.widths else None,
        )
    for row in table.rows:
        shown.add_row(*(Text(clean(cell)) for cell in row))
    return shown


def fit(table: Table, width: int) -> list[Table]:
    """The same table in tables that a terminal can show: headers wrap first, numbers never.

    Where that is not enough the columns are dealt to several tables under each other; each has the first
    column, and nothing is dropped.

    Args:
        table: any.
        width: of the terminal, in cells.
    """
    columns = list(zip(table.columns, *table.rows, strict=True))
    if sum(max(map(cell_len, cells)) + GAP for cells in columns) - GAP <= width:
        return [table]
    first = min(max(map(cell_len, columns[0])), max(1, width // 3))
    room = width - first - GAP
    least = [_least(cells, i in table.left, max(1, room)) for i, cells in enumerate(columns)]
    parts, used = [[0]], width  # the second column starts a part
    for place in range(1, len(columns)):
        used += least[place] + GAP
        if used > width:
            parts.append([0])
            used = first + GAP + least[place]
        parts[-1].append(place)
    shown = [_part(table, part, [first, *(least[i] for i in part[1:])], width) for part in parts[1:]]
    return [shown[0], *(replace(part, title="") for part in shown[1:])] if shown else [table]


def _least(cells: Sequence[str], wraps: bool, most: int) -> int:
    """The narrowest good width of a column: headers, and text where it ``wraps``, break at blanks."""
    header, *body = cells
    pieces = [word for text in ((header, *body) if wraps else (header,)) for word in text.split()]
    return min(most, max(map(cell_len, [*pieces, *([] if wraps else body)]), default=1) or 1)


def _part(table: Table, places: Sequence[int], widths: list[int], width: int) -> Table:
    """Some columns of a table; what is left of the width goes to text first, then to headers."""
    left = width - sum(widths) - GAP * (len(widths) - 1)
    for k in sorted(range(len(places)), key=lambda k: places[k] not in table.left):
        cells = [table.columns[places[k]], *(row[places[k]] for row in table.rows)]
        more = min(left, max(0, max(map(cell_len, cells)) - widths[k]))
        widths[k] += more
        left -= more
    aligned = frozenset(k for k, place in enumerate(places) if place in table.left)
    rows = tuple(tuple(row[i] for i in places) for row in table.rows)
    return Table(table.title, tuple(table.columns[i] for i in places), rows, aligned, tuple(widths))


def to_markdown(table: Table) -> str:
    """A GitHub table under its title; pipes and angle brackets in cells are escaped."""
    rule = ["---" if place in table.left else "---:" for place in range(len(table.columns))]
    body = [_row(table.columns), f"|{'|'.join(rule)}|", *(_row(row) for row in table.rows)]
    return "\n".join([f"### {clean(table.title)}", "", *body, ""])


def _row(cells: Sequence[str]) -> str:
    safe = (clean(c).replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;") for c in cells)
    return f"| {' | '.join(safe)} |"


def number(value: float | None, digits: int = 3) -> str:
    """``0.643``, or a dash where there is nothing to show."""
    return "–" if value is None else f"{value:.{digits}f}"


def spread(mean: float | None, sd: float | None) -> str:
    """``0.643 ± 0.231``; without the ± for a single value."""
    return number(mean) if sd is None else f"{number(mean)} ± {number(sd)}"


def count(value: float | None) -> str:
    """``12,800``, or a dash where there is nothing to count."""
    return "–" if value is None else f"{value:,.0f}"


def size(total: float | None) -> str:
    """Bytes in binary units: ``1.5 MiB``."""
    if total is None:
        return "–"
    value, units = float(total), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def seconds(value: float | None) -> str:
    """``0.42 s``, ``12 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.2f} s"
    whole = round(value)
    if whole < 100:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60} s" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"
    )
