# SPDX-License-Identifier: Apache-2.0
"""``hofl compare``: tables, verdicts and curves of finished runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hofl.commands.output import print_json, print_table, say
from hofl.errors import ConfigError

if TYPE_CHECKING:
    from hofl.report.compare import Group


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; those that differ in the seed only form a group.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Where the tables and the plot go.")] = Path("compare"),
) -> None:
    """Compare runs over seeds: tables, a verdict for each pair, curves."""
    from hofl import read_run
    from hofl.report import compare as report

    groups = report.group([read_run(folder) for folder in runs])
    result = report.to_json(groups)
    try:
        write(groups, out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder that can be written") from None
    if json:
        return print_json(result)
    for table in (report.summary_table(groups), report.seed_table(groups)):
        print_table(table)
        say("")
    for line in result["verdicts"]:
        say(line)
    say(f"written to {out}: compare.md, compare.json, compare.png")


def write(groups: list["Group"], out: Path) -> None:
    """Write ``compare.md``, ``compare.json`` and ``compare.png`` into a folder, replacing older ones."""
    import json as encoder

    from hofl.report import compare as report
    from hofl.report.plots import plot
    from hofl.report.tables import clean, to_markdown

    out.mkdir(parents=True, exist_ok=True)
    tables = [to_markdown(report.summary_table(groups)), to_markdown(report.seed_table(groups))]
    found = [f"- {clean(line)}" for line in report.verdicts(groups)]
    (out / "compare.md").write_text("\n".join([*tables, *found, ""]), encoding="utf-8")
    (out / "compare.json").write_text(
        encoder.dumps(report.to_json(groups), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    plot(groups, out / "compare.png")
