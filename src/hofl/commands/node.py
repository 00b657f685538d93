# SPDX-License-Identifier: Apache-2.0
"""``hofl node``: take part in runs with this machine's data, and stay."""

from pathlib import Path
from typing import Annotated

import click
import typer

from hofl.commands.output import require_flower, say


def node(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="NODE [section.key=value ...]", help="A node's TOML file, then overrides."),
    ],
    client_id: Annotated[
        str | None, typer.Option("--client-id", help="Who this client is, if not as the file says.")
    ] = None,
) -> None:
    """Take part in a server's runs; started again whenever it dies, until you stop it."""
    require_flower()
    from hofl.runtime.flower.keeper import keep
    from hofl.runtime.flower.node_config import load_node
    from hofl.runtime.flower.processes import environment

    if "=" in arguments[0]:
        raise click.UsageError("NODE is missing: give a node's .toml file")
    config = load_node(arguments[0], arguments[1:], client_id)
    folder, host = Path(config.folder), config.server.rpartition(":")[0].strip("[]")
    say(f"node {config.client} of {config.server} ({'TLS' if config.secure else 'without TLS'})")
    code = keep(config.model_dump_json(), folder, environment(folder / "flwr", host), say)
    if code:
        raise typer.Exit(code)
