# SPDX-License-Identifier: Apache-2.0
"""What commands that start a run or go on with one are given: a configuration, overrides and a folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import click
import typer

if TYPE_CHECKING:
    from hofl.config import Config

CONFIG = typer.Argument(
    metavar="CONFIG [section.key=value ...]", help="A TOML file, then settings that override it."
)
Required = Annotated[list[str], CONFIG]
Arguments = Annotated[list[str] | None, CONFIG]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Run folder, new or empty [default: runs/<task>-<algorithm>-<seed>]."),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Go on in this run folder; CONFIG may be left out.")
]


class Given(NamedTuple):
    """A run that was asked for.

    Attributes:
        file: the configuration's.
        overrides: of its settings.
        config: both, checked.
        where: the run folder; a run may start, or go on, in it.
    """

    file: str
    overrides: list[str]
    config: "Config"
    where: Path


def given(arguments: list[str] | None, out: Path | None, resume: Path | None) -> Given:
    """Read and check what was asked for, without PyTorch.

    Raises:
        UsageError: it contradicts itself, or names no configuration.
        ConfigError: the configuration is wrong, or the folder cannot be used.
    """
    from hofl.config import load
    from hofl.runtime.start import refuse_folder

    file, overrides = named(arguments or [], resume)
    config = load(file, overrides)
    if resume and out and resume.resolve() != out.resolve():
        raise click.UsageError("--out and --resume name two folders; give one of them")
    where = resume or out or Path("runs") / f"{config.task.name}-{config.algorithm}-{config.seed}"
    refuse_folder(where, resume is not None)
    return Given(file, overrides, config, where)


def named(arguments: list[str], resume: Path | None = None) -> tuple[str, list[str]]:
    """The configuration's file, a resumed run's own if none is named, and the overrides.

    Raises:
        UsageError: neither is named. ConfigError: there is nothing to resume.
    """
    from hofl.runtime.start import CONFIG as STORED
    from hofl.runtime.start import refuse_folder

    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    if resume is None:
        raise click.UsageError("CONFIG is missing: give a .toml file, or --resume a run folder")
    refuse_folder(resume, True)
    return str(resume / STORED), arguments
