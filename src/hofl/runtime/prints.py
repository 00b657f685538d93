# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of what a run depends on, and facts without the paths of this machine."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hofl.errors import RecordError
from hofl.models.frozen import frozen_sha256
from hofl.tasks.base import Task

_HINTS = {
    "layout": "trainables: their names, shapes or blocks",
    "data": "data: its texts or points, labels, or who holds which",
    "model": "model: its frozen weights",
}


def fingerprints(task: Task) -> dict[str, str]:
    """SHA-256 each of the layout, the data (contents and partition) and the frozen weights."""
    contents = json.dumps(task.facts.get("data_sha256"), sort_keys=True)
    data = hashlib.sha256(f"{task.fingerprint};{contents}".encode()).hexdigest()
    layout = task.model.layout.fingerprint
    return {"layout": layout, "data": data, "model": frozen_sha256(task.model.module)}


def require_same(where: Path, stored: Mapping[str, str], found: Mapping[str, str], todo: str) -> None:
    """Hold what is here to what a run was started with.

    Args:
        where: the run folder.
        stored: of its manifest.
        found: of what is here; only these are compared.
        todo: the way out, in words.

    Raises:
        RecordError: one differs; the message names it.
    """
    for what, value in found.items():
        if stored.get(what) != value:
            raise RecordError(f"{where}: not what this run was started with is the {_HINTS[what]}; {todo}")


def portable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a task for the manifest: where a model was found here is left out, its source is in."""
    told = dict(facts)
    if isinstance(told.get("model"), Mapping):
        told["model"] = {name: value for name, value in told["model"].items() if name != "base"}
    shortened: dict[str, Any] = at_home(told)
    return shortened


def at_home(value: Any) -> Any:
    """``value`` with the home folder in each of its texts written ``~``."""
    if isinstance(value, str):
        return value.replace(str(Path.home()) + os.sep, "~" + os.sep)
    if isinstance(value, Mapping):
        return {name: at_home(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [at_home(item) for item in value]
    return value
