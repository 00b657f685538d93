# SPDX-License-Identifier: Apache-2.0
"""A finished run's model as a folder for others to load."""

from pathlib import Path
from typing import Any

from hofl.build import active
from hofl.build_task import device_of, load_text
from hofl.checks import TEXTS
from hofl.config import load
from hofl.errors import ConfigError
from hofl.models.export import Form, export
from hofl.rebuilding import run_config
from hofl.runtime import checkpoint, folder, prints
from hofl.runtime.files import storage

_PROOF = 2
"""Examples in the batch on which the export is checked against the model."""


def export_run(where: Path, out: Path | None = None, form: Form | None = None) -> dict[str, Any]:
    """Write a run's final model as a PEFT folder or a whole model, verified in a fresh process.

    Args:
        where: the run folder.
        out: is made; nothing, or an empty folder, may be there. None for ``adapter``, ``merged`` or, of a
            model that was trained itself, ``model`` in the run folder.
        form: see :func:`hofl.models.export.export`.

    Returns:
        see :func:`hofl.models.export.export`; ``base`` is the source of the model the adapter needs.

    Raises:
        ConfigError: no such run, an unfinished one, a folder that is in use, or a task without a Hugging
            Face model.
        ModelError: what was saved computes something else.
        RecordError: the final model is damaged, or the base is not the one the run had.
        HoflError: it cannot be written.
    """
    config = load(run_config(where))
    if config.task.name not in TEXTS:
        raise ConfigError(f'{where}: task.name = "{config.task.name}" has no Hugging Face model to export')
    if out is None:
        adapted = "merged" if form == "merged" else "adapter"
        out = where / (adapted if config.model.train == "lora" else "model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; give another --out")
    if not (where / folder.FINAL).is_file():
        raise ConfigError(f"{where}: the run is not finished: hofl run --resume {where}")
    vector, layout = checkpoint.load_final(where / folder.FINAL)
    task, loaded = load_text(config, device_of(config.model.device))
    if task.model.layout.fingerprint != layout.fingerprint:
        raise ConfigError(f"{where}: the model of config.toml has another layout than the final model")
    stored, found = folder.read_manifest(where)["fingerprints"], prints.fingerprints(task)
    prints.require_same(where, stored, {"model": found["model"]}, "give the weights of then back")
    task.model.write(vector)
    client = active([len(shard) for shard in task.shards])[0]
    inputs = task.batch(client, 0, _PROOF).inputs
    with storage(out, "nothing was exported: mend this, then export again"):
        return export(
            task.model.module, out, facts=loaded.facts, inputs=inputs, tokenizer=loaded.tokenizer, form=form
        )
