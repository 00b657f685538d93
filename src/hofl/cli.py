# SPDX-License-Identifier: Apache-2.0
"""The ``hofl`` command: exit 0 done, 1 the run failed, 2 bad input, 130 interrupted; errors are one line."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click
import typer

from hofl.commands.check import check
from hofl.commands.compare import compare
from hofl.commands.evaluate import evaluate
from hofl.commands.export import export
from hofl.commands.keys import keys
from hofl.commands.listing import list_
from hofl.commands.node import node
from hofl.commands.plan import plan
from hofl.commands.preset import preset
from hofl.commands.profile import profile
from hofl.commands.replay import replay
from hofl.commands.run import run
from hofl.commands.sampling import sampling
from hofl.commands.server import server
from hofl.commands.sweep import sweep
from hofl.commands.theory import theory
from hofl.errors import HoflError, RunFailed
from hofl.report.tables import clean

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False
)
app.command("run")(run)
app.command("check")(check)
app.command("sweep")(sweep)
app.command("compare")(compare)
app.command("replay")(replay)
app.command("evaluate")(evaluate)
app.command("export")(export)
app.command("plan")(plan)
app.command("profile")(profile)
app.command("sampling")(sampling)
app.command("theory")(theory)
app.command("server")(server)
app.command("node")(node)
app.command("keys")(keys)
app.command("list")(list_)
app.command("preset")(preset)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    """Hybrid-order federated fine-tuning: probes below the boundary, backpropagation above it."""
    if version:
        from hofl import __version__

        typer.echo(__version__)
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process.

    Args:
        arguments: what follows ``hofl``; the process's own if None.
    """
    # OpenMP threads that spin while they wait made a step 12 times slower beside one busy process on two
    # cores; threads that sleep cost nothing measurable on an idle machine. Read when PyTorch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(_code(list(sys.argv[1:] if arguments is None else arguments)))


def _code(arguments: list[str]) -> int:
    try:
        code = app(args=arguments, prog_name="hofl", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _fail(2, f"{error.format_message()}{_hint(error)}")
    except HoflError as error:
        return _fail(2, str(error))
    except RunFailed as error:
        return _fail(1, str(error))
    except (KeyboardInterrupt, click.Abort):
        return _fail(130, "interrupted")
    except BrokenPipeError:  # the reader of a pipe has left: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _bug(error)
    return code if isinstance(code, int) else 0


def _bug(error: Exception) -> int:
    """What is no user's fault: one line that says where, the traceback only for who asks."""
    if os.environ.get("HOFL_TRACEBACK"):
        traceback.print_exc()
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{frame.filename.rpartition(os.sep)[2]}:{frame.lineno}"
    message = f"unexpected {type(error).__name__} at {place}: {error}"
    return _fail(1, f"{message[:1000]} (a defect of hofl; HOFL_TRACEBACK=1 shows more)")


def _hint(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context else ""


def _fail(code: int, message: str) -> int:
    click.echo(f"hofl: {clean(message)}", err=True)
    return code
