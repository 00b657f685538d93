# SPDX-License-Identifier: Apache-2.0
"""A model folder keeps to itself: no name that it gives and no link in it leads to a file elsewhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hofl.errors import ModelError

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
"""What a file of weights may be called: one plain name, no path."""
READ = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Suffixes of the files that are read from a model folder."""


def refuse_escapes(folder: Path) -> None:
    """Refuse a folder that would have a file read from outside of it; nothing but its JSON is opened.

    The hub's own cache is the exception: there a snapshot is made of links into the blobs beside it.

    Raises:
        ModelError: an index or ``config.json`` names a file by a path, or a link leads out of the folder.
    """
    home = folder.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    for path in sorted(folder.iterdir()):
        if path.suffix in READ and not any(path.resolve().is_relative_to(allowed) for allowed in homes):
            raise ModelError(
                f"{path} is a link out of its folder: hofl follows none; put the file itself there"
            )
    for path, name in _named(folder):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ModelError(
                f"{path} names the weights {str(name)[:80]!a}: allowed are plain file names, no path"
            )


def _named(folder: Path) -> Iterator[tuple[Path, Any]]:
    """The files of weights that indexes and the configuration name, each with who names it."""
    for path in (folder / "config.json", *sorted(folder.glob("*.index.json"))):
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if isinstance(settings, dict) and "transformers_weights" in settings:
            yield path, settings["transformers_weights"]
        shards = settings.get("weight_map") if isinstance(settings, dict) else None
        yield from ((path, name) for name in (shards.values() if isinstance(shards, dict) else ()))
