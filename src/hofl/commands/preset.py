# SPDX-License-Identifier: Apache-2.0
"""``hofl preset``: the configuration of one cell of a paper's table."""

from typing import Annotated

import typer

from hofl.commands.output import pass_on, print_json


def preset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As hofl list presets shows it.")],
    json: Annotated[
        bool, typer.Option("--json", help="Print the complete configuration as JSON and nothing else.")
    ] = False,
) -> None:
    """Print a preset's TOML, which starts with what the paper reports of it."""
    from hofl import presets

    found = presets.find(name)
    if json:
        return print_json(presets.config(found).model_dump(mode="json"))
    for line in presets.text(found).splitlines():
        pass_on(line)
