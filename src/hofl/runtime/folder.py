# SPDX-License-Identifier: Apache-2.0
"""The run folder: who may start or resume in it, and what its manifest says."""

import importlib.metadata
import json
import os
import platform
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hofl.core.directions import RNG_ID
from hofl.errors import ConfigError, RecordError
from hofl.runtime import files, prints
from hofl.runtime.rows import finite
from hofl.runtime.start import CONFIG as CONFIG
from hofl.runtime.start import refuse_folder
from hofl.tasks.base import Task

MANIFEST, ROWS, SUMMARY = "manifest.json", "rounds.jsonl", "summary.json"
LEDGER, CHECKPOINT = "ledger.sqlite", "checkpoint"
INITIAL, FINAL = "initial.safetensors", "final.safetensors"

PACKAGES = ("hofl", "numpy", "torch", "transformers", "peft", "safetensors")
_ABSENT = "(absent)"
_FREE = ("rounds", "run.", "fleet.")


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
        top_at: where the top lives, and of the server's how many there are.
        dtype: of the backbone.
        evaluate_every: rounds between evaluations; round 0 and the last are always evaluated.
        radius: of the probes where there is one, for the warning.
        ledger: "full", or "scalars" to leave out weights (then no replay).
        attempts: how often a round below the quorum is tried, each time with a fresh cohort.
        divergence: a round's loss above this many times the loss before training, or a guess's loss
            if that is more, ends the run.
    """

    algorithm: str
    model: str
    seed: int
    rounds: int
    config: str
    mode: str
    leaves_device: tuple[str, ...]
    labels_at: str = "clients"
    top_at: str = "clients"
    dtype: str = "float32"
    evaluate_every: int = 10
    radius: float | None = None
    ledger: str = "full"
    attempts: int = 3
    divergence: float = 10.0


def open_folder(folder: Path, config: str, resume: bool) -> None:
    """Make the folder, or check that this configuration may go on in it.

    On resume ``rounds``, ``[fleet]`` and all of ``[run]`` but its ledger may differ: the rest decides the
    result.

    Raises:
        ConfigError: a new run in a folder that holds anything, nothing to resume, or another configuration.
    """
    refuse_folder(folder, resume)
    if resume:
        _require_same(folder, (folder / CONFIG).read_text(encoding="utf-8"), config)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)


def write_config(folder: Path, config: str) -> None:
    """Replace the stored configuration."""
    files.replace(folder / CONFIG, config.encode())


def _require_same(folder: Path, stored: str, given: str) -> None:
    for key, was, now in changes(folder, stored, given):
        if not is_free(key):
            raise ConfigError(
                f"{folder}: {key} = {now!r} was given, this run has {was!r}; only rounds, [fleet] and [run] "
                "may change on resume: start a new folder, or go on in one with --fork"
            )


def is_free(key: str) -> bool:
    """Whether a resume may change a setting."""
    return key.startswith(_FREE) and key != "run.ledger"


def changes(folder: Path, stored: str, given: str) -> Iterator[tuple[str, Any, Any]]:
    """Every setting in which two configurations differ: its key, the stored value and the given one.

    Raises:
        ConfigError: the stored one is no TOML.
    """
    try:
        old, new = dict(_leaves(tomllib.loads(stored))), dict(_leaves(tomllib.loads(given)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error
    for key in [*old, *(k for k in new if k not in old)]:
        was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was != now:
            yield key, was, now


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def session_of(
    folder: Path, found: Mapping[str, str], device: torch.device, first: int, warn: Callable[[str], None]
) -> list[Any]:
    """The sessions in the manifest, if there is one, and this process's after them.

    Args:
        folder: the run folder.
        found: the fingerprints of what is here.
        device: the model's.
        first: the first round of this session.
        warn: told where threads or device are not the last session's.

    Raises:
        RecordError: the manifest is damaged, or the run was started with other trainables, data or weights.
    """
    here = hardware(device)
    session = {"first_round": first, "versions": versions(), "hardware": here}
    if not (folder / MANIFEST).exists():
        return [session]
    manifest = read_manifest(folder)
    prints.require_same(folder, manifest["fingerprints"], found, "give it back, or start a new folder")
    for what in ("threads", "device", "accelerator") if manifest["sessions"] else ():
        was, now = manifest["sessions"][-1]["hardware"].get(what), here[what]
        if was != now:
            warn(
                f"{what}: {was} in the last session, {now} in this: sums may round otherwise, so the rounds "
                "to come may differ in their last bits from those of a run that was never stopped"
            )
    return [*manifest["sessions"], session]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, with the parts that are read again checked: ``fingerprints`` and ``sessions``.

    Raises:
        RecordError: it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        sound = isinstance(manifest["fingerprints"], dict)
        sound &= all(isinstance(session["hardware"], dict) for session in manifest["sessions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: missing or damaged: {type(error).__name__}") from error
    if not sound:
        raise RecordError(f"{path}: damaged: its fingerprints are no table")
    return manifest


def write_manifest(
    folder: Path, settings: Settings, task: Task, found: Mapping[str, str], sessions: list[Any]
) -> None:
    """Replace the manifest: what the run is, and every process that worked on it, this one last.

    Args:
        folder: the run folder.
        settings: the run's.
        task: its facts are told, without paths of this machine.
        found: its fingerprints.
        sessions: from :func:`session_of`.
    """
    told = ("mode", "algorithm", "model", "dtype", "seed", "labels_at", "top_at", "leaves_device")
    facts = {name: prints.at_home(getattr(settings, name)) for name in told}
    facts |= {"task": task.name, "fingerprints": dict(found), "rng": RNG_ID, "blocks": task.model.blocks}
    facts |= {"forward": "eval mode, no dropout, in every pass"}
    facts |= {"facts": facts_of(task)}
    facts |= {name: sessions[-1][name] for name in ("versions", "hardware")}
    write_json(folder / MANIFEST, {**facts, "sessions": sessions})


def facts_of(task: Task) -> dict[str, Any]:
    """A task's facts as the manifest tells them."""
    found: dict[str, Any] = finite(prints.portable(task.facts))
    return found


def require_rounds(asked: int, done: int) -> None:
    """Refuse to go on to a round that a run is past.

    Raises:
        ConfigError: says how many it needs.
    """
    if asked < done:
        raise ConfigError(f"rounds = {asked}, but {done} are done; give {done} or more")


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
