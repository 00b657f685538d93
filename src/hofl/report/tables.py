# SPDX-License-Identifier: Apache-2.0
"""Tables for people: one set of cells, shown in a terminal or written as Markdown."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """A titled table of text cells; ``columns`` after the first are aligned right unless ``left``."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})


def clean(text: object) -> str:
    """One line without control or format characters: escape codes and bidi overrides cannot act."""
    line = " ".join(str(text).split())
    return "".join(c for c in line if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co"))


def to_rich(table: Table) -> RichTable:
    """For a terminal. Cells are plain text: no markup in them is obeyed."""
    shown = RichTable(title=clean(table.title) or None, title_justify="left", box=None, pad_edge=False)
    shown.show_header = any(table.columns)
    for place, column in enumerate(table.columns):
        shown.add_column(Text(column), justify="left" if place in table.left else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(clean(cell)) for cell in row))
    return shown


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


def size(count: float | None) -> str:
    """Bytes in binary units: ``1.5 MiB``."""
    if count is None:
        return "–"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
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
