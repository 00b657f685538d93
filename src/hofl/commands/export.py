# SPDX-License-Identifier: Apache-2.0
"""``hofl export``: a run's final model as a folder that PEFT or Transformers loads."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hofl.commands.output import print_json, quiet_libraries, say


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder [default: RUN/adapter, RUN/merged or RUN/model].")
    ] = None,
    form: Annotated[
        Literal["peft", "merged"] | None,
        typer.Option("--format", help="peft, or merged [default: peft where there are adapters]."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Write the final model as a PEFT adapter or merged, reload it in a fresh process, compare the logits."""
    quiet_libraries()
    from hofl.exporting import export_run

    found = export_run(run, out, form)
    if json:
        return print_json(found)
    say(f"verified in a fresh process: largest difference of the logits {found['difference']:.3g}")
    say(f"{found['kind']} model: {found['folder']}")
    if found["kind"] == "peft":
        say(f"it adapts {found['base']}, whose frozen weights have SHA-256 {found['base_sha256']}")
