# SPDX-License-Identifier: Apache-2.0
"""A fork: a run goes on from its last saved state with other settings, in a folder of its own."""

from contextlib import closing
from pathlib import Path

from hofl.errors import ConfigError
from hofl.runtime import checkpoint, files, folder, ledger
from hofl.runtime.start import refuse_folder

FIXED = ("algorithm", "seed", "model.", "task.", "partition.", "run.ledger")
"""Settings that a fork keeps: with others the state, the data or the ledger would be of another run."""


def fork(old: Path, new: Path, config: str) -> None:
    """Give a new folder what a run has up to its checkpoint, and a changed configuration.

    The plans in the ledger say how each round was run, so the new folder replays from the first round on.
    The last of its manifest's sessions before the fork has ``forked``: from which run, after which round,
    the state's SHA-256 and the changed settings.

    Args:
        old: a run folder; it is only read.
        new: new or empty.
        config: the resolved configuration as TOML.

    Raises:
        ConfigError: nothing to fork, a setting that has to stay, or ``new`` is in use.
        RecordError: what is in the old folder is damaged.
    """
    refuse_folder(old, True)
    refuse_folder(new, False)
    changed = {}
    for key, was, now in folder.changes(old, (old / folder.CONFIG).read_text(encoding="utf-8"), config):
        if key.startswith(FIXED):
            raise ConfigError(
                f"{old}: {key} = {now!r} was given, this run has {was!r}; a fork keeps the method, model, "
                "data, clients, seed and ledger: start a new run"
            )
        changed[key] = [was, now]
    if not (old / folder.CHECKPOINT).is_file():
        raise ConfigError(f"{old}: no round is saved, so there is nothing to fork: start a new run")
    with files.storage(new, "nothing was run: mend this, then fork again into a new folder"):
        new.mkdir(parents=True, exist_ok=True)
        for name in (
            folder.CHECKPOINT,
            folder.INITIAL,
            folder.ROWS,
        ):  # the checkpoint decides: it is the first
            files.replace(new / name, (old / name).read_bytes())
        with closing(ledger.read(old / folder.LEDGER)) as book:
            book.copy(new / folder.LEDGER)
        state, facts = checkpoint.load(new / folder.CHECKPOINT)
        manifest = folder.read_manifest(old)
        manifest["sessions"][-1]["forked"] = {
            "run": old.resolve().name,
            "round": facts["round"],
            "state_sha256": checkpoint.state_sha256(state),
            "changed": changed,
        }
        folder.write_json(new / folder.MANIFEST, manifest)
        folder.write_config(new, config)  # the last: with it the folder can be resumed
