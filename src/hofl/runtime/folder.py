# SPDX-License-Identifier: Apache-2.0
"""The run folder: who may start or resume in it, and what its manifest says."""

import importlib.metadata
import json
import os
import platform
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hofl.core.directions import RNG_ID
from hofl.errors import ConfigError, RecordError
from hofl.runtime import files
from hofl.runtime.rows import finite
from hofl.tasks.base import Task

CONFIG, MANIFEST, ROWS, SUMMARY = "config.toml", "manifest.json", "rounds.jsonl", "summary.json"
LEDGER, CHECKPOINT = "ledger.sqlite", "checkpoint"
INITIAL, FINAL = "initial.safetensors", "final.safetensors"

PACKAGES = ("hofl", "numpy", "torch", "transformers", "peft", "safetensors")
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Settings:
    """What a run is, beside its task and algorithm.

    Attributes:
        algorithm: its name.
        model: where the model came from.
        seed: the run's, for the record; the task and the draw have it already.
        rounds: T.
        config: the resolved configuration as TOML; a resume is held to it.
        mode: what the runtime is, in words, such as ``local.IN_PROCESS``.
        leaves_device: what a client sends, in words, for the manifest.
        labels_at: where labels live.
        dtype: of the backbone.
        evaluate_every: rounds between evaluations; round 0 and the last are always evaluated.
        radius: of the probes where there is one, for the warning.
        ledger: "full", or "scalars" to leave out weights (then no replay).
        attempts: how often a round below the quorum is tried, each time with a fresh cohort.
        divergence: a round's loss above this many times the loss before training ends the run.
    """

    algorithm: str
    model: str
    seed: int
    rounds: int
    config: str
    mode: str
    leaves_device: tuple[str, ...]
    labels_at: str = "clients"
    dtype: str = "float32"
    evaluate_every: int = 10
    radius: float | None = None
    ledger: str = "full"
    attempts: int = 3
    divergence: float = 10.0


def open_folder(folder: Path, config: str, resume: bool) -> None:
    """Make the folder, or check that this configuration may go on in it.

    On resume ``rounds`` and all of ``[run]`` but its ledger may differ: the rest decides the result.

    Raises:
        ConfigError: a new run in a folder that holds anything, nothing to resume, or another configuration.
    """
    stored = folder / CONFIG
    if resume:
        if not stored.is_file():
            raise ConfigError(f"{folder}: nothing to resume, it has no {CONFIG}; start it without --resume")
        _require_same(folder, stored.read_text(encoding="utf-8"), config)
        return
    if folder.exists() and (not folder.is_dir() or any(f.suffix != ".partial" for f in folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; give another --out, or --resume it")
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)


def write_config(folder: Path, config: str) -> None:
    """Replace the stored configuration."""
    files.replace(folder / CONFIG, config.encode())


def _require_same(folder: Path, stored: str, given: str) -> None:
    try:
        old, new = dict(_leaves(tomllib.loads(stored))), dict(_leaves(tomllib.loads(given)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error
    for key in [*old, *(k for k in new if k not in old)]:
        free = key == "rounds" or (key.startswith("run.") and key != "run.ledger")
        was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was != now and not free:
            raise ConfigError(
                f"{folder}: {key} = {now!r} was given, this run has {was!r}; only rounds and [run] may "
                "change on resume: start a new folder"
            )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def write_manifest(folder: Path, settings: Settings, task: Task, first: int) -> None:
    """Write the manifest, or on resume check its fingerprints and add this session to it.

    Args:
        folder: the run folder.
        settings: the run's.
        task: its model and data are fingerprinted, its facts included.
        first: the first round of this session.

    Raises:
        RecordError: the manifest is damaged, or the run was started on another layout or other data.
    """
    path = folder / MANIFEST
    prints = {"layout": task.model.layout.fingerprint, "data": task.fingerprint}
    sessions = _earlier_sessions(path, prints) if path.exists() else []
    session = {"first_round": first, "versions": versions(), "hardware": hardware(task.model.device)}
    told = ("mode", "algorithm", "model", "dtype", "seed", "labels_at", "leaves_device")
    facts = {name: getattr(settings, name) for name in told}
    facts |= {"task": task.name, "fingerprints": prints, "rng": RNG_ID, "facts": finite(task.facts)}
    write_json(
        path, {**facts, **{k: session[k] for k in ("versions", "hardware")}, "sessions": [*sessions, session]}
    )


def _earlier_sessions(path: Path, prints: Mapping[str, str]) -> list[Any]:
    try:
        old = json.loads(path.read_bytes())
        stored, sessions = old["fingerprints"], list(old["sessions"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: damaged: {error!r}") from error
    for what, value in prints.items():
        if stored.get(what) != value:
            raise RecordError(
                f"{path.parent}: the {what} is not what this run was started with; start a new folder"
            )
    return sessions


def versions() -> dict[str, str]:
    """Version of Python and of every package that can change a number."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """Platform, processor and accelerator; no host, user or path names."""
    cuda = device.type == "cuda"
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if cuda else None,
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` by strict, indented JSON."""
    files.replace(path, json.dumps(value, allow_nan=False, indent=2).encode() + b"\n")
