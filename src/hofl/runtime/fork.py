# SPDX-License-Identifier: Apache-2.0
"""A fork: a run goes on from its last saved state with other settings, in a folder of its own."""

from contextlib import closing
from pathlib import Path
from typing import Any

from hofl.core.record import Record
from hofl.errors import ConfigError, RecordError
from hofl.runtime import checkpoint, files, folder, ledger, prints
from hofl.runtime.folder import Settings
from hofl.runtime.rows import LOST
from hofl.runtime.start import refuse_folder
from hofl.tasks.base import Task

FIXED = ("algorithm", "seed", "model.", "task.", "partition.", "run.ledger")
"""Settings that a fork keeps: with others the state, the data or the ledger would be of another run."""

Changed = dict[str, list[Any]]
"""Setting -> what it was, and is in the fork."""


def fork(old: Path, new: Path, settings: Settings, task: Task, start: Record) -> None:
    """Give a new folder what a run has up to its checkpoint, and a changed configuration.

    The plans in the ledger say how each round was run, so the new folder replays from the first round on.
    The last of its manifest's sessions before the fork has ``forked``: from which run, after which round,
    the state's SHA-256 and the changed settings. Where boundaries follow from budgets, changed settings may
    move them: the new folder is held to those of now. Whatever is refused is refused before ``new`` is made.

    Args:
        old: a run folder; it is only read, but SQLite merges the ledger's log if the run was killed.
        new: new or empty, outside of ``old``.
        settings: of the fork.
        task: what is here; it must be what the run was started with.
        start: a state of the fork's algorithm and model; the saved one must have its arrays.

    Raises:
        ConfigError: nothing to fork, a setting that has to stay, or ``new`` cannot be used.
        RecordError: what is in the old folder is damaged, or data or weights are others now.
        HoflError: a process is writing to the old folder.
    """
    refuse_folder(old, True)
    refuse_folder(new, False)
    if old.resolve() in new.resolve().parents:
        raise ConfigError(f"--fork {new} is inside {old}, which stays as it is; give a folder outside")
    changed = _changed(old, settings)
    if not (old / folder.CHECKPOINT).is_file():
        raise ConfigError(f"{old}: no round is saved, so there is nothing to fork: start a new run")
    for name in (folder.INITIAL, folder.ROWS):
        if not (old / name).is_file():
            raise RecordError(f"{old / name}: missing, but the run has a checkpoint; {LOST}")
    with closing(ledger.read(old / folder.LEDGER)) as book:  # while it is open nobody goes on
        done, sha = _saved(old, settings, changed, start)
        manifest = folder.read_manifest(old)
        found = prints.fingerprints(task)
        prints.require_same(old, manifest["fingerprints"], found, "give it back, or start a new run")
        forked = {"run": old.resolve().name, "round": done, "state_sha256": sha, "changed": changed}
        manifest["sessions"][-1]["forked"] = forked
        if not all(map(folder.is_free, changed)):
            manifest["facts"] = folder.facts_of(task)
        with files.storage(new, "nothing was run: mend this, then fork again into a new folder"):
            new.mkdir(parents=True, exist_ok=True)
            for name in (folder.CHECKPOINT, folder.INITIAL, folder.ROWS):
                files.replace(new / name, (old / name).read_bytes())
            book.copy(new / folder.LEDGER)
            folder.write_json(new / folder.MANIFEST, manifest)
            folder.write_config(new, settings.config)  # the last: with it the folder can be resumed


def _changed(old: Path, settings: Settings) -> Changed:
    """The settings that differ.

    Raises:
        ConfigError: one of them has to stay.
    """
    changed = {}
    stored = (old / folder.CONFIG).read_text(encoding="utf-8")
    for key, was, now in folder.changes(old, stored, settings.config):
        if key.startswith(FIXED):
            raise ConfigError(
                f"{old}: {key} = {now!r} was given, this run has {was!r}; a fork keeps the method, model, "
                "data, clients, seed and ledger: start a new run"
            )
        changed[key] = [was, now]
    return changed


def _saved(old: Path, settings: Settings, changed: Changed, start: Record) -> tuple[int, str]:
    """The round of the saved state and the state's SHA-256.

    Raises:
        ConfigError: the changed settings leave it no round, or have no use for its arrays.
        RecordError: it is damaged.
    """
    state, facts = checkpoint.load(old / folder.CHECKPOINT)
    done = int(facts["round"])
    folder.require_rounds(settings.rounds, done)
    shapes, own = ({n: (str(a.dtype), a.shape) for n, a in s.arrays.items()} for s in (state, start))
    if other := sorted(name for name in shapes.keys() | own.keys() if shapes.get(name) != own.get(name)):
        what = ", ".join(key for key in changed if not folder.is_free(key)) or "nothing"
        raise ConfigError(
            f"{old}: with {what} changed, {', '.join(other)} of the saved state would have another size or "
            "no use: start a new run"
        )
    return done, checkpoint.state_sha256(state)
