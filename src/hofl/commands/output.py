# SPDX-License-Identifier: Apache-2.0
"""What commands print: plain lines, tables, or JSON alone. Nothing printed can carry an escape code."""

import importlib.util
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from hofl.errors import ConfigError
from hofl.report.tables import Table, clean, fit, to_rich

_PIPE_WIDTH = 200


def console() -> Console:
    """Standard output as it is now; wide where it is no terminal, so that lines stay whole."""
    terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, highlight=False, width=None if terminal else _PIPE_WIDTH)


def say(text: object) -> None:
    """One line of plain text, control characters stripped."""
    sys.stdout.write(clean(text) + "\n")
    sys.stdout.flush()


def pass_on(line: str) -> None:
    """A line that another process has laid out: control characters stripped, columns kept."""
    sys.stdout.write("".join(c for c in line if c.isprintable()) + "\n")
    sys.stdout.flush()


def warn(text: object) -> None:
    """One line on standard error, control characters stripped."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()


def print_table(table: Table) -> None:
    """A table; columns too many for the terminal go into tables under each other."""
    screen = console()
    for part in fit(table, screen.width):
        if part.title:
            screen.print(Text(clean(part.title), style="italic"))
        screen.print(to_rich(part))


def print_json(value: Any) -> None:
    """Strict JSON, control characters escaped, and nothing else on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def require_flower(package: str = "flwr", extra: str = "flower") -> None:
    """Say what to install where a command needs a network engine that is not there.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"this needs {package}, which is not installed: pip install 'hofl[{extra}]'")


def quiet_libraries() -> None:
    """Ask the libraries that load models to keep their progress bars and notices to themselves."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
