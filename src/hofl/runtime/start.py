# SPDX-License-Identifier: Apache-2.0
"""Whether a run may start, or go on, in a folder; without PyTorch, so that it is said at once."""

from pathlib import Path

from hofl.errors import ConfigError

CONFIG = "config.toml"
"""The first file of a run folder: with it there is something to resume."""

PARTIAL = ".partial"
"""End of the name of a file that a kill left half written."""


def refuse_folder(where: Path, resume: bool) -> None:
    """Refuse a folder in which a run cannot start, or go on.

    Half-written files count as nothing, so whatever a kill leaves, a new run or a resume accepts it.

    Raises:
        ConfigError: a new run where there is something, or nothing to resume.
    """
    if resume and not (where / CONFIG).is_file():
        raise ConfigError(f"{where}: nothing to resume, it has no {CONFIG}; start it without --resume")
    if resume or not where.exists():
        return
    if not where.is_dir() or any(file.suffix != PARTIAL for file in where.iterdir()):
        raise ConfigError(f"{where} exists and is not empty; give another --out, or --resume it")
