# SPDX-License-Identifier: Apache-2.0
"""``hofl keys``: the certificates of a server and a key for each node, and which file goes where."""

from pathlib import Path
from typing import Annotated

import typer

from hofl.commands.output import print_json, print_table, require_flower, say
from hofl.report.tables import Table


def keys(
    folder: Annotated[Path, typer.Argument(help="Key folder, new or made by this command.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="DNS name or IP address of the server; may be repeated."),
    ] = None,
    node: Annotated[list[str] | None, typer.Option("--node", help="Id of a client; may be repeated.")] = None,
    days: Annotated[int, typer.Option("--days", help="Days a new server certificate is valid.")] = 365,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Make the keys of a fleet, or add nodes to them; nothing that is there is overwritten."""
    require_flower()
    from hofl.runtime.flower import keys as made

    written = made.create(folder, host or (), node or (), days)
    found = made.KeyFolder(folder)
    ends = made.check_certificate(found.server_certificate)
    names, machines = [str(path.relative_to(folder)) for path in written], _machines(found.clients)
    if json:
        until = f"{ends:%Y-%m-%dT%H:%M:%SZ}"
        return print_json(
            {"folder": str(folder), "written": names, "valid_until": until, "machines": machines}
        )
    for name in names or ["nothing, all of it was there"]:
        say(f"written: {name}")
    rows = tuple((machine, ", ".join(files)) for machine, files in machines.items())
    print_table(Table(f"what goes where, from {folder}", ("machine", "files"), rows, frozenset({0, 1})))
    say(f"the server's certificate ends on {ends:%Y-%m-%d}")
    say("ca.key signs new certificates and is needed nowhere else: keep it offline")
    say('in a node file: ca = "ca.crt" and key = "ID.key"; a private key must be of mode 600')


def _machines(clients: tuple[str, ...]) -> dict[str, list[str]]:
    """Each machine's files, by its name."""
    server = ["ca.crt", "server.crt", "server.key", "nodes/*.pub"]
    nodes = {f"node {client}": ["ca.crt", f"nodes/{client}.key"] for client in clients}
    return {"server": server, **nodes, "none (offline)": ["ca.key"]}
