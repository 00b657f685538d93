# SPDX-License-Identifier: Apache-2.0
"""``hofl compare``: tables, verdicts and curves of finished runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hofl.commands.output import print_json, print_table, say
from hofl.errors import ConfigError

if TYPE_CHECKING:
    from hofl.report.groups import Group


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
    from hofl.report import compare as report
    from hofl.report import groups

    found = groups.group([read_run(folder) for folder in runs])
    result = report.to_json(found)
    try:
        write(found, out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder that can be written") from None
    if json:
        return print_json(result)
    for table in report.tables(found):
        print_table(table)
        say("")
    lines = result["verdicts"]
    for line in lines if len(lines) <= _SHOWN else ():
        say(line)
    if len(lines) > _SHOWN:
        ahead = sum("is ahead of" in line for line in lines)
        say(f"{len(lines)} pairs, {ahead} of them with a winner: one line each in {out / 'compare.md'}")
    say(f"written to {out}: compare.md, compare.json, compare.png")


def write(groups: list["Group"], out: Path) -> None:
    """Write ``compare.md``, ``compare.json`` and ``compare.png`` into a folder, replacing older ones."""
    import json as encoder

    from hofl.report import compare as report
    from hofl.report.plots import plot
    from hofl.report.tables import clean, to_markdown

    out.mkdir(parents=True, exist_ok=True)
    tables = [to_markdown(table) for table in report.tables(groups)]
    found = [f"- {clean(line)}" for line in report.verdicts(groups)]
    (out / "compare.md").write_text("\n".join([*tables, *found, ""]), encoding="utf-8")
    (out / "compare.json").write_text(
        encoder.dumps(report.to_json(groups), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    plot(groups, out / "compare.png")
