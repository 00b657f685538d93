# SPDX-License-Identifier: Apache-2.0
"""Hybrid-order federated fine-tuning: zeroth-order probes below the boundary, backpropagation above it.

import hofl

config = hofl.load_config("configs/synthetic/ho_fl.toml", "rounds=10")
summary = hofl.run(config, "runs/first")
print(summary["metric"], hofl.read_run("runs/first").rows[-1]["zo_signal"])
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hofl.config import Config
    from hofl.report.rows import RunData

__all__ = ["__version__", "load_config", "read_run", "run"]
__version__ = "0.1.0"


def load_config(path: str | Path, *overrides: str) -> "Config":
    """A configuration from a TOML file and ``section.key=value`` overrides.

    Raises:
        hofl.errors.ConfigError: one line with the place, the key, what was given and what is allowed.
    """
    from hofl.config import load

    return load(path, overrides)


def run(config: "Config", out: str | Path, *, resume: bool = False) -> dict[str, Any]:
    """Run a configuration to its end and return what ``summary.json`` says.

    Args:
        config: from :func:`load_config`.
        out: the run folder: new or empty, or one to resume.
        resume: go on in ``out``; only ``rounds`` and ``[run]`` may have changed.

    Raises:
        hofl.errors.HoflError: bad input. hofl.errors.RunFailed: diverged, or too few clients.
    """
    from hofl.session import run_to_end

    return run_to_end(config, Path(out), resume)


def read_run(folder: str | Path) -> "RunData":
    """Configuration, manifest, rows and summary of a run folder.

    Raises:
        hofl.errors.HoflError: it is no run folder, or a file in it is damaged.
    """
    from hofl.report.rows import read_run as read
    from hofl.runtime.rows import read_rows

    return read(folder, read_rows)
