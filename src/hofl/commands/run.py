# SPDX-License-Identifier: Apache-2.0
"""``hofl run``: train, or resume; plain lines for a log, a progress bar on a terminal."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from hofl.commands.arguments import Arguments, Out, Resume, given
from hofl.commands.output import console, print_json, print_table, quiet_libraries, require_flower, say, warn
from hofl.runtime.signals import interruptible
from hofl.runtime.start import refuse_folder

if TYPE_CHECKING:
    from hofl.config import Config
    from hofl.session import Session

Row = dict[str, Any]
ENGINES = ("local", "flower-simulation")
"""Where ``hofl run`` can run the clients."""


def run(
    arguments: Arguments = None,
    out: Out = None,
    resume: Resume = None,
    engine: Annotated[
        str, typer.Option("--engine", help="local, or flower-simulation (Ray processes on this machine).")
    ] = "local",
    fork: Annotated[
        Path | None,
        typer.Option("--fork", help="With --resume: leave that folder as it is and go on in this new one."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON at the end and nothing else.")
    ] = False,
) -> None:
    """Run a configuration, resume a run, or go on from one with other settings."""
    if engine not in ENGINES:
        raise click.BadParameter(f"'{engine}': use {' or '.join(ENGINES)}", param_hint="--engine")
    if fork and (resume is None or engine != "local"):
        raise click.UsageError("--fork needs --resume, the run to go on from, and the local engine")
    file, overrides, config, where = given(arguments, out, resume)
    if fork:
        refuse_folder(fork, False)
    quiet_libraries()
    if engine != "local":
        return _simulate(config, where, resume is not None, json)
    with interruptible():
        from hofl.config import placed
        from hofl.session import prepare  # only now PyTorch: what is wrong above was said at once

        if config.model.source and not json:
            say(f"loading the data and model {config.model.source} ...")
        with placed(file, overrides):
            session = prepare(config)
        if fork:
            session.fork(where, fork)
        train(session, fork or where, resume is not None, json)


def _simulate(config: "Config", where: Path, resume: bool, json: bool) -> None:
    """The same run on Flower's simulation."""
    require_flower("ray", "simulation")
    from hofl.errors import HoflError, RunFailed
    from hofl.runtime.flower.serverapp import Order
    from hofl.runtime.flower.simulate import simulate

    code, message = simulate(Order(config, where, resume, kind="simulation", json=json))
    if code:
        raise (HoflError if code == 2 else RunFailed)(message)


def train(
    session: "Session",
    where: Path,
    resume: bool,
    json: bool = False,
    opened: Callable[[], None] = lambda: None,
) -> None:
    """Run to the end and show what a user sees.

    Args:
        session: what to run.
        where: the run folder.
        resume: go on in it.
        json: show the summary as JSON and nothing else.
        opened: called once the run folder is there.

    Raises:
        HoflError, RunFailed: see :meth:`hofl.session.Session.rows`.
    """
    from hofl import read_run
    from hofl.commands.describe import describe, result

    rows = session.rows(where, resume=resume, warn=_warning)  # refuses a folder of another run at once
    opened()
    done = "before round 0"
    try:
        for part in () if json else describe(session):
            say(part) if isinstance(part, str) else print_table(part)
        for row in _shown(rows, session.config.rounds, json):
            done = f"after round {row['round']}"
    except KeyboardInterrupt:
        warn(f"hofl: interrupted {done}; saved; resume with: hofl run --resume {where}")
        raise typer.Exit(130) from None
    summary, final = read_run(where).summary or {}, str(where / "final.safetensors")
    if json:
        return print_json({**summary, "folder": str(where), "final_model": final})
    print_table(result(summary))
    say(f"final model: {final}")


def _warning(text: str) -> None:
    warn(f"warning: {text}")


def _shown(rows: Iterator[Row], rounds: int, quiet: bool) -> Iterator[Row]:
    """The rows, each shown as it comes: a bar that fills on a terminal, else a line an evaluation."""
    if quiet or not sys.stdout.isatty():
        for row in rows:
            _tell(row, rounds, _nothing if quiet else say)
            yield row
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    columns = (TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console()) as progress:
        bar = progress.add_task("", total=rounds)
        for row in rows:
            _tell(row, rounds, lambda line: progress.console.print(Text(line)))
            progress.update(bar, completed=row["round"])
            yield row


def _nothing(line: str) -> None:
    """Show nothing: only JSON goes to standard output."""


def _tell(row: Row, rounds: int, show: Callable[[str], None]) -> None:
    """Failures of clients always, and a line where the row was evaluated."""
    from hofl.commands.describe import line
    from hofl.report.tables import clean

    for failure in row["failures"]:
        warn(f"round {row['round']}: client {failure['client']}: {failure['why']}")
    if row["metrics"] is not None:
        show(clean(line(row, rounds)))
