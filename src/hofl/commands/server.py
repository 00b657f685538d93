# SPDX-License-Identifier: Apache-2.0
"""``hofl server``: serve a run to nodes on other machines, and keep it going when a part dies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from hofl.commands.arguments import Arguments, Out, Resume, given
from hofl.commands.output import pass_on, require_flower, warn

if TYPE_CHECKING:
    from hofl.runtime.flower.keys import KeyFolder


def server(
    arguments: Arguments = None,
    out: Out = None,
    resume: Resume = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", help="Key folder of hofl keys: TLS, and nodes known by key.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all, with --keys only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 9092,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="What the server itself keeps [default: <run folder>-server]."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Neither TLS nor keys; on this machine alone.")
    ] = False,
) -> None:
    """Serve a run to nodes, or go on with it."""
    from hofl.config import dump

    if keys and insecure:
        raise click.UsageError("--keys and --insecure contradict each other; give one of them")
    _, _, config, where = given(arguments, out, resume)
    require_flower()
    from hofl.runtime.flower.job import Job
    from hofl.runtime.flower.processes import require_free
    from hofl.runtime.flower.superlink import Site, require_safe
    from hofl.runtime.flower.supervisor import serve

    require_safe(host, keys is not None, insecure)
    require_free(host, port)
    place = state or where.parent / f"{where.name}-server"
    site = Site(place, host, port, _checked(keys) if keys else None)
    code = serve(Job(site, place / "config.toml", where, resume is not None), dump(config), pass_on, warn)
    if code:
        raise typer.Exit(code)


def _checked(folder: Path) -> "KeyFolder":
    """The key folder, once all that the server needs is there and good."""
    from hofl.runtime.flower.keys import public_keys, read_folder

    keys = read_folder(folder)
    public_keys(folder)
    return keys
