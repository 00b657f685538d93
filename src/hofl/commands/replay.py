# SPDX-License-Identifier: Apache-2.0
"""``hofl replay``: rebuild a round's state from the ledger, without clients, data or model."""

from pathlib import Path
from typing import Annotated

import typer

from hofl.commands.output import print_json, print_table
from hofl.report.tables import Table


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    round: Annotated[int, typer.Option("--round", help="The round whose state to rebuild; 0 is the start.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Rebuild a round's state from the seeds and scalars in the ledger and compare its hash."""
    from hofl.session import rebuild

    found = rebuild(run, round)
    if json:
        return print_json(found)
    rows = tuple((name.replace("_", " "), str(value)) for name, value in found.items())
    print_table(Table(f"replay of {run}, round {round}", ("", ""), rows, frozenset({0, 1})))
