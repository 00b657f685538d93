# SPDX-License-Identifier: Apache-2.0
"""``hofl compare``: tables, verdicts and curves of finished runs, and what papers report beside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hofl.commands.output import print_json, print_table, say
from hofl.errors import ConfigError

if TYPE_CHECKING:
    from hofl.report.groups import Group
    from hofl.report.tables import Table


_SHOWN = 21
"""Runs, and verdicts, that are printed one by one: those of seven groups; more are in the file only."""


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; those that differ in the seed only form a group.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Where the tables and the plot go.")] = Path("compare"),
) -> None:
    """Compare runs over seeds by examples and bytes: tables, a verdict for each pair, curves."""
    from hofl import read_run
    from hofl.report import groups

    found = groups.group([read_run(folder) for folder in runs])
    result, tables = write(found, out)
    if json:
        return print_json(result)
    show(tables, result["verdicts"], out)


def show(tables: list["Table"], lines: list[str], out: Path) -> None:
    """Print the tables and verdicts that :func:`write` has written into a folder."""
    from hofl.report.compare import RUNS

    for table in tables:
        if table.title != RUNS or len(table.rows) <= _SHOWN:
            print_table(table)
            say("")
    for line in lines if len(lines) <= _SHOWN else ():
        say(line)
    if len(lines) > _SHOWN:
        ahead = sum("is ahead of" in line for line in lines)
        say(f"{len(lines)} pairs, {ahead} of them with a winner: one line each in {out / 'compare.md'}")
    files = ("compare.md", "compare.json", "compare.png", "recovery.png")
    say(f"written to {out}: {', '.join(name for name in files if (out / name).is_file())}")


def write(groups: list["Group"], out: Path) -> tuple[dict[str, Any], list["Table"]]:
    """Write ``compare.md``, ``compare.json`` and ``compare.png`` into a folder, replacing older ones.

    Where a run has its frozen-bottom control beside it, ``recovery.png`` too.

    Returns:
        what is in ``compare.json``, and the tables of ``compare.md``.

    Raises:
        ConfigError: the folder cannot be written.
    """
    import json as encoder

    from hofl.presets import cells
    from hofl.presets.beside import beside, published_table, published_values
    from hofl.report import compare as report
    from hofl.report.plots import plot
    from hofl.report.recovery import plot_recovery
    from hofl.report.tables import clean, to_markdown

    result, lines = report.to_json(groups), beside(groups, cells())
    result["published"] = published_values(lines)
    tables = [*report.tables(groups), *([published_table(lines)] if lines else [])]
    found = [f"- {clean(line)}" for line in result["verdicts"]]
    text = "\n".join([*map(to_markdown, tables), *found, ""])
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.md").write_text(text, encoding="utf-8")
        (out / "compare.json").write_text(
            encoder.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        plot(groups, out / "compare.png")
        (out / "recovery.png").unlink(missing_ok=True)
        plot_recovery(groups, out / "recovery.png")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder that can be written") from None
    return result, tables
