# SPDX-License-Identifier: Apache-2.0
"""``hofl profile``: the memory of a run's participations, measured beside the plan."""

from typing import Annotated, Any

import typer

from hofl.commands.output import print_json, print_table, quiet_libraries, say
from hofl.commands.plan import progress
from hofl.report.tables import Table, size


def profile(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="CONFIG [section.key=value ...]", help="A run's TOML file, then overrides."),
    ],
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Processes a boundary; the most counts.")
    ] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure a complete participation of each boundary in isolated processes, beside the plan."""
    from hofl.commands.arguments import named
    from hofl.config import load

    file, overrides = named(arguments)
    config = load(file, overrides)
    quiet_libraries()
    from hofl.memory.profile import profile as measure

    with progress("measuring", json) as tell:
        rows = measure(config, file, repeats, tell)
    if json:
        return print_json({"config": file, "rows": rows})
    print_table(table(rows))
    for line in reading(rows, repeats):
        say(line)


def table(rows: list[dict[str, Any]]) -> Table:
    """Plan and measurement side by side."""
    measured = ("participation", "batches seen", "attention", "plan", "measured", "plan / measured")
    columns = (*measured, "process", "before it", "budget needs")
    cells = tuple(
        (
            row["label"],
            f"{row['batch']} x {row['length']}" if row["length"] else str(row["batch"]),
            row["attention"],
            size(row["planned_storages"]),
            size(row["tracked_bytes"]),
            f"{row['ratio']:.3f}",
            size(row["rss_bytes"]),
            size(row["idle_bytes"]),
            size(row["planned_at_most"]),
        )
        for row in rows
    )
    return Table("memory of one participation", columns, cells, frozenset({0, 1, 2}))


def reading(rows: list[dict[str, Any]], repeats: int) -> list[str]:
    """What the columns are."""
    on_cpu = rows[0]["device"] == "cpu"
    counted = "the storages that it made, without NumPy's arrays" if on_cpu else "CUDA's allocator"
    kind = "resident set" if on_cpu else "allocated memory"
    many = f"the most of {repeats} processes" if repeats > 1 else "one process"
    return [
        f"plan and measured: the model and {counted}, in one complete participation; {many}",
        f"process: the peak of its {kind}; before it: the same while the model was loaded and checked",
        "budget needs: the plan of the run's largest batch with all its arrays, before any margin",
    ]
