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
"""Verdicts that are printed, those of seven groups; more are written to the file only."""


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
    result = write(found, out)
    if json:
        return print_json(result)
    show(found, result["verdicts"], out)


def show(groups: list["Group"], lines: list[str], out: Path) -> None:
    """Print the tables and verdicts of runs that :func:`write` has written into a folder."""
    for table in _tables(groups):
        print_table(table)
        say("")
    for line in lines if len(lines) <= _SHOWN else ():
        say(line)
    if len(lines) > _SHOWN:
        ahead = sum("is ahead of" in line for line in lines)
        say(f"{len(lines)} pairs, {ahead} of them with a winner: one line each in {out / 'compare.md'}")
    say(f"written to {out}: compare.md, compare.json, compare.png")


def write(groups: list["Group"], out: Path) -> dict[str, Any]:
    """Write ``compare.md``, ``compare.json`` and ``compare.png`` into a folder, replacing older ones.

    Returns:
        what is in ``compare.json``.

    Raises:
        ConfigError: the folder cannot be written.
    """
    import json as encoder

    from hofl.presets import cells
    from hofl.presets.beside import beside, published_values
    from hofl.report import compare as report
    from hofl.report.plots import plot
    from hofl.report.tables import clean, to_markdown

    result = report.to_json(groups)
    result["published"] = published_values(beside(groups, cells()))
    found = [f"- {clean(line)}" for line in result["verdicts"]]
    text = "\n".join([*map(to_markdown, _tables(groups)), *found, ""])
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.md").write_text(text, encoding="utf-8")
        (out / "compare.json").write_text(
            encoder.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        plot(groups, out / "compare.png")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder that can be written") from None
    return result


def _tables(groups: list["Group"]) -> list["Table"]:
    """The report's, and what papers say of the same cells, where there are some."""
    from hofl.presets import cells
    from hofl.presets.beside import beside, published_table
    from hofl.report import compare as report

    lines = beside(groups, cells())
    return [*report.tables(groups), *([published_table(lines)] if lines else [])]
